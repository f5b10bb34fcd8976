# SPDX-License-Identifier: Apache-2.0
"""The collectives of the core: free functions ``(outputs, inputs, channel) -> handle``, stateless and zero-copy.

Two ways lie behind the same two calls. On NCCL (and in the ``fake`` group, which counts) all tensors of a unit go in
one *grouped* call that reads and writes them in place. Gloo's grouped call flattens inside, so there ranks send each
other their slices (``direct``). Source for the grouped form: NCCL group calls; for the trap of many tiny tensors in one
group: NVIDIA/nccl#725, hence ``PACK_BELOW_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import direct

PACK_BELOW_BYTES = 256 * 1024
"""Slices smaller than this are packed into one where a call has more than ``PACK_ABOVE_COUNT`` of them."""
PACK_ABOVE_COUNT = 16


class Handle(Protocol):
    """A collective in flight. ``wait`` returns once later work of this stream may use the outputs."""

    def wait(self) -> Any: ...


class Done:
    """Handle of work that is complete already."""

    def wait(self) -> None:
        return None


DONE = Done()


class Then:
    """Handle of packed tensors: waits, then does what ``finish`` says. ``keep`` lives until then."""

    __slots__ = ("finish", "keep", "work")

    def __init__(self, work: Handle, finish: Callable[[], Any], keep: torch.Tensor | None = None) -> None:
        self.work, self.finish, self.keep = work, finish, keep

    def wait(self) -> None:
        self.work.wait()
        self.finish()


@dataclass(eq=False)
class Channel:
    """A process group with what the wire needs to know of it, read once.

    ``group`` is None for a group of one rank: then nothing is sent.
    """

    group: Any
    size: int
    rank: int
    ranks: tuple[int, ...]
    backends: dict[str, str] = field(default_factory=dict)
    options: dict[bool, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Channel:
        """Channel of ``group`` (None: the default group; a world of one without a group is allowed)."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 1, 0, (0,))
        group = group if group is not None else c10d._get_default_group()
        size = dist.get_world_size(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls(group if size > 1 else None, size, dist.get_rank(group), ranks)

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves tensors on ``device``, "none" where there is none."""
        kind = device.type
        name = self.backends.get(kind)
        if name is None:
            try:
                backend = self.group._get_backend(torch.device(kind)) if self.group is not None else None
            except RuntimeError:  # torch raises where the group has no backend for this kind of device
                backend = None
            name = backend.name().lower() if backend is not None else "none"
            self.backends[kind] = name
        return name

    @property
    def timeout(self) -> float:
        """Seconds after which a collective of the group fails; 0 where its backend does not tell."""
        for kind in ("cuda", "cpu"):
            if self.backend(torch.device(kind)) != "none":
                options = getattr(self.group._get_backend(torch.device(kind)), "options", None)
                found = getattr(options, "_timeout", None)
                if isinstance(found, timedelta):
                    return found.total_seconds()
        return 0.0

    def reduce_options(self, average: bool) -> Any:
        """Options of a reduce-scatter that averages or sums, built once."""
        options = self.options.get(average)
        if options is None:
            options = c10d.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM  # type: ignore[assignment]
            self.options[average] = options
        return options

    def global_rank(self, group_rank: int) -> int:
        """The rank in the default group of this channel's member ``group_rank``."""
        return self.ranks[group_rank]


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One 1-D view over ``tensors`` where they lie side by side in one storage, else None."""
    first = tensors[0]
    end = first.storage_offset() + first.numel()
    pointer = first.untyped_storage().data_ptr()
    for tensor in tensors[1:]:
        if tensor.storage_offset() != end or tensor.untyped_storage().data_ptr() != pointer:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def gather(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel) -> Handle:
    """All-gather every ``ins[i]`` (1-D, n elements) into ``outs[i]`` (1-D, ``channel.size * n``), in rank order.

    One call on the wire for the whole list. ``outs`` must not be used before the handle was waited for.
    """
    if channel.group is None:
        torch._foreach_copy_(list(outs), list(ins))
        return DONE
    small = _small(ins)
    return _gather(outs, ins, channel) if small is None else _gather_packed(outs, ins, channel, small)


def _gather(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel) -> Handle:
    if channel.backend(ins[0].device) == "gloo":
        return direct.gather(outs, ins, channel)
    if len(ins) == 1:
        return channel.group._allgather_base(outs[0], ins[0])
    return channel.group.allgather_into_tensor_coalesced(outs, ins)


def reduce_scatter(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, average: bool = True
) -> Handle:
    """Reduce every ``ins[i]`` (1-D, ``channel.size * n``) over ranks and keep this rank's slice in ``outs[i]`` (n).

    One call on the wire for the whole list. ``ins`` and ``outs`` must stay untouched until the handle was waited for.
    """
    if channel.group is None:
        torch._foreach_copy_(list(outs), list(ins))
        return DONE
    small = _small(outs)
    return _reduce(outs, ins, channel, average) if small is None else _reduce_packed(outs, ins, channel, small, average)


def _reduce(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, average: bool) -> Handle:
    if channel.backend(ins[0].device) == "gloo":
        return direct.reduce_scatter(outs, ins, channel, average)
    options = channel.reduce_options(average)
    if len(ins) == 1:
        return channel.group._reduce_scatter_base(outs[0], ins[0], options)
    return channel.group.reduce_scatter_tensor_coalesced(outs, ins, options)


# -- many small tensors go as one ------------------------------------------------------------------------------


def _small(slices: Sequence[torch.Tensor]) -> list[int] | None:
    """Positions of the slices to be packed, or None where each of them goes by itself."""
    if len(slices) <= PACK_ABOVE_COUNT:
        return None
    small = [i for i, t in enumerate(slices) if t.numel() * t.element_size() < PACK_BELOW_BYTES]
    return small if len(small) > PACK_ABOVE_COUNT else None


def _others(items: Sequence[torch.Tensor], small: list[int]) -> list[torch.Tensor]:
    chosen = set(small)
    return [item for i, item in enumerate(items) if i not in chosen]


def _gather_packed(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, small: list[int]
) -> Handle:
    packed = [ins[i] for i in small]
    sizes = [t.numel() for t in packed]
    flat = _adjacent(packed)
    if flat is None:
        flat = torch.cat(packed)
    rows = torch.empty(channel.size, flat.numel(), dtype=flat.dtype, device=flat.device)
    work = _gather([*_others(outs, small), rows.view(-1)], [*_others(ins, small), flat], channel)
    targets = [outs[i].view(channel.size, -1) for i in small]
    return Then(work, lambda: torch.split_with_sizes_copy(rows, sizes, dim=1, out=targets))


def _reduce_packed(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, small: list[int], average: bool
) -> Handle:
    targets = [outs[i] for i in small]
    sizes = [t.numel() for t in targets]
    rows = torch.empty(channel.size, sum(sizes), dtype=ins[0].dtype, device=ins[0].device)
    torch._chunk_cat([ins[i] for i in small], 0, channel.size, out=rows)
    flat = _adjacent(targets)
    result = torch.empty(sum(sizes), dtype=rows.dtype, device=rows.device) if flat is None else flat
    work = _reduce([*_others(outs, small), result], [*_others(ins, small), rows.view(-1)], channel, average)
    if flat is not None:
        return Then(work, lambda: None, rows)
    return Then(work, lambda: torch._foreach_copy_(targets, list(result.split(sizes))), rows)


def broadcast(tensor: torch.Tensor, channel: Channel, source: int = 0) -> None:
    """Broadcast ``tensor`` in place from the channel's member ``source``."""
    if channel.group is not None:
        dist.broadcast(tensor, channel.global_rank(source), group=channel.group)


def exchange(row: torch.Tensor, channel: Channel) -> torch.Tensor:
    """Every rank's 1-D ``row`` (n) stacked in rank order: (size, n). One small collective, no host sync."""
    if channel.group is None:
        return row.unsqueeze(0)
    if channel.backend(row.device) == "fake":  # it sends nothing: every rank is as this one
        return row.expand(channel.size, -1).clone()
    rows = torch.empty(channel.size, row.numel(), dtype=row.dtype, device=row.device)
    channel.group._allgather_base(rows.view(-1), row).wait()
    return rows
