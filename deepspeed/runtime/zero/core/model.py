# SPDX-License-Identifier: Apache-2.0
"""One model's sharded parameters: conversion, units, and the fetcher and hooks that run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from . import host
from .convert import shard_parameter
from .fetch import Fetcher, FetchLimits
from .grads import GradReducer, GradShards
from .hooks import Scope, ScopeHooks
from .param import ShardedParam, ShardGroups
from .parameter import ZeroParameter, numel_of, sharded_of
from .partition import find_places, group_by_dtype, unit_bound
from .unit import ShardedUnit


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is sharded.

    Attributes:
        device: where full weights live; ``shard_device``: where shards live (the host under parameter offload).
        pin_shards: page-lock the shards, which live on the host.
        dtype: dtype of floating-point parameters, or None to keep each one's.
        persistence_threshold, model_persistence_threshold: parameters with at most so many elements stay gathered, up
            to so many in total (``stage3_param_persistence_threshold``, ``stage3_model_persistence_threshold``).
    """

    groups: ShardGroups
    device: torch.device
    shard_device: torch.device
    dtype: torch.dtype | None
    limits: FetchLimits
    persistence_threshold: int
    model_persistence_threshold: int
    pin_shards: bool = False


class ShardedModel:
    """A module whose parameters are sharded.

    Built in two steps, since the optimizer's flat tensors take the shards in between: the constructor converts every
    parameter, ``form_units`` cuts the model into units and installs the hooks.
    """

    def __init__(self, module: nn.Module, plan: ShardingPlan) -> None:
        self.module, self.plan = module, plan
        self.params: dict[str, ShardedParam] = {}
        self.fetcher: Fetcher = None  # type: ignore[assignment]  # set by form_units
        self.hooks: ScopeHooks = None  # type: ignore[assignment]
        for earlier in sharded_of(module.parameters()):
            if earlier.unit.watcher is not None:
                earlier.unit.watcher.let_go(module)
        for name, param in module.named_parameters():
            self.params[name] = self._convert(name, param)
        self._choose_persistent()

    def _convert(self, name: str, param: nn.Parameter) -> ShardedParam:
        plan = self.plan
        if isinstance(param, ZeroParameter):
            sharded = param._sharded
            if plan.dtype is not None and sharded.dtype.is_floating_point and sharded.dtype != plan.dtype:
                sharded.unit.free()
                sharded.recast(plan.dtype)
                param.data = torch.empty(0, dtype=plan.dtype, device=plan.device)
            if sharded.shard.device != plan.shard_device:
                sharded.shard = sharded.shard.to(plan.shard_device)
            sharded.regroup(plan.groups)
        else:
            sharded = shard_parameter(param, plan.groups, plan.device, plan.shard_device, plan.dtype)
        sharded.name = name
        return sharded

    def _choose_persistent(self) -> None:
        total = 0
        for p in self.params.values():
            small = p.numel <= self.plan.persistence_threshold
            p.persistent = small and total + p.numel <= self.plan.model_persistence_threshold
            total += p.numel if p.persistent else 0

    def form_units(
        self, is_leaf: Callable[[nn.Module], bool], grad_shards: GradShards | None, comm_dtype: torch.dtype | None
    ) -> GradReducer | None:
        """Cut the model into units and install the hooks; returns what reduces gradients, if any are wanted."""
        plan = self.plan
        if plan.pin_shards:
            for sharded in self.params.values():
                if sharded.edits is None:  # shards that are trained lie in flat tensors, which are page-locked
                    sharded.shard = host.pinned(sharded.shard)
        bound = unit_bound(plan.limits.max_live, plan.limits.prefetch)
        places = find_places(self.module, bound, numel_of, is_leaf)
        units: list[ShardedUnit] = []
        unit_of: dict[nn.Parameter, ShardedUnit] = {}
        persistent: list[nn.Parameter] = []
        for place in places:
            for p in sharded_of(place.owned):
                p.leaf = is_leaf(place.module)
            persistent += [p for p in place.owned if p._sharded.persistent]  # type: ignore[attr-defined]
            movable = [p for p in place.owned if not p._sharded.persistent]  # type: ignore[attr-defined]
            for same in self._by_dtype(movable):
                unit = ShardedUnit(same, plan.device)
                unit.name = place.name or type(place.module).__name__
                units.append(unit)
                unit_of.update((p.param, unit) for p in same)
        standing: list[ShardedUnit] = []
        for same in self._by_dtype(persistent):
            unit = ShardedUnit(same, plan.device)
            unit.name, unit.persistent = "persistent parameters", True
            standing.append(unit)
        self.fetcher = Fetcher(units, standing, plan.limits)
        plan.groups.traffic.place.names = [unit.name for unit in self.units]
        scopes = []
        for place in places:
            needed = dict.fromkeys(unit_of[p] for p in [*place.owned, *place.shared] if p in unit_of)
            if needed:
                scopes.append(Scope(place.module, place.name, list(needed)))
        reducer = None
        if grad_shards is not None:
            reducer = GradReducer([*standing, *units], plan.groups, grad_shards, comm_dtype)
        self.hooks = ScopeHooks(self.module, scopes, self.fetcher, reducer)
        self.hooks.install()
        return reducer

    def _by_dtype(self, params: list[nn.Parameter]) -> Iterable[list[ShardedParam]]:
        for _, same in group_by_dtype(params).items():
            found = sharded_of(same)
            for p in found:
                p.unit.free()
            yield found

    @property
    def units(self) -> list[ShardedUnit]:
        """Every unit, persistent ones last."""
        return [*self.fetcher.units, *self.fetcher.persistent]

    def drop_secondaries(self) -> None:
        """Declare every hpZ secondary invalid."""
        for p in self.params.values():
            p.drop_secondary()
