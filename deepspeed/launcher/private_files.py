# SPDX-License-Identifier: Apache-2.0
"""Files that the launcher creates: pid files, per-rank logs, and claims of ports.

What must hold: a file is created, never opened where one stands already, and never through a symbolic link; pid files
lie in a folder that belongs to the user and that nobody else can write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from deepspeed.errors import LauncherError

__all__ = ["claim_port", "make_log_dir", "new_file", "pid_file", "private_dir"]


def new_file(path: Path) -> IO[bytes]:
    """Create `path` for writing, mode 0600.

    Raises:
        LauncherError: it exists already, be it as a link, or cannot be created.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise LauncherError(f"cannot create {path}: {err.strerror}") from err
    return os.fdopen(fd, "wb", buffering=0)


def make_log_dir(path: Path) -> None:
    """Create a folder for logs if it is missing, and make sure that files can be created there.

    Raises:
        LauncherError: it cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise LauncherError(f"--enable_each_rank_log: cannot create the folder {path}: {err.strerror}") from err
    if not os.access(path, os.W_OK | os.X_OK):
        raise LauncherError(f"--enable_each_rank_log: cannot write into {path}: choose another folder")


def private_dir() -> Path:
    """`deepspeed-UID` in the temporary folder, mode 0700 and owned by this user.

    Raises:
        LauncherError: it exists as something else, such as a link or another user's folder.
    """
    path = Path(tempfile.gettempdir()) / f"deepspeed-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LauncherError(f"{path} is not a private folder of this user (mode 0700): move it away, or set TMPDIR")
    return path


@contextlib.contextmanager
def pid_file(launcher_pid: int, pids: Sequence[int]) -> Iterator[Path]:
    """`LAUNCHER_PID.deepspeed` in the private folder, one pid a line, while the context lasts.

    Raises:
        LauncherError: it cannot be created.
    """
    path = private_dir() / f"{launcher_pid}.deepspeed"
    path.unlink(missing_ok=True)  # of an earlier launcher with the same pid that was killed
    with new_file(path) as file:
        file.write("".join(f"{pid}\n" for pid in pids).encode())
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def claim_port(port: int) -> Iterator[bool]:
    """Keep other launchers of this user from choosing `port` while the context lasts.

    Between the moment a launcher finds a port free and the moment its rank 0 listens there, a second launcher would
    find it free as well, and its ranks could join the first one's rendezvous.

    Yields: False if another launcher has it. Where there is no private folder, nothing is claimed and True is yielded.
    """
    with contextlib.ExitStack() as stack:
        claimed = True
        with contextlib.suppress(LauncherError):
            path = private_dir() / f"port-{port}.lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                claimed = False
        yield claimed
