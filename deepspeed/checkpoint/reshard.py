# SPDX-License-Identifier: Apache-2.0
"""Filling this rank's state from parameters that were cut for another world size.

What must hold: element ``e`` of a flattened parameter lies on rank ``e // ceil(numel / world)``, at offset
``e % ceil(numel / world)`` of that rank's shard; padding is filled with zeros and never read.  Everything that can be
wrong (names, shapes, optimizer state that does not fit) is found before the state is handed out; after that only
bytes are copied, one sub-group at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed.checkpoint.state import SubGroupState, Zero3State, shard_numel
from deepspeed.errors import CheckpointMismatch

__all__ = ["Piece", "Source", "build_state", "pieces"]

StateValue = torch.Tensor | float | int
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})  # how a step runs, not what it does


@dataclass(frozen=True)
class Piece:
    """`length` elements from `source_start` of the shard of `source_rank`, to `target_start` of the target shard."""

    source_rank: int
    source_start: int
    length: int
    target_start: int


def pieces(numel: int, source_world: int, target_world: int, target_rank: int) -> Iterator[Piece]:
    """The pieces, in order, that make up the true elements of one target shard."""
    source, target = shard_numel(numel, source_world), shard_numel(numel, target_world)
    position = begin = target_rank * target
    end = min(begin + target, numel)
    while position < end:
        rank, offset = divmod(position, source)
        length = min(end - position, source - offset)
        yield Piece(rank, offset, length, position - begin)
        position += length


class Source(Protocol):
    """Where parameters come from: a ZeRO folder of any world size, or a universal folder.

    ``shapes``: full shape of every parameter held, by owner name.  ``trainable``: those with an fp32 master and
    optimizer state.  ``aliases``: other names of tied parameters.  ``buffers``: persistent buffers, whole.
    """

    @property
    def shapes(self) -> Mapping[str, torch.Size]: ...

    @property
    def trainable(self) -> frozenset[str]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def own_scalars(self) -> Mapping[str, dict[str, Any] | None]:
        """Single values of those parameters that do not share their group's: see `SubGroupState`."""

    @property
    def loss_scaler(self) -> object | None: ...

    @property
    def dynamic_loss_scale(self) -> bool: ...

    @property
    def overflow(self) -> bool: ...

    @property
    def where(self) -> str: ...

    def prepare(self, names: Sequence[str], world_size: int, rank: int) -> None:
        """Open and check every file that the shards of `names` need."""

    def mapped_group(self, names: Sequence[str], world_size: int, rank: int) -> SubGroupState | None:
        """The stored sub-group of exactly these names and this world, without a copy; None if there is none."""

    def mapped_frozen(self, name: str, world_size: int, rank: int) -> torch.Tensor | None:
        """The stored shard of a frozen parameter for exactly this world, without a copy; None if there is none."""

    def read_weight(self, name: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        """Copy the true elements of one shard into `out` [shard_numel], converting the dtype."""

    def state_keys(self, name: str) -> tuple[dict[str, torch.dtype], dict[str, StateValue]]:
        """Optimizer state of a parameter: keys with one value per element (and dtype), and single values."""

    def read_state(self, name: str, key: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        """As `read_weight`, for one per-element optimizer state."""

    def hyper_parameters(self, name: str) -> dict[str, Any] | None:
        """Hyper-parameters of the optimizer group that holds `name`."""

    def group_hyper_parameters(self) -> list[dict[str, Any]]:
        """Hyper-parameters of all groups, in order."""


@dataclass
class _Plan:
    """Names of this engine and where the source has them (None: not there, the engine's values stay)."""

    stored: dict[str, str | None]
    missing: list[str]
    unexpected: list[str]


def _plan(template: Zero3State, source: Source, shapes_may_differ: bool) -> _Plan:
    wanted: dict[str, torch.Size] = {}
    for group in template.sub_groups:
        wanted.update(zip(group.names, group.shapes, strict=True))
    wanted.update({name: shape for name, (shape, _) in template.frozen.items()})
    by_owner: dict[str, list[str]] = {}
    for alias, owner in template.shared.items():
        by_owner.setdefault(owner, []).append(alias)
    stored: dict[str, str | None] = {}
    wrong: list[str] = []
    for name, shape in wanted.items():
        candidates = (_find(source, known) for known in (name, *by_owner.get(name, ())))
        held = next((found for found in candidates if found is not None), None)
        if held is not None and tuple(source.shapes[held]) != tuple(shape):
            if not shapes_may_differ:
                wrong.append(f"{name}: checkpoint {tuple(source.shapes[held])}, model {tuple(shape)}")
            held = None
        stored[name] = held
    if wrong:
        raise CheckpointMismatch(f"{source.where}: parameters have other shapes: {'; '.join(wrong[:8])}")
    buffers = [name for name in template.buffers if name not in source.buffers]
    if not shapes_may_differ:
        _check_buffers(template, source)
    used = {held for held in stored.values() if held is not None}
    return _Plan(
        stored=stored,
        missing=sorted([name for name, held in stored.items() if held is None] + buffers),
        unexpected=sorted((set(source.shapes) - used) | (set(source.buffers) - set(template.buffers))),
    )


def _find(source: Source, name: str) -> str | None:
    if name in source.shapes:
        return name
    owner = source.aliases.get(name)
    return owner if owner in source.shapes else None


def _check_buffers(template: Zero3State, source: Source) -> None:
    for name, buffer in template.buffers.items():
        held = source.buffers.get(name)
        if held is not None and held.shape != buffer.shape:
            raise CheckpointMismatch(
                f"{source.where}: buffer {name} has shape {tuple(held.shape)}, the model's has {tuple(buffer.shape)}"
            )


def build_state(
    template: Zero3State,
    source: Source,
    *,
    strict: bool,
    load_optimizer_states: bool,
    shapes_may_differ: bool = False,
) -> Zero3State:
    """The state of ``template.rank`` in ``template.world_size`` ranks, from `source`.

    ``template``: the engine's own state; its names and sub-groups are kept, and its values where the source has none
    (only with ``strict=False``, or another shape with ``shapes_may_differ=True``).  Raises `CheckpointMismatch` when
    names (strict), shapes or optimizer state do not fit.
    """
    plan = _plan(template, source, shapes_may_differ)
    if strict and (plan.missing or plan.unexpected):
        raise CheckpointMismatch(
            f"{source.where} does not fit the model: missing in the checkpoint: {_shown(plan.missing)}; "
            f"not in the model: {_shown(plan.unexpected)}. load_module_strict=False loads what fits and keeps the rest"
        )
    held = [name for name in plan.stored.values() if name is not None]
    source.prepare(held, template.world_size, template.rank)
    if load_optimizer_states:
        _check_optimizer(template, source, plan)
    groups = _Groups(template, source, plan.stored, load_optimizer_states)
    keep_scaler = not load_optimizer_states or source.dynamic_loss_scale != template.dynamic_loss_scale
    return Zero3State(
        world_size=template.world_size,
        rank=template.rank,
        sub_groups=groups,
        param_groups=_hyper_parameters(template, source, plan) if load_optimizer_states else template.param_groups,
        frozen=_Frozen(template, source, plan.stored),
        shared=template.shared,
        buffers={name: _fitting(source.buffers.get(name), buffer) for name, buffer in template.buffers.items()},
        loss_scaler=template.loss_scaler if keep_scaler else source.loss_scaler,
        dynamic_loss_scale=template.dynamic_loss_scale,
        overflow=template.overflow if keep_scaler else source.overflow,
        param_dtype=template.param_dtype,
    )


def _fitting(stored: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    return own if stored is None or stored.shape != own.shape else stored


def _shown(names: Sequence[str]) -> str:
    return (", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "none"


def _check_optimizer(template: Zero3State, source: Source, plan: _Plan) -> None:
    remedy = "load_optimizer_states=False loads the weights alone"
    for name, values in source.own_scalars.items():
        if values is not None and not (isinstance(values, Mapping) and all(map(_is_single, values.values()))):
            raise CheckpointMismatch(f"{source.where}: own scalars of {name} are no numbers: {values!r}; {remedy}")
    for group in template.sub_groups:
        held = [plan.stored[name] for name in group.names if plan.stored[name] is not None]
        frozen = [name for name in held if name not in source.trainable]
        if frozen:
            raise CheckpointMismatch(
                f"{source.where} holds no optimizer state for {_shown([str(n) for n in frozen])}, frozen when it was "
                f"saved; {remedy}"
            )
        keys = {tuple(sorted({*arrays, *single})) for arrays, single in (source.state_keys(str(n)) for n in held)}
        keys.discard(())  # of a sub-group that was never stepped, because no rank used it
        if len(keys) > 1:
            raise CheckpointMismatch(f"{source.where}: parameters of one sub-group differ in optimizer state: {keys}")
        ours = {key for key in group.state if key != "step"}
        theirs = {key for key in next(iter(keys), ()) if key != "step"}
        if ours and theirs and ours != theirs:
            raise CheckpointMismatch(
                f"{source.where} holds optimizer state {sorted(theirs)}, this optimizer has {sorted(ours)}; {remedy}"
            )


def _is_single(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _hyper_parameters(template: Zero3State, source: Source, plan: _Plan) -> list[dict[str, Any]]:
    """Stored hyper-parameters for every group of the engine, matched by what the group holds."""
    stored = source.group_hyper_parameters()
    result = []
    for index, own in enumerate(template.param_groups):
        names = [name for group in template.sub_groups if group.param_group == index for name in group.names]
        found = next((plan.stored[name] for name in names if plan.stored[name] is not None), None)
        hyper = source.hyper_parameters(found) if found is not None else None
        if hyper is None and not names and len(stored) == len(template.param_groups):
            hyper = stored[index]
        kept = {key: value for key, value in own.items() if key in _IMPLEMENTATION}
        result.append(dict(own) if hyper is None else {**own, **hyper, **kept})
    return result


class _Groups(Sequence[SubGroupState]):
    """The engine's sub-groups, each made on access: mapped where the file has the same one, else re-sliced."""

    def __init__(
        self, template: Zero3State, source: Source, stored: Mapping[str, str | None], with_optimizer: bool
    ) -> None:
        self._template, self._source, self._stored, self._with_optimizer = template, source, stored, with_optimizer

    def __len__(self) -> int:
        return len(self._template.sub_groups)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        own = self._template.sub_groups[index]
        world, rank = self._template.world_size, self._template.rank
        names = [self._stored[name] for name in own.names]
        held = [name for name in names if name is not None]
        mapped = self._source.mapped_group(held, world, rank) if len(held) == len(names) else None
        if mapped is not None:
            state, scalars = (mapped.state, mapped.own_scalars) if self._with_optimizer else ({}, {})
            scalars = {mine: scalars[name] for mine, name in zip(own.names, held, strict=True) if name in scalars}
            return SubGroupState(own.param_group, list(own.names), list(own.shapes), mapped.fp32, state, scalars)
        return self._resliced(own, names)

    def _resliced(self, own: SubGroupState, names: Sequence[str | None]) -> SubGroupState:
        world, rank = self._template.world_size, self._template.rank
        sizes = [shard_numel(shape.numel(), world) for shape in own.shapes]
        fp32 = torch.zeros(sum(sizes), dtype=torch.float32)
        scalars = {name: self._scalars(name) for name in names if name is not None and self._with_optimizer}
        stepped = [name for name, values in scalars.items() if values is not None]
        shared = [name for name in stepped if name not in self._source.own_scalars]
        first = next(iter(shared or stepped), None)
        arrays, single = self._source.state_keys(first) if first is not None else ({}, {})
        state: dict[str, StateValue] = {key: torch.zeros(fp32.numel(), dtype=dtype) for key, dtype in arrays.items()}
        offset = 0
        for name, size in zip(names, sizes, strict=True):
            span = slice(offset, offset + size)
            offset += size
            if name is None:
                fp32[span] = own.fp32[span].to("cpu", torch.float32)
            else:
                self._source.read_weight(name, world, rank, fp32[span])
            for key in arrays:
                target, present = state[key], own.state.get(key)
                assert isinstance(target, torch.Tensor)
                if name is not None:
                    if scalars[name] is not None:
                        self._source.read_state(name, key, world, rank, target[span])
                elif isinstance(present, torch.Tensor):
                    target[span] = present[span].to("cpu", target.dtype)
        if self._with_optimizer and not any(names):
            state = dict(own.state)
        apart = dict(own.own_scalars) if self._with_optimizer else {}
        for mine, name in zip(own.names, names, strict=True):
            if name in scalars:
                apart.pop(mine, None)
                if first is not None and scalars[name] != single:
                    apart[mine] = scalars[name]
        return SubGroupState(own.param_group, list(own.names), list(own.shapes), fp32, {**state, **single}, apart)

    def _scalars(self, name: str) -> dict[str, Any] | None:
        """The single values of a parameter's optimizer state; None where it was never stepped."""
        own = self._source.own_scalars
        if name in own:
            return own[name]
        arrays, single = self._source.state_keys(name)
        return single if arrays or single else None


class _Frozen(Mapping[str, tuple[torch.Size, torch.Tensor]]):
    """The engine's frozen parameters, each shard made on access."""

    def __init__(self, template: Zero3State, source: Source, stored: Mapping[str, str | None]) -> None:
        self._template, self._source, self._stored = template, source, stored

    def __len__(self) -> int:
        return len(self._template.frozen)

    def __iter__(self) -> Iterator[str]:
        return iter(self._template.frozen)

    def __getitem__(self, name: str) -> tuple[torch.Size, torch.Tensor]:
        shape, own = self._template.frozen[name]
        world, rank, held = self._template.world_size, self._template.rank, self._stored[name]
        if held is None:
            return shape, own
        mapped = self._source.mapped_frozen(held, world, rank)
        if mapped is not None and mapped.dtype == own.dtype:
            return shape, mapped
        out = torch.zeros(shard_numel(shape.numel(), world), dtype=own.dtype)
        self._source.read_weight(held, world, rank, out)
        return shape, out
