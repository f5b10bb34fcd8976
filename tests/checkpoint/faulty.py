# SPDX-License-Identifier: Apache-2.0
"""Storages that count, kill or fail at the n-th call, and files that lie."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed.checkpoint.store import FileRecord, Storage

CALLS = (
    "make_dir",
    "write_file",
    "sync_dir",
    "rename",
    "replace",
    "link",
    "exchange",
    "remove",
    "remove_tree",
    "make_executable",
)


class CountingStorage(Storage):
    """Notes every changing call, and does `before(number, name, path)` first."""

    def __init__(self, before: Callable[[int, str, Path], None] | None = None) -> None:
        self.log: list[tuple[str, str]] = []
        self.before = before

    def __getattribute__(self, name: str) -> Any:
        method = object.__getattribute__(self, name)
        if name not in CALLS:
            return method

        def counted(path: Path, *rest: Any) -> Any:
            self.log.append((name, path.name))
            if self.before is not None:
                self.before(len(self.log), name, path)
            return method(path, *rest)

        return counted


def killing(at: int, sig: int = signal.SIGKILL) -> CountingStorage:
    """Sends this process a signal before its `at`-th call."""

    def before(number: int, name: str, path: Path) -> None:
        if number == at:
            os.kill(os.getpid(), sig)
            time.sleep(5)

    return CountingStorage(before)


def failing(at: int, code: int = errno.ENOSPC) -> CountingStorage:
    """Raises `OSError` at its `at`-th call, once."""

    def before(number: int, name: str, path: Path) -> None:
        if number == at:
            raise OSError(code, os.strerror(code), str(path))

    return CountingStorage(before)


class HalfWriting(Storage):
    """Dies, or runs out of space, half-way through writing the `at`-th file."""

    def __init__(self, at: int, *, kill: bool) -> None:
        self.at, self.kill, self.files = at, kill, 0

    def write_file(self, path: Path, fill: Callable[[BinaryIO], None]) -> FileRecord:
        self.files += 1
        return super().write_file(path, fill)

    def open_new(self, path: Path) -> BinaryIO:
        raw = super().open_new(path)
        return _Half(raw, self.kill) if self.files == self.at else raw  # type: ignore[return-value]


class DiesAfter(Storage):
    """Dies right after its `at`-th file is written and synced."""

    def __init__(self, at: int) -> None:
        self.at, self.files = at, 0

    def write_file(self, path: Path, fill: Callable[[BinaryIO], None]) -> FileRecord:
        record = super().write_file(path, fill)
        self.files += 1
        if self.files == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return record


class _Half:
    def __init__(self, raw: BinaryIO, kill: bool) -> None:
        self._raw, self._kill, self._written = raw, kill, 0

    def write(self, view: memoryview) -> int:
        if self._written + len(view) > 1000:
            self._raw.write(view[: len(view) // 2])
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written += len(view)
        return self._raw.write(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def __enter__(self) -> _Half:
        return self

    def __exit__(self, *exc: object) -> None:
        self._raw.close()
