# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for names that clients import at the top of a module and use only on a path that most runs never take.

What must hold: importing one costs nothing and succeeds, nothing is an instance of one, and using one is an error that
names it, what it belongs to, and what to do.
"""

from __future__ import annotations

from typing import Any, NoReturn

from deepspeed.errors import NotSupportedError


def not_built(path: str, feature: str, remedy: str) -> type:
    """A class for the name at ``path`` (dotted, as clients import it), which cannot be made or called.

    A function is stood in for by a class too: calling it raises just the same.
    """
    module, _, name = path.rpartition(".")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(f"{path}: {feature} is not part of this package; {remedy}")

    return type(name, (), {"__module__": module, "__doc__": f"Not built: {feature}.", "__new__": refuse})
