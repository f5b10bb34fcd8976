# SPDX-License-Identifier: Apache-2.0
"""The collectives of the core: free functions ``(outputs, inputs, channel) -> handle``, stateless and zero-copy.

Two ways lie behind the same two calls. On NCCL (and in the ``fake`` group, which counts) all tensors of a unit go in
one *grouped* call that reads and writes them in place. Gloo's grouped call flattens inside, so there one *flat*
collective with a single copy in and out is used. Source for the grouped form: NCCL group calls; for the trap of many
tiny tensors in one group: NVIDIA/nccl#725, hence ``PACK_BELOW_BYTES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

PACK_BELOW_BYTES = 256 * 1024
"""Inputs smaller than this are packed into one where a call has more than ``PACK_ABOVE_COUNT`` of them."""
PACK_ABOVE_COUNT = 16


class Handle(Protocol):
    """A collective in flight. ``wait`` returns once later work of this stream may use the outputs."""

    def wait(self) -> Any: ...


class Done:
    """Handle of work that is complete already."""

    def wait(self) -> None:
        return None


DONE = Done()


class CopyOut:
    """Handle of a flat collective: waits, then copies the flat result to where it belongs."""

    __slots__ = ("dst", "keep", "src", "work")

    def __init__(self, work: Handle, dst: list[torch.Tensor], src: list[torch.Tensor], keep: Any = None) -> None:
        self.work, self.dst, self.src, self.keep = work, dst, src, keep

    def wait(self) -> None:
        self.work.wait()
        if self.dst:
            torch._foreach_copy_(self.dst, self.src)


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

    def grouped(self, tensor: torch.Tensor) -> bool:
        """Whether several tensors on ``tensor``'s device go in one grouped call."""
        return self.backend(tensor.device) in ("nccl", "fake")

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
    if len(ins) == 1:
        return channel.group._allgather_base(outs[0], ins[0])
    if channel.grouped(ins[0]):
        small = _small(ins)
        if small is None:
            return channel.group.allgather_into_tensor_coalesced(outs, ins)
        return _gather_packed(outs, ins, channel, small)
    return _gather_flat(outs, ins, channel, _adjacent(ins))


def _small(tensors: Sequence[torch.Tensor]) -> set[int] | None:
    """Positions of tensors to be packed, or None where grouping all of them is fine."""
    if len(tensors) <= PACK_ABOVE_COUNT:
        return None
    small = {i for i, t in enumerate(tensors) if t.numel() * t.element_size() < PACK_BELOW_BYTES}
    return small if len(small) > PACK_ABOVE_COUNT else None


def _flat_input(ins: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = [t.numel() for t in ins]
    flat = torch.empty(sum(sizes), dtype=ins[0].dtype, device=ins[0].device)
    torch._foreach_copy_(list(flat.split(sizes)), list(ins))
    return flat


def _columns(rows: torch.Tensor, outs: Sequence[torch.Tensor], world: int) -> tuple[list[Any], list[Any]]:
    """Pair each output, seen as (world, n), with its columns of the rank-major ``rows`` (world, sum n)."""
    shaped = [out.view(world, -1) for out in outs]
    return shaped, list(rows.split([s.shape[1] for s in shaped], dim=1))


def _gather_flat(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, flat: torch.Tensor | None
) -> Handle:
    flat = _flat_input(ins) if flat is None else flat
    rows = torch.empty(channel.size, flat.numel(), dtype=flat.dtype, device=flat.device)
    work = channel.group._allgather_base(rows.view(-1), flat)
    dst, src = _columns(rows, outs, channel.size)
    return CopyOut(work, dst, src, flat)


def _gather_packed(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, small: set[int]
) -> Handle:
    flat = _flat_input([ins[i] for i in sorted(small)])
    rows = torch.empty(channel.size, flat.numel(), dtype=flat.dtype, device=flat.device)
    big = [i for i in range(len(ins)) if i not in small]
    work = channel.group.allgather_into_tensor_coalesced(
        [outs[i] for i in big] + [rows.view(-1)], [ins[i] for i in big] + [flat]
    )
    dst, src = _columns(rows, [outs[i] for i in sorted(small)], channel.size)
    return CopyOut(work, dst, src, flat)


def reduce_scatter(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, average: bool = True
) -> Handle:
    """Reduce every ``ins[i]`` (1-D, ``channel.size * n``) over ranks and keep this rank's slice in ``outs[i]`` (n).

    One call on the wire for the whole list. ``ins`` and ``outs`` must stay untouched until the handle was waited for.
    A list ``ins`` is emptied where its contents were copied: the caller need not keep their memory alive.
    """
    if channel.group is None:
        torch._foreach_copy_(list(outs), list(ins))
        return DONE
    options = channel.reduce_options(average)
    if len(ins) == 1:
        return channel.group._reduce_scatter_base(outs[0], ins[0], options)
    if channel.grouped(ins[0]) and _small(outs) is None:
        return channel.group.reduce_scatter_tensor_coalesced(outs, ins, options)
    return _reduce_flat(outs, ins, channel, options)


def _reduce_flat(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], channel: Channel, options: Any) -> Handle:
    total = sum(out.numel() for out in outs)
    rows = torch.empty(channel.size, total, dtype=ins[0].dtype, device=ins[0].device)
    shaped, columns = _columns(rows, ins, channel.size)
    torch._foreach_copy_(columns, shaped)
    if isinstance(ins, list):
        ins.clear()
    del shaped
    flat = _adjacent(outs)
    if flat is not None:
        return CopyOut(channel.group._reduce_scatter_base(flat, rows.view(-1), options), [], [], rows)
    flat = torch.empty(total, dtype=rows.dtype, device=rows.device)
    work = channel.group._reduce_scatter_base(flat, rows.view(-1), options)
    return CopyOut(work, list(outs), list(flat.split([out.numel() for out in outs])), rows)


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
