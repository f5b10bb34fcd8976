# SPDX-License-Identifier: Apache-2.0
"""A run of one optimizer group's parameters and their flat tensors: shards, fp32 masters, or the masters' low halves.

Invariants:
- The flat tensors hold this rank's slices one after another without gaps. That is the checkpoint format's flat group.
- ``shards == masters rounded to the parameters' dtype`` always holds. For fp32 parameters the master *is* the shard.
- In the split layout (bf16, see ``deepspeed.ops.fused_step``) the shard is the rounded upper half of the fp32 master
  and ``low`` is the rest. ``master`` is then the key of the optimizer's state and has no memory; ``fp32`` gives values.
- Scalar states of the optimizer (``step``) are one for all parameters of a sub-group, except for those that missed
  steps, because no rank used them: these have scalars of their own (``Apart``), as they have in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed.ops import fused_step

from . import host
from .param import ShardedParam


class Apart:
    """Parameters of one sub-group that missed the same steps, and what the optimizer counts for them.

    ``begun``: whether they were ever stepped; ``scalars``: 0-d tensors and numbers by the name of the state.
    """

    def __init__(self, begun: bool, scalars: Mapping[str, Any]) -> None:
        self.begun, self.scalars = begun, copied(scalars)

    def begin(self) -> dict[str, Any]:
        """The scalars, for a step that changes them."""
        self.begun = True
        return self.scalars


def is_flat(value: Any) -> bool:
    """Whether an optimizer's state has a value for each element."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of an optimizer's state, copies where they are tensors."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if not is_flat(value)
    }


class Run(NamedTuple):
    """Elements ``start`` to ``end`` of a sub-group, stepped with the scalars of ``apart``; None: the common ones."""

    start: int
    end: int
    apart: Apart | None

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This run of a tensor of the whole sub-group."""
        return flat[self.start : self.end]


class SubGroup:
    """A run of one optimizer group's parameters and their flat tensors.

    Attributes:
        master: 1-D fp32, what the optimizer steps; ``shards``: 1-D over the parameters' shards where they have one
        dtype, else None; ``low``: 1-D int16 in the split layout, else None.
        apart: position of a parameter -> its scalars, for those that missed a step.
        runs: what the step at hand steps; see ``leave_alone``.
    """

    def __init__(
        self,
        index: int,
        group_index: int,
        params: list[ShardedParam],
        device: torch.device,
        master_device: torch.device,
        pin_shards: bool = False,
        pin_masters: bool = False,
    ) -> None:
        self.index, self.group_index, self.params = index, group_index, params
        self.sizes = [p.shard.numel() for p in params]
        self.numel = sum(self.sizes)
        dtypes = {p.dtype for p in params}
        self.shards: torch.Tensor | None = None
        one = device == master_device and dtypes == {torch.float32}  # the master is the shard
        self.pin_shards, self.pin_masters = pin_shards or (pin_masters and one), pin_masters
        if len(dtypes) == 1:
            self.shards = host.empty(self.numel, dtypes.pop(), device, self.pin_shards)
        if one and self.shards is not None:
            self.master = self.shards
        else:
            self.master = host.empty(self.numel, torch.float32, master_device, pin_masters)
        self.low: torch.Tensor | None = None
        self.masters = list(self.master.split(self.sizes))
        self.apart: dict[int, Apart] = {}
        self.runs = self._runs(())
        self._adopt()

    @property
    def aliased(self) -> bool:
        """Whether the master is the shard (fp32 parameters)."""
        return self.master is self.shards

    @property
    def shards_beside_masters(self) -> torch.Tensor | None:
        """``shards``, where a step can write them along with the masters: flat, separate and on the same device."""
        beside = self.shards is not None and not self.aliased and self.shards.device == self.master.device
        return self.shards if beside else None

    def _adopt(self) -> None:
        """Move the parameters' shards into the flat tensors."""
        pieces = self.shards.split(self.sizes) if self.shards is not None else [None] * len(self.params)
        for p, piece, master in zip(self.params, pieces, self.masters, strict=True):
            master.copy_(p.shard)
            if piece is not None:
                piece.copy_(p.shard)
                p.shard = piece
            elif self.pin_shards:
                p.shard = host.pinned(p.shard)

    # -- which parameters a step leaves alone

    @property
    def whole(self) -> bool:
        """Whether the step at hand steps all of the sub-group with the common scalars."""
        return self.runs == [Run(0, self.numel, None)]

    def leave_alone(self, idle: Collection[int], state: Mapping[str, Any]) -> None:
        """The step at hand is not for the parameters at the positions ``idle``; ``state``: the sub-group's so far.

        The idle ones of a set that shares scalars get a copy of these, unless the whole set is idle.
        """
        stepped = {self.apart.get(i) for i in range(len(self.params)) if i not in idle} if idle else set()
        copies: dict[Apart | None, Apart] = {}
        for i in idle:
            shared = self.apart.get(i)
            if shared in stepped:
                if shared not in copies:
                    begun, scalars = (bool(state), state) if shared is None else (shared.begun, shared.scalars)
                    copies[shared] = Apart(begun, scalars)
                self.apart[i] = copies[shared]
        self.runs = self._runs(idle)

    def _runs(self, idle: Collection[int]) -> list[Run]:
        """Stretches of parameters that are not idle and share their scalars."""
        if not idle and not self.apart:
            return [Run(0, self.numel, None)]
        found: list[Run] = []
        start = 0
        for i, size in enumerate(self.sizes):
            apart = self.apart.get(i)
            if i not in idle and size:
                last = found[-1] if found else None
                if last is not None and last.end == start and last.apart is apart:
                    found[-1] = Run(last.start, start + size, apart)
                else:
                    found.append(Run(start, start + size, apart))
            start += size
        return found

    # -- layouts

    def split_masters(self) -> bool:
        """Change to the split layout and free the fp32 masters; False where that cannot be.

        In a world of one, full weights are the shards, and an edit in place could not be told from what was there.
        """
        if self.shards is None or self.shards.dtype is not torch.bfloat16 or self.shards.device != self.master.device:
            return False
        if self.params[0].groups.primary.size == 1:
            return False
        self.low = torch.empty(self.numel, dtype=torch.int16, device=self.master.device)
        fused_step.split(self.master, self.shards, self.low)
        self.masters = []
        self.master.untyped_storage().resize_(0)
        return True

    def fp32(self, device: torch.device | None = None) -> torch.Tensor:
        """The fp32 master weights (1-D): the tensor itself, or a new one (on ``device``) in the split layout."""
        if self.low is None:
            return self.master
        assert self.shards is not None
        out = torch.empty(self.numel, dtype=torch.float32, device=device or self.shards.device)
        return fused_step.join(self.shards, self.low, out)

    def fp32_of(self, position: int) -> torch.Tensor:
        """The fp32 master weights of one parameter (1-D): a view, or a new tensor in the split layout."""
        if self.low is None:
            return self.masters[position]
        return fused_step.join(self.params[position].shard, self.low_of(position))

    def low_of(self, position: int) -> torch.Tensor:
        """The low halves of one parameter's masters; split layout only."""
        assert self.low is not None
        start = sum(self.sizes[:position])
        return self.low[start : start + self.sizes[position]]

    def before_write(self) -> None:
        """Call before masters or shards are written: no queued copy to the device may read them any more."""
        if self.shards is None or self.shards.is_cpu:
            host.before_write(self.params)

    def write(self, values: torch.Tensor) -> None:
        """Set masters and shards from fp32 ``values`` (numel, any device), as a new version."""
        self.before_write()
        if self.low is not None:
            assert self.shards is not None
            for start in range(0, self.numel, fused_step.SLICE):
                part = slice(start, min(start + fused_step.SLICE, self.numel))
                fused_step.split(values[part].to(self.low.device), self.shards[part], self.low[part])
        else:
            self.master.copy_(values)
            self.write_back()
        self.wrote()

    def write_of(self, position: int, values: torch.Tensor) -> None:
        """Set the first elements of one parameter's master and shard from fp32 ``values``."""
        p, n = self.params[position], values.numel()
        host.before_write((p,))
        if self.low is not None:
            fused_step.split(values.to(self.low.device, torch.float32), p.shard[:n], self.low_of(position)[:n])
        else:
            self.masters[position][:n].copy_(values)
            p.shard.copy_(self.masters[position])

    def free(self) -> None:
        """Let go of masters, low halves and flat views; the parameters keep their shards."""
        self.master = torch.empty(0, dtype=torch.float32)
        self.masters, self.low, self.shards = [], None, None

    def renew_views(self) -> None:
        """Make the views of the flat tensors anew after their data moved."""
        self.masters = [] if self.low is not None else list(self.master.split(self.sizes))
        if self.shards is not None:
            for p, piece in zip(self.params, self.shards.split(self.sizes), strict=True):
                p.shard = piece

    def write_back(self) -> None:
        """Round the masters into the shards."""
        if self.shards is None:
            torch._foreach_copy_([p.shard for p in self.params], list(self.masters))
        elif not self.aliased and self.low is None:
            self.shards.copy_(self.master)

    def wrote(self) -> None:
        """The shards hold new weights, as a new version."""
        for p in self.params:
            p.version += 1
            p.unit.fresh = False

    def readopt_shards(self) -> None:
        """Take shards back that a user moved away (``param.ds_tensor.data = ...``) and returned elsewhere."""
        if self.shards is None:
            return
        pointer, step = self.shards.data_ptr(), self.shards.element_size()
        for p, size, piece in zip(self.params, self.sizes, self.shards.split(self.sizes), strict=True):
            if size and p.shard.data_ptr() != pointer:
                piece.copy_(p.shard)
                p.shard.data = piece
            pointer += size * step
