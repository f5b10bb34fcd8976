# SPDX-License-Identifier: Apache-2.0
"""Gathers and reductions as messages from rank to rank, for gloo: no flat copies, half of the bytes of its reduction.

Gloo's collectives copy into flat buffers and out of them, and its reduce-scatter is an all-reduce. Here a rank sends
its slice to every other and receives theirs where they belong; of a reduction it receives the others' slices of its
part and adds them up in rank order, so that the result does not depend on timing. A 12 MB unit of seven tensors on two
ranks of one core each: gather 22 to 8 ms, reduction 20 to 10 ms.

Messages between two ranks arrive in the order of issue, per tag. The tag tells what is sent and how many bytes, and is
apart from what a user sends: where ranks issue different collectives, a message that would not fit is never received,
so that the wait for it ends as that for a lost rank; gloo would abort the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .wire import Channel

GATHER, REDUCE = 2 << 29, 3 << 29
SIZES = 1 << 29

Pair = tuple[torch.Tensor, int, torch.Tensor, int]
"""A message each way: received into, from which rank; what is sent, to which rank."""


class Messages:
    """Sends and receives in flight, from (into, source, piece, to). ``wait`` returns once all have arrived and
    ``finish``, if any, has run.

    What must hold: memory may be freed once issuing or waiting has failed. A message that is let go of is not received,
    and nothing else holds one (the frames of an exception would).
    """

    __slots__ = ("finish", "works")

    def __init__(
        self, channel: Channel, kind: int, pairs: Iterable[Pair], finish: Callable[[], None] | None = None
    ) -> None:
        works: list[Any] = []
        self.works, self.finish, group = works, finish, channel.group
        try:
            for into, source, piece, to in pairs:
                tag = kind + piece.nbytes % SIZES
                works.append(group.recv([into], source, tag))
                works.append(group.send([piece], to, tag))
        except BaseException:
            works.clear()
            raise

    def wait(self) -> None:
        """Raises RuntimeError where a rank is gone or too late; nothing is written to the outputs after that."""
        works = self.works
        try:
            while works:
                works.pop().wait()
        except RuntimeError:
            works.clear()
            raise
        except BaseException:  # an interrupt: without the rest, every later message would arrive as another
            self.wait()
            raise
        if self.finish is not None:
            self.finish()


def _peers(channel: Channel) -> list[tuple[int, int]]:
    """Whom this rank sends to and receives from, turn by turn: no rank is everybody's first."""
    rank, size = channel.rank, channel.size
    return [((rank + turn) % size, (rank - turn) % size) for turn in range(1, size)]


def _slice(full: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    return full[rank * n : (rank + 1) * n]


def gather(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel) -> Messages:
    """See ``wire.gather``."""

    def pairs() -> Iterator[Pair]:
        for to, source in _peers(channel):
            for out, mine in zip(outs, ins, strict=True):
                yield _slice(out, source, mine.numel()), source, mine, to

    messages = Messages(channel, GATHER, pairs())
    for out, mine in zip(outs, ins, strict=True):
        _slice(out, channel.rank, mine.numel()).copy_(mine)
    return messages


def reduce_scatter(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, average: bool
) -> Messages:
    """See ``wire.reduce_scatter``."""
    rank, divisor = channel.rank, channel.size if average else 1
    parts: list[list[torch.Tensor]] = []
    for out, full in zip(outs, ins, strict=True):
        mine = _slice(full, rank, out.numel())
        parts.append([mine if other == rank else torch.empty_like(out) for other in range(channel.size)])

    def pairs() -> Iterator[Pair]:
        for to, source in _peers(channel):
            for out, full, part in zip(outs, ins, parts, strict=True):
                yield part[source], source, _slice(full, to, out.numel()), to

    def finish() -> None:
        for out, part in zip(outs, parts, strict=True):
            _add_up(out, part, divisor)
        parts.clear()

    return Messages(channel, REDUCE, pairs(), finish)


def _add_up(out: torch.Tensor, parts: list[torch.Tensor], divisor: int) -> None:
    """``out`` = sum of ``parts`` in order, divided; 16-bit numbers are added in fp32 and rounded once."""
    wide = out.dtype.is_floating_point and out.element_size() < 4
    total = torch.empty_like(out, dtype=torch.float32) if wide else out
    torch.add(parts[0].to(total.dtype), parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    if divisor > 1:
        total.div_(divisor)
    if wide:
        out.copy_(total)
