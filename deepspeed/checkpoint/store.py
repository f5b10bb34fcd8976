# SPDX-License-Identifier: Apache-2.0
"""The storage seam: every byte and name that a checkpoint puts on disk goes through one small object.

What must hold: a name becomes visible only after what it names was written and synced.  `Storage` has no policy; the
order of calls is the save protocol (`writer.py`), and tests replace `Storage` by one that counts, fails or kills before
the n-th call.

Paths that come from users or files are turned into paths here, by `safe_component` alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from deepspeed.errors import CheckpointError

__all__ = ["FileRecord", "HashingSink", "Storage", "safe_component"]

_BIG = 1 << 20  # bytes from which hashing beside writing pays for the hand-over
_BUFFER = 4 << 20  # a multiple of every block size


@dataclass(frozen=True)
class FileRecord:
    """What was written: file name, size in bytes, sha256 as hexadecimal text."""

    name: str
    size: int
    sha256: str


def safe_component(tag: str) -> str:
    """`tag` if it is one plain path component, else `ValueError`: no separators, no ``..``, no hidden names."""
    if not isinstance(tag, str):
        raise ValueError(f"a checkpoint tag is text, got {type(tag).__name__}")
    if not tag.strip() or tag != tag.strip():
        raise ValueError(f"checkpoint tag {tag!r} is empty or has blanks around it")
    if any(ord(char) < 32 or char in "/\\\x7f" for char in tag):
        raise ValueError(f"checkpoint tag {tag!r} has a path separator or control character; use one plain name")
    if tag.startswith(".") or tag in ("latest", "latest_universal"):
        raise ValueError(f"checkpoint tag {tag!r} is reserved; use one plain name such as 'global_step100'")
    if len(os.fsencode(tag)) > 200:
        raise ValueError(f"checkpoint tag of {len(tag)} characters is too long for a folder name")
    return tag


class HashingSink:
    """A binary sink that writes through and hashes what it writes.

    Data goes through one aligned buffer.  From the first full one on, the file is written past the page cache where the
    system allows that: checkpoints are rarely read back soon, and filling the cache with them costs more processor time
    than hashing.  Large pieces are hashed beside the write.  Call `finish` once; it writes what is left.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._buffer = mmap.mmap(-1, _BUFFER)
        self._held = 0
        self._direct: bool | None = None  # None: not tried yet
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        if view.nbytes >= _BIG:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="ds-checkpoint-hash")
            hashing = self._pool.submit(self._hash.update, view)
            try:
                self._put(view)
            finally:
                hashing.result()
        else:
            self._hash.update(view)
            self._put(view)
        self.size += view.nbytes
        return view.nbytes

    def _put(self, view: memoryview) -> None:
        while view.nbytes:
            count = min(view.nbytes, _BUFFER - self._held)
            self._buffer[self._held : self._held + count] = view[:count]
            self._held += count
            view = view[count:]
            if self._held == _BUFFER:
                if self._direct is None:
                    self._direct = _set_direct(self._raw, True)
                self._flush_buffer()

    def _flush_buffer(self) -> None:
        with memoryview(self._buffer) as whole, whole[: self._held] as rest:
            done = 0
            while done < self._held:
                try:
                    with rest[done:] as piece:
                        done += self._raw.write(piece)
                except OSError as failure:
                    if not self._direct or failure.errno != errno.EINVAL:
                        raise
                    self._direct = not _set_direct(self._raw, False)  # the file system refused after all
        self._held = 0

    def flush(self) -> None:
        """Nothing to do: `finish` writes what is held."""

    def finish(self) -> None:
        """Write what is held."""
        if self._direct:
            _set_direct(self._raw, False)
            self._direct = False
        if self._held:
            self._flush_buffer()

    def close(self) -> None:
        """Give the buffer and the thread back."""
        if self._pool is not None:
            self._pool.shutdown()
        self._buffer.close()

    def digest(self) -> str:
        """sha256 of what was written."""
        return self._hash.hexdigest()


def _set_direct(raw: BinaryIO, on: bool) -> bool:
    """Switch writing past the page cache; whether that worked."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        flags = fcntl.fcntl(raw.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(raw.fileno(), fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return True


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(other))
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


class Storage:
    """The few operations that change a checkpoint folder.  Every one may raise `OSError`."""

    def make_dir(self, path: Path) -> None:
        """Create `path` and its parents; existing is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def open_new(self, path: Path) -> BinaryIO:
        """An unbuffered file for writing that did not exist before (a symbolic link is never followed)."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        return cast(BinaryIO, os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0))

    def write_file(self, path: Path, fill: Callable[[BinaryIO], None]) -> FileRecord:
        """Create `path`, let `fill` write it, sync it; returns its size and hash."""
        with self.open_new(path) as raw:
            sink = HashingSink(raw)
            try:
                fill(cast(BinaryIO, sink))
                sink.finish()
            finally:
                sink.close()
            os.fsync(raw.fileno())
        return FileRecord(path.name, sink.size, sink.digest())

    def sync_dir(self, path: Path) -> None:
        """Make names in `path` durable."""
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder; fails where `target` exists and is not empty."""
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Put `source` in the place of the file `target`, atomically."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give the file `source` a second name."""
        os.link(source, target, follow_symlinks=False)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two folders in one step; `OSError` where the system or file system cannot."""
        _exchange(one, other)

    def remove(self, path: Path) -> None:
        """Remove a file; missing is fine."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it; missing is fine."""
        shutil.rmtree(path, ignore_errors=True)

    def make_executable(self, path: Path) -> None:
        """Set the executable bits that the umask allows."""
        path.chmod(path.stat().st_mode | 0o111)

    def list_dir(self, path: Path) -> list[str]:
        """Names in `path`, sorted; an absent folder is empty."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    @contextmanager
    def locked(self, folder: Path, timeout: float) -> Iterator[None]:
        """Hold the exclusive lock of `folder` (advisory, ends with the process); `CheckpointError` after `timeout` s.

        On file systems without locks the body runs unlocked.
        """
        handle = os.open(folder, os.O_RDONLY)
        try:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                        break
                if time.monotonic() > deadline:
                    raise CheckpointError(f"{folder} is being published by another job for more than {timeout:g} s")
                time.sleep(0.05)
            yield
        finally:
            os.close(handle)
