# SPDX-License-Identifier: Apache-2.0
"""`GatheredParameters`: full weights inside a ``with`` block, and what is written there reaches every copy."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.utils.logging import logger

from .core import access, wire
from .core.param import ShardedParam
from .core.parameter import sharded_of
from .core.unit import expose_param


class GatheredParameters:
    """Gather parameters for the duration of a block. Collective: every rank of the group must enter and leave it.

    What a forward or a backward uses inside a block stays for as long as the pass needs it: autograd computes with it
    again, and a gradient is accumulated into a parameter that shows its shape.

    Inside, each parameter has its full shape. On leaving with ``modifier_rank=r`` the weights of rank ``r`` are sent to
    all ranks and written to the shards, to the hpZ secondary shards and, after ``deepspeed.initialize``, to the fp32
    master weights: the edit survives the next step and is saved. On leaving with ``modifier_rank=None`` the block was
    read-only: edits are dropped, with a warning that names the parameters (an error under
    ``zero_optimization.enable_sanity_checks``).

    Args:
        params: a parameter or any iterable; what is not sharded is left alone, duplicates count once.
        modifier_rank: rank within the sharding group whose edits are kept, or None.
        fwd_module: module that uses them in its forward; accepted and not needed, since such uses are noticed.
        enabled: False makes the block do nothing.

    Raises:
        RuntimeError: another block already holds one of the parameters.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.params: list[ShardedParam] = []
        self.modifier_rank = modifier_rank
        self.fwd_module = fwd_module
        if enabled:
            items = [params] if isinstance(params, torch.Tensor) else params
            self.params = sorted(sharded_of(items), key=lambda p: p.id)
        self._counters: list[int] = []

    def __enter__(self) -> None:
        if not self.params:
            return
        held = [p.id for p in self.params if p.pins]
        if held:
            raise UsageError(
                f"GatheredParameters: parameters with ds_id {held} are held by an enclosing GatheredParameters block; "
                "gather each parameter in one block only"
            )
        self._check_modifier()
        self._tell_the_pass()
        access.gather_params(self.params)
        for p in self.params:
            p.pins += 1
            p.unit.pinned += 1
            if self.modifier_rank is None and p.unit.aliased:
                # in a world of one the full weights are the shard: hand out a copy, so that edits can be dropped
                p.view = p.shard.view(p.shape).clone()
                expose_param(p)
        self._counters = [p.param._version for p in self.params]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.params:
            return
        from .partition_parameters import Init

        failed = kind is not None
        edited: list[ShardedParam] = []
        try:
            if self.modifier_rank is not None and not failed:
                self._broadcast()
                Init._partition([p.param for p in self._released()], has_been_updated=True)
                return
            edited = [] if failed else self._edited()
        finally:
            changed = set(edited)
            released = [p for p in self._released() if p in changed or not p.unit.hold_until_flush]
            if released:
                Init._partition([p.param for p in released], has_been_updated=False)
        if edited:
            self._complain(edited)

    def _tell_the_pass(self) -> None:
        """A forward that may be differentiated, or a backward, runs in this thread: it uses these parameters."""
        backward = torch._C._current_graph_task_id() != -1
        if self.modifier_rank is not None or not (backward or torch.is_grad_enabled()):
            return
        for unit, chosen in access.by_unit(self.params).items():
            if unit.watcher is not None:
                unit.watcher.on_pass(chosen)

    def _released(self) -> list[ShardedParam]:
        """Let go of the parameters; returns those that this block still held."""
        params, self.params = self.params, []
        for p in params:
            p.pins -= 1
            p.unit.pinned -= 1
            if self.modifier_rank is None and p.unit.aliased:
                p.view = p.shard.view(p.shape)
                if p.param.numel():
                    p.param.data = p.view
        return params

    def _check_modifier(self) -> None:
        size = self.params[0].groups.primary.size
        if self.modifier_rank is not None and not 0 <= self.modifier_rank < size:
            raise UsageError(f"GatheredParameters: modifier_rank {self.modifier_rank} is not a rank of 0..{size - 1}")

    def _broadcast(self) -> None:
        for p in self.params:
            data = p.param.data
            if data.device != p.unit.device:
                raise UsageError(
                    f"GatheredParameters: {p.name} was moved to {data.device} inside the block; leave it on "
                    f"{p.unit.device} to have the edit written back"
                )
            if tuple(data.shape) != tuple(p.shape) or data.dtype != p.dtype:
                raise UsageError(
                    f"GatheredParameters: {p.name} has shape {tuple(data.shape)} and dtype {data.dtype} at the end of "
                    f"the block, was {tuple(p.shape)} and {p.dtype}; edit it in place"
                )
            assert self.modifier_rank is not None
            if not data.is_contiguous():
                data = data.contiguous()
                p.param.data = data
            if p.numel:
                try:
                    wire.broadcast(data, p.groups.primary, self.modifier_rank)
                except RuntimeError as error:
                    raise p.groups.lost(f"broadcasting what was written to {p.name}", error) from error

    def _edited(self) -> list[ShardedParam]:
        """Parameters whose full weights no longer are what was gathered."""
        edited = []
        for p, counter in zip(self.params, self._counters, strict=True):
            data = p.param.data
            if p.param._version != counter or data.numel() != p.numel:
                edited.append(p)
            elif p.numel and data.device == p.shard.device and data.dtype == p.dtype:
                mine = p.shard_of(data)
                if not torch.equal(mine.nan_to_num(), p.shard[: mine.numel()].nan_to_num()):
                    edited.append(p)
        return edited

    def _complain(self, edited: list[ShardedParam]) -> None:
        names = ", ".join(p.name for p in edited[:5]) + (", …" if len(edited) > 5 else "")
        text = (
            f"GatheredParameters: {names} edited inside a read-only block (modifier_rank=None); the edit was dropped. "
            "Pass modifier_rank=<rank whose weights count> to keep it"
        )
        if edited[0].groups.checks is not None:
            raise UsageError(text)
        logger.warning(text)
