# SPDX-License-Identifier: Apache-2.0
"""One verdict on all ranks: small JSON messages over torch.distributed, every wait bounded.

What must hold: `agree` either returns on every rank or raises on every rank, with the same class and text, naming
the ranks and what went wrong there.  Messages are JSON; nothing that came from a file is unpickled on the way.

The messages travel over a gloo group of their own, so that a save called by some ranks only cannot mix with the
collectives of training, ends by its own timeout, and never waits for the device.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, CheckpointUnsafe, NotSupportedError

__all__ = ["Control", "default_timeout"]

_KINDS = (CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe, CheckpointError, NotSupportedError, ValueError)
_CLASSES: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}
_groups: list[tuple[Any, float, Any]] = []  # (default group, timeout, gloo group), all of the current default group


def default_timeout() -> float:
    """Seconds that a rank waits for the others: `DEEPSPEED_TIMEOUT` (minutes) or 30 minutes."""
    try:
        return max(1.0, float(os.environ.get("DEEPSPEED_TIMEOUT", "30")) * 60)
    except ValueError:
        return 1800.0


def _gloo_group(timeout: float) -> Any:
    world = dist.group.WORLD
    _groups[:] = [entry for entry in _groups if entry[0] is world]
    for _, seconds, group in _groups:
        if seconds == timeout:
            return group
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
    _groups.append((world, timeout, group))
    return group


@dataclass
class Control:
    """The ranks that save or load together.

    ``timeout``: seconds after which a missing rank ends the operation.  ``call``: the user's call, for messages.
    """

    rank: int
    world_size: int
    call: str
    timeout: float

    def gather(self, payload: dict[str, Any], what: str) -> list[dict[str, Any]]:
        """Every rank's `payload` in rank order; `CheckpointError` when a rank does not answer in time."""
        if self.world_size == 1:
            return [json.loads(json.dumps(payload))]
        try:
            return self._exchange(json.dumps(payload).encode())
        except (RuntimeError, OSError) as error:  # torch raises RuntimeError and subclasses for lost or late ranks
            raise CheckpointError(
                f"{self.call}: not every rank answered within {self.timeout:g} s ({what}). All ranks must make this "
                f"call, and all must be alive. {self._missing(error)}"
            ) from error

    def _exchange(self, raw: bytes) -> list[dict[str, Any]]:
        group = _gloo_group(self.timeout)
        size = torch.tensor([len(raw)], dtype=torch.int64)
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size, group=group)
        longest = max(int(entry) for entry in sizes)
        message = torch.zeros(longest, dtype=torch.uint8)
        message[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        parts = [torch.zeros_like(message) for _ in range(self.world_size)]
        dist.all_gather(parts, message, group=group)
        return [json.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, sizes, strict=True)]

    def _missing(self, error: BaseException) -> str:
        return f"Rank {self.rank} saw: {' '.join(str(error).split())[:400]}"

    def agree(
        self, what: str, error: BaseException | None = None, payload: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Exchange outcomes; raise on every rank if any rank failed, else return every rank's `payload`."""
        message: dict[str, Any] = {"payload": payload or {}}
        if error is not None:
            message["error"] = [_class_name(error), f"{_text(error)}"]
        try:
            answers = self.gather(message, what)
        except CheckpointError as lost:
            if error is not None:
                raise _error(_class_name(error), f"{self.call} failed ({what}): {_text(error)}") from error
            raise lost
        failed = [(rank, *answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        if not failed:
            return [answer["payload"] for answer in answers]
        raise _error(failed[0][1], self._verdict(what, failed)) from error

    def _verdict(self, what: str, failed: list[tuple[int, str, str]]) -> str:
        if len(failed) == self.world_size and len({text for _, _, text in failed}) == 1:
            return f"{self.call} failed on all ranks ({what}): {failed[0][2]}"
        shown = "; ".join(f"rank {rank}: {text}" for rank, _, text in failed[:8])
        more = f"; and {len(failed) - 8} more ranks" if len(failed) > 8 else ""
        return f"{self.call} failed ({what}): {shown}{more}"


def _text(error: BaseException) -> str:
    if isinstance(error, tuple(_CLASSES.values())):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _class_name(error: BaseException) -> str:
    for name, kind in _CLASSES.items():
        if isinstance(error, kind):
            return name
    return "CheckpointError"


def _error(name: str, text: str) -> Exception:
    return _CLASSES.get(name, CheckpointError)(text)
