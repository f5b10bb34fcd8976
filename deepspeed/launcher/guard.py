# SPDX-License-Identifier: Apache-2.0
"""The last resort: a small process that ends recorded sessions when the launcher was killed before it could.

The kernel's parent-death signal ends each rank, but not what a rank started (a wrapper script's Python, say). The guard
holds the read end of a pipe whose write end only the launcher has. When the launcher ends, however it ends, the pipe
closes, and the guard kills what is left of the sessions whose ids came through the pipe.

What must hold: the guard kills only processes of a recorded session, and their descendants, that also carry the
launcher's mark in their environment; it ends right after the launcher.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal

from deepspeed.launcher.spawn import processes_of

__all__ = ["MARK", "Guard"]

MARK = "DEEPSPEED_LAUNCH_ID"
"""Environment variable that ranks of one launcher share, with a random value."""


class Guard:
    """Write end of the pipe, held by the launcher."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(writer)
                _watch(reader, self.mark)
            finally:
                os._exit(0)
        os.close(reader)
        self._writer = writer

    def watch(self, session: int) -> None:
        """Record a session that must not outlive this process."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the parent-death signals remain
            os.write(self._writer, b"%d\n" % session)

    def dismiss(self) -> None:
        """End the guard; it kills whatever is still left of the recorded sessions, and is reaped."""
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _watch(reader: int, mark: str) -> None:
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    text = b""
    while chunk := os.read(reader, 4096):
        text += chunk
    sessions = {int(line) for line in text.split()}
    for pid in processes_of(sessions) if sessions else []:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = f"{MARK}={mark}".encode() in file.read().split(b"\0")
            if marked:
                os.kill(pid, signal.SIGKILL)
