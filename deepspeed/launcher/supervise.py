# SPDX-License-Identifier: Apache-2.0
"""Waiting for children and signals, and ending everything within one grace period.

What must hold:
- A signal is only ever recorded by its handler, never acted on there, so that it cannot interrupt spawning half-way.
- All children are signalled in parallel; the grace period starts once and is the total.
- Processes that even SIGKILL does not end (a hung driver) are named and left behind, not waited for without end.
- The result is the first failing child's code (n, or 128 + s), or 128 + s for a signal that this process received.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from deepspeed.errors import LauncherError

__all__ = ["ORPHAN_GRACE", "Inbox", "Supervised", "supervise"]

logger = logging.getLogger("deepspeed.launcher")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEBOUNCE = 0.3
"""Seconds within which a repeated signal counts as the same one (a terminal and a manager both send it)."""
_INTERRUPT_PATIENCE = 2.0
"""Seconds after which SIGINT and SIGHUP are followed by SIGTERM."""
ORPHAN_GRACE = 0.5
"""Usual grace period when our own parent is gone: nobody is left to wait for."""
_RELAY_EXTRA = 1.0
"""Seconds that a supervisor of supervisors waits longer than they do."""
_KILL_PATIENCE = 5.0
"""Seconds after SIGKILL at which a process counts as one that cannot be ended."""


class Supervised(Protocol):
    """What is supervised: `spawn.Child`, or a connection to another host."""

    name: str
    pid: int

    def exit_code(self) -> int | None: ...
    def signal(self, signum: int) -> None: ...
    def signal_all(self, signum: int) -> None: ...
    def rest(self) -> list[int]: ...
    def release(self) -> None: ...


def heed_signals() -> None:
    """Undo what this process was started with: ignored or blocked signals that the job's end relies on.

    A shell starts background jobs with SIGINT ignored, some supervisors start everything so; it would pass on to every
    rank. An ignored SIGHUP (`nohup`) is a wish, and stays. The first call of every command of the launcher.
    """
    relied_on = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    for signum in relied_on:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, relied_on)


class Inbox:
    """Records signals, and watches descriptors, while it is entered. Use it in the main thread, before spawning.

    A signal that is ignored on entry stays ignored: see `heed_signals`.
    """

    def __init__(self) -> None:
        self._readers: dict[int, Callable[[], bool]] = {}
        self._posted: list[int] = []

    def __enter__(self) -> Inbox:
        self._parent = os.getppid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        try:
            self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError as err:
            raise LauncherError("the launcher must run in the main thread, because it handles signals") from err
        self._old = {
            signum: signal.signal(signum, lambda *_: None)
            for signum in (*_ENDING, signal.SIGCHLD)
            if signal.getsignal(signum) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)

    def orphaned(self) -> bool:
        """Whether the process that started this one has ended."""
        return os.getppid() != self._parent

    def watch(self, descriptor: int, on_readable: Callable[[], bool]) -> None:
        """Call `on_readable` when the descriptor is readable, until it returns False."""
        self._readers[descriptor] = on_readable

    def post(self, signum: int) -> None:
        """Record a signal that came another way, such as over a control connection."""
        self._posted.append(signum)

    def wait(self, seconds: float) -> list[int]:
        """Wait until something happens, at most `seconds`; return the ending signals that arrived."""
        if not self._posted:
            ready, _, _ = select.select([self._read, *self._readers], [], [], max(0.0, seconds))
            for descriptor in ready:
                if descriptor != self._read and not self._readers[descriptor]():
                    del self._readers[descriptor]
        received = self._posted
        self._posted = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, 512):
                received.extend(signum for signum in data if signum in _ENDING)
        return received


class _Ending:
    """The one grace period: who was told what, and when the next, harder step is due."""

    def __init__(self, children: Sequence[Supervised], signum: int, grace: float, relay: bool) -> None:
        self.children = children
        self.relay = relay
        started = time.monotonic()
        self.deadline = started + grace + (_RELAY_EXTRA if relay else 0.0)
        soft = signum in (signal.SIGINT, signal.SIGHUP) and not relay
        self.terminate_at = started + min(_INTERRUPT_PATIENCE, grace / 2) if soft else None
        self._leftovers_told: set[int] = set()
        for child in children:
            child.signal(signum)

    def advance(self) -> float:
        """Do what is due; return the seconds until something else is."""
        now = time.monotonic()
        if now >= self.deadline:
            for child in self.children:
                child.signal_all(signal.SIGKILL)
            return 0.05
        if self.terminate_at is not None and now >= self.terminate_at:
            self.terminate_at = None
            for child in self.children:
                child.signal(signal.SIGTERM)
        for index, child in enumerate(self.children):
            # What a rank leaves behind gets a signal once the rank itself has ended, not before: a rank that saves its
            # work on SIGTERM still needs its helpers.
            if index not in self._leftovers_told and child.exit_code() is not None:
                self._leftovers_told.add(index)
                child.signal_all(signal.SIGTERM)
        due = [self.deadline] if self.terminate_at is None else [self.deadline, self.terminate_at]
        return max(0.0, min(due) - now)

    def hurry(self, signum: int) -> None:
        """A second signal: no more patience."""
        self.deadline = min(self.deadline, time.monotonic() + (_RELAY_EXTRA if self.relay else 0.0))
        if self.relay:
            for child in self.children:
                child.signal(signum)

    def hopeless(self) -> bool:
        """Whether SIGKILL had no effect either."""
        return time.monotonic() > self.deadline + _KILL_PATIENCE


def supervise(
    children: Sequence[Supervised],
    inbox: Inbox,
    grace: float,
    *,
    relay: bool = False,
    orphan_grace: float = ORPHAN_GRACE,
) -> int:
    """Wait until every child has ended and nothing is left of their sessions.

    Args:
        children: what was spawned while `inbox` was entered.
        grace: seconds, in total, between the first signal and SIGKILL.
        relay: the children are supervisors with the same grace period: they get each signal as it comes, and time to
            finish their own work.
        orphan_grace: upper limit of the grace period when a signal comes because our own parent has ended.

    Returns: 0 if every child ended with 0; else the first failure's code, or 128 + s for a received signal s.
    """
    code = 0
    reported: set[int] = set()
    ending: _Ending | None = None
    last_signal: float | None = None
    while True:
        failed = False
        for index, child in enumerate(children):
            ended = child.exit_code()
            if ended and index not in reported:
                reported.add(index)
                failed = True
                if ending is None:
                    code = code or ended
                    # A launcher that failed has said why itself, unless a signal ended it.
                    known = relay and len(children) == 1 and ended < 128
                    logger.log(logging.DEBUG if known else logging.ERROR, "%s %s", child.name, _describe(ended))
        running = [child for child in children if child.exit_code() is None]
        if not running and not any(child.rest() for child in children):
            break
        if ending is None and (failed or not running):
            if running:
                logger.info("ending the other %d process(es), within %g s", len(running), grace)
            ending = _Ending(children, signal.SIGTERM, grace, relay)
        if ending is not None and ending.hopeless():
            stuck = sorted({pid for child in children for pid in ([child.pid] if child in running else child.rest())})
            logger.error("process(es) %s do not end even on SIGKILL and are left behind", stuck)
            return code or 1
        pause = ending.advance() if ending is not None else 3600.0
        if ending is not None and not running:
            pause = min(pause, 0.1)  # leftovers are not our children: their end is not announced
        for signum in inbox.wait(pause):
            now = time.monotonic()
            if ending is None:
                name = signal.Signals(signum).name
                orphaned = inbox.orphaned()
                level = logging.DEBUG if relay and len(children) == 1 else logging.INFO
                logger.log(level, "received %s%s: ending every process", name, ", our parent ended" if orphaned else "")
                code = code or 128 + signum
                ending = _Ending(children, signum, min(grace, orphan_grace) if orphaned else grace, relay)
            elif last_signal is not None and now - last_signal > _DEBOUNCE:
                ending.hurry(signum)
            last_signal = now
    for child in children:
        child.release()
    return code


def _describe(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name} (exit code {code})"
    return f"failed with exit code {code}"
