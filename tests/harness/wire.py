# SPDX-License-Identifier: Apache-2.0
"""How the pool and its workers talk: length-framed pickles over an inherited socket pair.

Both ends are processes that this test run started itself, so pickle is safe here. Plain pickle is used instead of
`Connection.send`, because the latter hands tensors over as shared-memory descriptors, which die with their sender.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

READY = b"ready"  # what a worker says once torch is imported


@dataclass
class Job:
    """One call on one rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    group_timeout: float
    init_group: bool = True
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Reply:
    """What one rank answers: a value, or the text of an exception."""

    value: Any = None
    error_type: str | None = None
    error_text: str = ""
    traceback: str = ""


def dump(message: Any) -> bytes:
    return pickle.dumps(message)


def load(frame: bytes) -> Any:
    return pickle.loads(frame)


def dump_job(job: Job) -> bytes:
    """The import path goes first and separately: the function is looked up by name while the job is decoded."""
    return dump((list(sys.path), dump(job)))


def load_job(frame: bytes) -> Job:
    path, payload = load(frame)
    sys.path[:] = path
    return load(payload)
