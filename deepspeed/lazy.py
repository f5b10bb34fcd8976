# SPDX-License-Identifier: Apache-2.0
"""Submodules as attributes: after `import deepspeed`, `deepspeed.utils.logging` is there without having been imported.

Clients write such paths out and import nothing but the package (Lightning's strategy does). A package that calls
`submodules` stays free of imports of its own and loads a file when its name is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def submodules(package: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for `package` that imports the submodule asked for; AttributeError where there is none."""

    def load(name: str) -> Any:
        path = f"{package}.{name}"
        if name.startswith("__") or importlib.util.find_spec(path) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(path)

    return load
