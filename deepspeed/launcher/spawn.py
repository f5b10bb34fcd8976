# SPDX-License-Identifier: Apache-2.0
"""One child process that cannot outlive its parent, and the processes that descend from it.

What must hold: a child leads a session of its own and receives a signal from the kernel when its parent dies, however
it dies. It is not reaped before it is released, so that its id, which is also its session's, names nobody else; a
signal goes only to processes that were found under that id.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TypeVar

from deepspeed.errors import LauncherError

__all__ = ["Child", "processes_of", "spawn"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

# Children start with the usual disposition of these, whatever their parent does with them. Only a SIGHUP that the
# parent was told to ignore (`nohup`) they ignore too.
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class Child:
    """A process started by `spawn`."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.popen = popen
        self.pid = popen.pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """`None` while it runs, then n, or 128 + s where signal s ended it. Does not reap."""
        if self._code is None:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._code = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
        return self._code

    def signal(self, signum: int) -> None:
        """Send a signal to the process itself, if it still runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def rest(self) -> list[int]:
        """Other live processes of its session and its descendants."""
        return [pid for pid in processes_of({self.pid}) if pid != self.pid]

    def signal_all(self, signum: int) -> None:
        """Send a signal to the process, its session and its descendants."""
        members = self.rest()
        self.signal(signum)
        for pid in members:
            _signal_if_member(pid, self.pid, signum)

    def release(self) -> None:
        """Reap it. Afterwards its id may name somebody else, and is not used again."""
        self.popen.wait()


ChildType = TypeVar("ChildType", bound=Child)


def spawn(
    kind: type[ChildType],
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    death_signal: int = signal.SIGKILL,
    cwd: str | None = None,
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    cpus: Sequence[int] | None = None,
    pass_fds: Sequence[int] = (),
) -> ChildType:
    """Start `argv` in a session of its own.

    Args:
        kind: class of the result, `Child` or one of its subclasses.
        name: what messages call it, such as `rank 3`.
        death_signal: what the kernel sends it when this process dies.
        pass_fds: descriptors that it inherits beside the standard three.
        cpus: cores that it may run on; all of ours by default.

    Raises:
        LauncherError: the program cannot be started; names it and the reason.
    """
    parent = os.getpid()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
    keep_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def prepare() -> None:  # in the child, between fork and exec
        _libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + death_signal)
        if cpus:
            os.sched_setaffinity(0, cpus)
        for signum in _RESET:
            signal.signal(signum, signal.SIG_IGN if keep_ignored and signum == signal.SIGHUP else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    try:
        popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=prepare,
            pass_fds=tuple(pass_fds),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        raise LauncherError(f"{name}: cannot start {argv[0]!r}: {err}") from err
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return kind(name, popen)


def processes_of(roots: set[int]) -> list[int]:
    """Live processes whose session is one of `roots`, or that descend from one of them."""
    table = dict(_process_table())
    found = {pid for pid, (_, session) in table.items() if session in roots or pid in roots}
    grew = True
    while grew:
        more = {pid for pid, (parent, _) in table.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return sorted(found & table.keys())


def _process_table() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (parent, session)) of every process that is not a zombie."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (row := _read_stat(int(entry))) is not None:
            yield int(entry), row


def _read_stat(pid: int) -> tuple[int, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[3]))


def _signal_if_member(pid: int, root: int, signum: int) -> None:
    """Signal `pid` if it still belongs to `root` once a handle is held that no other process can take over."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as err:
        if err.errno == errno.ENOSYS and pid in processes_of({root}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return
    try:
        if pid in processes_of({root}):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, signum)
    finally:
        os.close(handle)
