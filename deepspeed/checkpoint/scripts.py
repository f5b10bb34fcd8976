# SPDX-License-Identifier: Apache-2.0
"""The converter programs that a save puts beside the tags.

What must hold: the files are the package's own modules, copied as they are, and run with this package alone installed.
"""

from __future__ import annotations

from pathlib import Path

from deepspeed.checkpoint.store import Storage
from deepspeed.checkpoint.writer import new_nonce

__all__ = ["put_converters"]


def put_converters(storage: Storage, folder: Path) -> None:
    """Put ``zero_to_fp32.py`` and ``zero_to_torch.py`` into ``folder``, where they are not there already.

    No checkpoint depends on them, so nothing is synced.
    """
    home = Path(__file__).resolve().parents[1] / "utils"
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        text, path = (home / name).read_bytes(), folder / name
        if path.is_file() and not path.is_symlink() and path.read_bytes() == text:
            continue
        temporary = folder / f".{name}.{new_nonce()}.tmp"
        with storage.open_new(temporary) as handle:
            handle.write(text)
        storage.make_executable(temporary)
        storage.replace(temporary, path)
