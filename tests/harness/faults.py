# SPDX-License-Identifier: Apache-2.0
"""Faults at seams: watch calls of a function that other code looks up on an owner (a module or an object).

    with watch(wire, "gather", delay(0.05)) as seen: ...     # seen.calls, seen.log
    with watch(store, "write", kill(at=3)): ...              # SIGKILL to this process before the 3rd call

What must hold: the wrapped function keeps its behaviour except for the fault; the owner is restored whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """Calls so far (1 for the first) and, if asked for, what was noted of each."""

    calls: int = 0
    log: list[Any] = field(default_factory=list)


Action = Callable[[int, tuple[Any, ...], dict[str, Any]], None]
Note = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def nothing(_call: int, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Only count."""


def delay(seconds: float, at: int | None = None) -> Action:
    """Sleep before every call, or before the `at`-th only."""

    def act(call: int, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if at is None or call == at:
            time.sleep(seconds)

    return act


def fail(error: BaseException, at: int = 1) -> Action:
    """Raise before the `at`-th call."""

    def act(call: int, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if call == at:
            raise error

    return act


def kill(at: int = 1, sig: signal.Signals = signal.SIGKILL) -> Action:
    """Send this process a signal before the `at`-th call. For `run_fresh` only."""

    def act(call: int, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if call == at:
            os.kill(os.getpid(), sig)

    return act


@contextlib.contextmanager
def watch(owner: Any, name: str, action: Action = nothing, note: Note | None = None) -> Iterator[Seen]:
    """Wrap `owner.name` while the context lasts. `note(args, kwargs)` is appended to `Seen.log` at each call."""
    original = getattr(owner, name)
    own = name in vars(owner)
    seen = Seen()

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen.calls += 1
        if note is not None:
            seen.log.append(note(args, kwargs))
        action(seen.calls, args, kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)
    try:
        yield seen
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
