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

    A block inside a block over the same parameters joins it: nothing is let go before the outermost ends, an edit of an
    inner ``modifier_rank`` is on every rank when the inner block ends, and without one the outer block decides.

    Args:
        params: a parameter or any iterable; what is not sharded is left alone, duplicates count once.
        modifier_rank: rank within the sharding group whose edits are kept, or None.
        fwd_module: module that uses them in its forward; accepted and not needed, since such uses are noticed.
        enabled: False makes the block do nothing.

    Raises:
        UsageError: (a ``RuntimeError``) ``modifier_rank`` is not a rank of the group, or what was written cannot be
            sent: another shape, dtype or device.
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

    def __enter__(self) -> None:
        if not self.params:
            return
        self._check_modifier()
        self._tell_the_pass()
        first = [p for p in self.params if not p.pins]
        access.gather_params(first)
        for p in first:
            if self.modifier_rank is None and p.unit.aliased:
                # in a world of one the full weights are the shard: hand out a copy, so that edits can be dropped
                p.view = p.shard.view(p.shape).clone()
                expose_param(p)
            p.shown = p.param._version
        for p in self.params:
            p.pins += 1
            p.unit.pinned += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.params:
            return
        done = kind is None
        written = False
        edited: list[ShardedParam] = []
        try:
            if done and self.modifier_rank is not None:
                self._broadcast()
                written = True
            elif done:
                edited = self._edited()
        finally:
            self._let_go(written, edited)
        if done and self.modifier_rank is None:
            self._complain(edited)

    def _tell_the_pass(self) -> None:
        """A forward that may be differentiated, or a backward, runs in this thread: it uses these parameters."""
        backward = torch._C._current_graph_task_id() != -1
        if self.modifier_rank is not None or not (backward or torch.is_grad_enabled()):
            return
        for unit, chosen in access.by_unit(self.params).items():
            if unit.watcher is not None:
                unit.watcher.on_pass(chosen)

    def _let_go(self, written: bool, edited: list[ShardedParam]) -> None:
        """Write the weights to every copy if they were ``written``, and release what no other block or pass holds."""
        from .partition_parameters import Init

        for p in self.params:
            p.pins -= 1
            p.unit.pinned -= 1
        if written:
            Init._partition([p.param for p in self.params], has_been_updated=True)
        else:
            changed = set(edited)
            gone = [p for p in self.params if not p.pins and (p in changed or not p.unit.hold_until_flush)]
            Init._partition([p.param for p in gone], has_been_updated=False)
        for p in self.params:
            if not p.pins and p.unit.aliased:
                p.view = p.shard.view(p.shape)
                if p.param.numel():
                    p.param.data = p.view

    def _check_modifier(self) -> None:
        size = self.params[0].groups.primary.size
        if self.modifier_rank is not None and not 0 <= self.modifier_rank < size:
            raise UsageError(f"GatheredParameters: modifier_rank {self.modifier_rank} is not a rank of 0..{size - 1}")

    def _broadcast(self) -> None:
        """Send the weights of ``modifier_rank``, once every rank has memory for them."""
        mine = next(((at, how) for at, p in enumerate(self.params) if (how := _other(p)) >= 0), (-1, -1))
        for rank, (at, how) in enumerate(self._told(*mine)):
            if at >= 0:
                p = self.params[at]
                raise UsageError(
                    f"GatheredParameters: rank {rank} leaves {p.name} with another {_OTHER[how]} than "
                    f"{tuple(p.shape)}, {p.dtype}, {p.unit.device}; edit it in place"
                )
        assert self.modifier_rank is not None
        for p in self.params:
            data = p.param.data
            if not data.is_contiguous():
                data = data.contiguous()
                p.param.data = data
            if p.numel:
                try:
                    wire.broadcast(data, p.groups.primary, self.modifier_rank)
                except RuntimeError as error:
                    raise p.groups.lost(f"broadcasting what was written to {p.name}", error) from error

    def _told(self, *mine: int) -> list[list[int]]:
        """``mine`` of every rank, by rank. Collective."""
        p = self.params[0]
        row = torch.tensor(mine, device=p.unit.device)
        return p.groups.exchange(row, "leaving a GatheredParameters block").tolist()  # type: ignore[no-any-return]

    def _edited(self) -> list[ShardedParam]:
        """Parameters that no other block holds and whose full weights no longer are what was gathered."""
        edited = []
        for p in self.params:
            if p.pins > 1:
                continue
            data = p.param.data
            if p.param._version != p.shown or data.numel() != p.numel:
                edited.append(p)
            elif p.numel and data.device == p.shard.device and data.dtype == p.dtype:
                mine = p.shard_of(data)
                if not torch.equal(mine.nan_to_num(), p.shard[: mine.numel()].nan_to_num()):
                    edited.append(p)
        return edited

    def _complain(self, edited: list[ShardedParam]) -> None:
        """Warn of edits that were dropped; with sanity checks an error, on every rank."""
        checked = self.params[0].groups.checks is not None
        names = ", ".join(p.name for p in edited[:5]) + (", …" if len(edited) > 5 else "")
        if checked:
            first = self.params.index(edited[0]) if edited else -1
            told = enumerate(self._told(first))
            names = ", ".join(f"{self.params[at].name} on rank {rank}" for rank, [at] in told if at >= 0)
        if not names:
            return
        text = (
            f"GatheredParameters: {names} edited inside a read-only block (modifier_rank=None); the edit was dropped. "
            "Pass modifier_rank=<rank whose weights count> to keep it"
        )
        if checked:
            raise UsageError(text)
        logger.warning(text)


_OTHER = ("device", "shape", "dtype")


def _other(p: ShardedParam) -> int:
    """Which of ``_OTHER`` the weights of ``p`` have no longer in common with what was gathered; -1: none."""
    data = p.param.data
    same = (data.device == p.unit.device, tuple(data.shape) == tuple(p.shape), data.dtype == p.dtype)
    return same.index(False) if False in same else -1
