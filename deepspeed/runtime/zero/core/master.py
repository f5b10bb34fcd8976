# SPDX-License-Identifier: Apache-2.0
"""Master weights in a few flat tensors (``subgroup``), and the torch optimizer that steps them (``stepping``).

Invariant: whoever writes weights writes master and shard, and bumps the version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import ConfigError
from deepspeed.utils.logging import warning_once

from . import host, layout, stepping
from .grads import GradShards
from .param import ShardedParam
from .scaling import Verdict
from .subgroup import SubGroup


class MasterWeights:
    """Master weights of one model and the optimizer that steps them.

    Args:
        groups: optimizer groups as (sharded parameters, hyper-parameters without ``params``), in order; empty groups
            keep their place.
        sub_group_size: elements of shards after which a new sub-group starts.
        pin_shards, pin_masters: page-lock them; they live on the host.
    """

    def __init__(
        self,
        groups: list[tuple[list[ShardedParam], dict[str, Any]]],
        sub_group_size: int,
        device: torch.device,
        master_device: torch.device,
        shard_device: torch.device,
        grads: GradShards,
        pin_shards: bool = False,
        pin_masters: bool = False,
    ) -> None:
        self.device, self.master_device, self.grads = device, master_device, grads
        self.sub_groups: list[SubGroup] = []
        self.places: dict[ShardedParam, tuple[SubGroup, int]] = {}
        self.group_options = [options for _, options in groups]
        for group_index, (params, _) in enumerate(groups):
            _refuse_complex(params)
            for positions in layout.pack_sub_groups([p.shard.numel() for p in params], sub_group_size):
                chosen = [params[i] for i in positions]
                index = len(self.sub_groups)
                sub = SubGroup(index, group_index, chosen, shard_device, master_device, pin_shards, pin_masters)
                if shard_device != device:
                    host.release_unused(device)  # the shards that `zero.Init` page-locked one by one
                self.sub_groups.append(sub)
                grads.add_sub_group(chosen)
                for position, p in enumerate(chosen):
                    self.places[p] = (sub, position)
                    p.edits = self
        self.optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]  # set by attach
        self.stepper: stepping.Stepper = None  # type: ignore[assignment]

    @property
    def device_scaled(self) -> bool:
        """Whether the step reads scale and skip flag on the device, so that nobody has to wait for them."""
        return self.stepper.device_scaled

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

    def attach(self, optimizer: torch.optim.Optimizer, split: bool | None = False) -> None:
        """Step with ``optimizer``: its parameter groups hold the flat masters from now on.

        Args:
            split: keep masters as bf16 shards and their low halves; None: where that is the faster way, too.

        Raises:
            ConfigError: another number of groups; or ``split``, and optimizer or dtype do not allow it.
        """
        if len(optimizer.param_groups) != len(self.group_options):
            raise ConfigError(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, its parameters were given in "
                f"{len(self.group_options)}"
            )
        for group, flat in zip(optimizer.param_groups, self.flat_groups(), strict=True):
            group["params"] = flat["params"]
        self.optimizer = optimizer
        self.stepper = stepping.choose(optimizer, self.sub_groups, self.master_device, split)

    def free(self) -> None:
        """Release masters and optimizer states; the shards stay. Nothing can be stepped afterwards."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        for sub in self.sub_groups:
            sub.free()
        host.release_unused(self.device)
        for p in self.places:
            if p.edits is self:  # else an engine that was set up later steps it
                p.edits = None
        self.places.clear()

    # -- one parameter's views

    def master_of(self, p: ShardedParam) -> torch.Tensor:
        """1-D fp32 master shard of ``p``, to be read: a view, or a copy where masters are split."""
        sub, position = self.places[p]
        return sub.fp32_of(position)

    def state_of(self, p: ShardedParam, key: str) -> torch.Tensor:
        """1-D shard of the optimizer state ``key`` of ``p``.

        Raises:
            KeyError: the optimizer has no such state (yet).
        """
        sub, position = self.places[p]
        return self.optimizer.state[sub.master][key].split(sub.sizes)[position]

    def set_master(self, p: ShardedParam, values: torch.Tensor) -> None:
        """Write fp32 ``values`` (at most a shard's elements) to master and shard of ``p``, as a new version."""
        sub, position = self.places[p]
        sub.write_of(position, values)
        p.wrote_primary()

    def before_edit(self, p: ShardedParam, piece: torch.Tensor) -> None:
        """A user is about to write ``piece`` to the start of the shard of ``p``."""
        if p not in self.places:
            return
        sub, position = self.places[p]
        if sub.low is None:
            return
        shard, piece = p.shard[: piece.numel()], piece.to(p.shard)
        low = sub.low_of(position)[: piece.numel()]
        low.masked_fill_((shard != piece) & ~(shard.isnan() & piece.isnan()), 0)

    def accept_edit(self, p: ShardedParam) -> None:
        """The shard of ``p`` was written by a user, announced by ``before_edit``: carry what changed to the master.

        Elements whose rounded value is what it was keep their full precision.
        """
        if p not in self.places:
            return
        sub, position = self.places[p]
        if sub.low is not None:
            return
        master = sub.masters[position]
        if master.data_ptr() == p.shard.data_ptr():
            return
        shard = p.shard.to(master.device)
        before = master.to(shard.dtype)
        same = (shard == before) | (shard.isnan() & before.isnan())
        master.copy_(torch.where(same, master, shard.float()))

    def refresh(self, p: ShardedParam) -> None:
        """The shard of ``p`` may have been written without notice: make the master agree. Split masters then lose
        what the shard does not hold, since nothing tells which elements changed."""
        sub, position = self.places[p]
        if sub.low is not None:
            sub.low_of(position).zero_()
        else:
            self.accept_edit(p)

    # -- step

    def step(self, verdict: Verdict, trained: list[ShardedParam]) -> None:
        """Step every sub-group unless the verdict says skip, and write the shards.

        Args:
            trained: the parameters that the vote was about, in its order; what no rank used is left alone.
        """
        for sub in self.sub_groups:
            sub.before_write()
            sub.readopt_shards()
        if not self.device_scaled and not verdict.check():
            return
        self._leave_alone(trained[position] for position in verdict.idle())
        scale = verdict.scale.to(self.master_device)
        skip = verdict.skip.to(self.master_device)
        if self.stepper.step(self.sub_groups, self.grads, scale, skip):
            self.grads.divided_by = verdict.scale
        for sub in self.sub_groups:
            sub.wrote()

    def _leave_alone(self, unused: Iterable[ShardedParam]) -> None:
        idle: dict[SubGroup, set[int]] = {}
        for p in unused:
            sub, position = self.places[p]
            idle.setdefault(sub, set()).add(position)
        if idle and not self.stepper.cuts:
            name = type(self.optimizer).__name__
            warning_once(
                f"{sum(map(len, idle.values()))} parameters had no gradient on any rank. torch would leave them alone; "
                f"{name} is not known to work on slices of its state, so it steps them with zeros"
            )
            return
        for sub in self.sub_groups:
            sub.leave_alone(idle.get(sub, ()), self.optimizer.state.get(sub.master, {}))


def _refuse_complex(params: list[ShardedParam]) -> None:
    found = [p.name for p in params if p.dtype.is_complex]
    if found:
        raise ConfigError(
            f"parameter {found[0]} is complex, and master weights are real: its imaginary part would be lost. Keep it "
            "as real numbers (torch.view_as_real) and use torch.view_as_complex in the forward, or do not give it to "
            "the optimizer."
        )
