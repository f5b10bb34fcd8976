# SPDX-License-Identifier: Apache-2.0
"""Master weights in a few flat tensors, stepped by a torch optimizer, and the write-back to the shards.

Invariants:
- A sub-group is a run of one optimizer group's parameters; its flat tensors (master, shard, gradient) hold this rank's
  slices one after another without gaps. That is the checkpoint format's flat group, too.
- ``shard == master rounded to the parameter's dtype`` always holds. For fp32 parameters the master *is* the shard.
- Whoever writes weights writes both and bumps the version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import ConfigError

from . import layout
from .grads import GradShards
from .param import ShardedParam
from .scaling import Verdict

STEP_CHUNK = 1 << 26
"""Elements whose gradients are converted to fp32 and stepped together: bounds the temporary memory of a step."""


class SubGroup:
    """A run of one optimizer group's parameters and their flat tensors.

    Attributes:
        master: 1-D fp32, what the optimizer steps; ``shards``: 1-D view over the parameters' shards where they have one
        dtype, else None.
    """

    def __init__(
        self,
        index: int,
        group_index: int,
        params: list[ShardedParam],
        device: torch.device,
        master_device: torch.device,
    ) -> None:
        self.index, self.group_index, self.params = index, group_index, params
        self.sizes = [p.shard.numel() for p in params]
        self.numel = sum(self.sizes)
        dtypes = {p.dtype for p in params}
        self.shards: torch.Tensor | None = None
        if len(dtypes) == 1:
            self.shards = torch.empty(self.numel, dtype=dtypes.pop(), device=device)
        if self.shards is not None and self.shards.dtype == torch.float32 and device == master_device:
            self.master = self.shards
        else:
            self.master = torch.empty(self.numel, dtype=torch.float32, device=master_device)
        self.masters = list(self.master.split(self.sizes))
        self._adopt()

    @property
    def aliased(self) -> bool:
        """Whether the master is the shard (fp32 parameters)."""
        return self.master is self.shards

    def _adopt(self) -> None:
        """Move the parameters' shards into the flat tensors."""
        pieces = self.shards.split(self.sizes) if self.shards is not None else [None] * len(self.params)
        for p, piece, master in zip(self.params, pieces, self.masters, strict=True):
            master.copy_(p.shard)
            if piece is not None:
                piece.copy_(p.shard)
                p.shard = piece

    def renew_views(self) -> None:
        """Make the views of the flat tensors anew after their data moved."""
        self.masters = list(self.master.split(self.sizes))
        if self.shards is not None:
            for p, piece in zip(self.params, self.shards.split(self.sizes), strict=True):
                p.shard = piece

    def write_back(self) -> None:
        """Round the master into the shards, as a new version."""
        if self.shards is None:
            torch._foreach_copy_([p.shard for p in self.params], list(self.masters))
        elif not self.aliased:
            self.shards.copy_(self.master)
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


class MasterWeights:
    """Master weights of one model and the optimizer that steps them.

    Args:
        groups: optimizer groups as (sharded parameters, hyper-parameters without ``params``), in order; empty groups
            keep their place.
        sub_group_size: elements of shards after which a new sub-group starts.
    """

    def __init__(
        self,
        groups: list[tuple[list[ShardedParam], dict[str, Any]]],
        sub_group_size: int,
        device: torch.device,
        master_device: torch.device,
        shard_device: torch.device,
        grads: GradShards,
    ) -> None:
        self.device, self.master_device, self.grads = device, master_device, grads
        self.sub_groups: list[SubGroup] = []
        self.places: dict[ShardedParam, tuple[SubGroup, int]] = {}
        self.group_options = [options for _, options in groups]
        for group_index, (params, _) in enumerate(groups):
            for positions in layout.pack_sub_groups([p.shard.numel() for p in params], sub_group_size):
                chosen = [params[i] for i in positions]
                sub = SubGroup(len(self.sub_groups), group_index, chosen, shard_device, master_device)
                self.sub_groups.append(sub)
                grads.add_sub_group(chosen)
                for position, p in enumerate(chosen):
                    self.places[p] = (sub, position)
                    p.edits = self
        self.optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]  # set by attach
        self.device_scaled = False

    @property
    def flat_params(self) -> set[ShardedParam]:
        """Parameters whose shard is a view of a sub-group's flat tensor."""
        return {p for sub in self.sub_groups if sub.shards is not None for p in sub.params}

    def renew_views(self) -> None:
        """Make every view of a flat tensor anew after data moved between devices."""
        for sub in self.sub_groups:
            sub.renew_views()

    def flat_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for a torch optimizer: each group's hyper-parameters and its flat masters."""
        return [
            {**options, "params": [s.master for s in self.sub_groups if s.group_index == index]}
            for index, options in enumerate(self.group_options)
        ]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with ``optimizer``: its parameter groups hold the flat masters from now on."""
        if len(optimizer.param_groups) != len(self.group_options):
            raise ConfigError(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, its parameters were given in "
                f"{len(self.group_options)}"
            )
        for group, flat in zip(optimizer.param_groups, self.flat_groups(), strict=True):
            group["params"] = flat["params"]
        self.optimizer = optimizer
        # torch's marker of fused kernels that divide by `grad_scale` and heed `found_inf` on the device
        self.device_scaled = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    # -- one parameter's views

    def master_of(self, p: ShardedParam) -> torch.Tensor:
        """1-D fp32 master shard of ``p``."""
        sub, position = self.places[p]
        return sub.masters[position]

    def state_of(self, p: ShardedParam, key: str) -> torch.Tensor:
        """1-D shard of the optimizer state ``key`` of ``p``.

        Raises:
            KeyError: the optimizer has no such state (yet).
        """
        sub, position = self.places[p]
        return self.optimizer.state[sub.master][key].split(sub.sizes)[position]

    def set_master(self, p: ShardedParam, values: torch.Tensor) -> None:
        """Write fp32 ``values`` (at most a shard's elements) to master and shard of ``p``, as a new version."""
        self.master_of(p)[: values.numel()].copy_(values)
        p.shard.copy_(self.master_of(p))
        p.wrote_primary()

    def accept_edit(self, p: ShardedParam) -> None:
        """The shard of ``p`` was written by a user: carry what changed to the master.

        Elements whose rounded value is what it was keep their full precision.
        """
        if p not in self.places:
            return
        master = self.master_of(p)
        if master.data_ptr() == p.shard.data_ptr():
            return
        shard = p.shard.to(master.device)
        before = master.to(shard.dtype)
        same = (shard == before) | (shard.isnan() & before.isnan())
        master.copy_(torch.where(same, master, shard.float()))

    # -- step

    def step(self, verdict: Verdict) -> None:
        """Step every sub-group unless the verdict says skip, and write the shards."""
        for sub in self.sub_groups:
            sub.readopt_shards()
        scale = verdict.scale.to(self.master_device)
        skip = verdict.skip.to(self.master_device)
        if not self.device_scaled and not verdict.check():
            return
        for chunk in self._chunks():
            for sub in chunk:
                grad = self.grads.flats[sub.index]
                if self.device_scaled:
                    sub.master.grad = grad.to(device=self.master_device, dtype=torch.float32)
                else:
                    sub.master.grad = grad.to(device=self.master_device, dtype=torch.float32) / scale
            if self.device_scaled:
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
                self.optimizer.found_inf = skip  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                for sub in chunk:
                    sub.master.grad = None
        if self.device_scaled and self.grads.dtype is torch.float32 and self.grads.device == self.master_device:
            self.grads.divided_by = verdict.scale  # the fused kernel wrote the unscaled gradient back
        for sub in self.sub_groups:
            sub.write_back()

    def _chunks(self) -> Iterable[list[SubGroup]]:
        chunk: list[SubGroup] = []
        filled = 0
        for sub in self.sub_groups:
            if chunk and filled + sub.numel > STEP_CHUNK:
                yield chunk
                chunk, filled = [], 0
            chunk.append(sub)
            filled += sub.numel
        if chunk:
            yield chunk
