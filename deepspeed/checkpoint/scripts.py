# SPDX-License-Identifier: Apache-2.0
"""The converter programs that a save puts beside the tags.

What must hold: the files are the package's own modules, copied as they are, and run with this package alone installed.
"""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["converter_scripts"]


@functools.cache
def converter_scripts() -> tuple[tuple[str, bytes], ...]:
    """(file name, content) of ``zero_to_fp32.py`` and ``zero_to_torch.py``."""
    folder = Path(__file__).resolve().parents[1] / "utils"
    return tuple((name, (folder / name).read_bytes()) for name in ("zero_to_fp32.py", "zero_to_torch.py"))
