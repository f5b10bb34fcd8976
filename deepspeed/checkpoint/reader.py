# SPDX-License-Identifier: Apache-2.0
"""A ZeRO-3 folder as a source of shards, at the world size it was saved with or any other.

What must hold: files are mapped, so only the slices that this rank takes are read; the structure of every file that
this rank takes from is checked in `prepare`, before a parameter changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.checkpoint.folder import TagFolder
from deepspeed.checkpoint.reshard import StateValue, pieces
from deepspeed.checkpoint.serialization import load_file
from deepspeed.checkpoint.state import SubGroupState, shard_numel
from deepspeed.checkpoint.zero3_format import OWN_SCALARS
from deepspeed.errors import CheckpointCorrupt, CheckpointMismatch

__all__ = ["Layout", "Location", "ZeroSource", "check_optim", "parse_layout"]


@dataclass(frozen=True)
class Location:
    """Where a trainable parameter lies: sub-group, offset in every rank's flat group, full shape."""

    group: int
    offset: int
    shape: torch.Size


@dataclass(frozen=True)
class Layout:
    """Positions of all parameters of a folder of ``world_size`` ranks.

    ``groups``: names of each sub-group in order; ``group_numel``: elements of each flat group; ``frozen``: full shapes.
    """

    world_size: int
    locations: dict[str, Location]
    groups: list[tuple[str, ...]]
    group_numel: list[int]
    frozen: dict[str, torch.Size]


def parse_layout(model: Mapping[str, Any], world_size: int, where: str) -> Layout:
    """The layout that a model_states file describes; `CheckpointCorrupt` where it makes no sense."""
    try:
        shapes = model["param_shapes"] or []
        shapes = [shapes] if isinstance(shapes, Mapping) else list(shapes)
        locations: dict[str, Location] = {}
        group_numel = []
        for index, group in enumerate(shapes):
            offset = 0
            for name, shape in group.items():
                shape = _checked_shape(shape, f"{where}: {name}")
                locations[str(name)] = Location(index, offset, shape)
                offset += shard_numel(shape.numel(), world_size)
            group_numel.append(offset)
        frozen = model.get("frozen_param_shapes") or {}
        saved = int(model.get("dp_world_size", world_size))
        if saved != world_size:
            raise CheckpointCorrupt(f"{where} was saved by {saved} ranks, but the folder holds files of {world_size}")
        return Layout(
            world_size=world_size,
            locations=locations,
            groups=[tuple(str(name) for name in group) for group in shapes],
            group_numel=group_numel,
            frozen={str(name): _checked_shape(shape, f"{where}: {name}") for name, shape in frozen.items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointCorrupt(f"{where} is no ZeRO-3 model_states file: {type(error).__name__}: {error}") from error


def _checked_shape(shape: Iterable[int], what: str) -> torch.Size:
    dims = [int(dim) for dim in shape]
    numel = 1
    for dim in dims:
        numel *= dim
    if any(dim < 0 for dim in dims) or numel >= 1 << 48:
        raise CheckpointCorrupt(f"{what} has the impossible shape {dims}")
    return torch.Size(dims)


def check_optim(optim: Any, layout: Layout, where: str) -> dict[str, Any]:
    """The inner dictionary of an optim_states file, after its structure was compared with the layout."""
    try:
        inner = optim["optimizer_state_dict"]
        stage, count = int(inner["zero_stage"]), inner["partition_count"]
        flat = inner["fp32_flat_groups"]
        states, groups = inner["optimizer_state_dict"]["state"], inner["optimizer_state_dict"]["param_groups"]
        count = int(count[0] if isinstance(count, (list, tuple)) and count else count)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise CheckpointCorrupt(f"{where} is no ZeRO-3 optim_states file: {type(error).__name__}: {error}") from error
    if stage != 3:
        raise CheckpointMismatch(f"{where} is of ZeRO stage {stage}; only stage 3 is read")
    if count != layout.world_size:
        raise CheckpointCorrupt(f"{where} was saved by {count} ranks, the folder holds files of {layout.world_size}")
    sizes = [int(group.numel()) if isinstance(group, torch.Tensor) else -1 for group in flat]
    if sizes != layout.group_numel:
        raise CheckpointCorrupt(f"{where} has flat groups of {sizes} elements, the shapes need {layout.group_numel}")
    if not isinstance(states, Mapping) or not all(isinstance(entry, Mapping) for entry in groups):
        raise CheckpointCorrupt(f"{where} has optimizer state of an unknown form")
    if set(states) - set(range(len(sizes))):
        raise CheckpointCorrupt(f"{where} has optimizer state of {len(states)} sub-groups for {len(sizes)}")
    return inner


class ZeroSource:
    """Shards out of one tag folder (a `reshard.Source`).

    ``home``: the saved rank whose model_states file gives buffers, scheduler and client state.
    """

    def __init__(self, folder: TagFolder, home: int, allow: Iterable[str] = ()) -> None:
        self._folder, self._home, self._allow = folder, home, tuple(allow)
        self._models: dict[int, dict[str, Any]] = {}
        self._optims: dict[int, dict[str, Any]] = {}
        self.where = str(folder.path)
        self.layout = parse_layout(self.model(home), folder.world_size, str(folder.path / folder.model_files[home]))
        shapes = {name: place.shape for name, place in self.layout.locations.items()}
        self.shapes: Mapping[str, torch.Size] = {**shapes, **self.layout.frozen}
        self.trainable = frozenset(shapes)
        module = self.model(home).get("module") or {}
        names = self.model(home).get("buffer_names") or []
        self.buffers: Mapping[str, torch.Tensor] = {
            name: module[name] for name in names if isinstance(module.get(name), torch.Tensor)
        }
        self._group_of = {names: index for index, names in enumerate(self.layout.groups)}

    def model(self, rank: int) -> dict[str, Any]:
        """The model_states dictionary of a saved rank."""
        if rank not in self._models:
            path = self._folder.path / self._folder.model_files[rank]
            content = load_file(path, allow=self._allow)
            if not isinstance(content, dict) or "param_shapes" not in content:
                raise CheckpointCorrupt(f"{path} is not a ZeRO-3 model_states file")
            self._models[rank] = content
        return self._models[rank]

    def optim(self, rank: int) -> dict[str, Any]:
        """The checked inner optimizer dictionary of a saved rank."""
        if rank not in self._optims:
            path = self._folder.path / self._folder.optim_files[rank]
            self._optims[rank] = check_optim(load_file(path, allow=self._allow), self.layout, str(path))
        return self._optims[rank]

    @property
    def aliases(self) -> Mapping[str, str]:
        first = min(self._folder.ranks)
        shared = self.model(first).get("shared_params") or {}
        return shared if isinstance(shared, dict) else dict(shared)

    @property
    def loss_scaler(self) -> object | None:
        scaler: object | None = self.optim(self._home).get("loss_scaler")
        return scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        return bool(self.optim(self._home).get("dynamic_loss_scale", False))

    @property
    def overflow(self) -> bool:
        return bool(self.optim(self._home).get("overflow", False))

    def prepare(self, names: Sequence[str], world_size: int, rank: int) -> None:
        saved = self.layout.world_size
        trainable: set[int] = {self._home}
        frozen: set[int] = set()
        for name in names:
            target = trainable if name in self.trainable else frozen
            if world_size == saved:
                target.add(rank)
            else:
                target.update(p.source_rank for p in pieces(self.shapes[name].numel(), saved, world_size, rank))
        absent = sorted((trainable | frozen) - set(self._folder.ranks))
        if absent:
            raise CheckpointMismatch(
                f"{self.where} was saved by {saved} ranks with node-local storage; loading on {world_size} ranks needs "
                f"the files of ranks {absent}, which are not on this node. Copy all shards into one folder"
            )
        for source in trainable:
            self.optim(source)
        for source in frozen:
            self._check_fragments(source)

    def _check_fragments(self, rank: int) -> None:
        fragments = self.model(rank).get("frozen_param_fragments") or {}
        for name, shape in self.layout.frozen.items():
            held = fragments.get(name)
            need = shard_numel(shape.numel(), self.layout.world_size)
            if not isinstance(held, torch.Tensor) or held.numel() != need:
                raise CheckpointCorrupt(f"{self.where}: rank {rank} lacks its {need} elements of frozen {name}")

    @property
    def own_scalars(self) -> Mapping[str, dict[str, Any] | None]:
        found: Mapping[str, dict[str, Any] | None] = self.optim(self._home).get(OWN_SCALARS) or {}
        return found

    def mapped_group(self, names: Sequence[str], world_size: int, rank: int) -> SubGroupState | None:
        index = self._group_of.get(tuple(names))
        if index is None or world_size != self.layout.world_size:
            return None
        fp32 = self.optim(rank)["fp32_flat_groups"][index].detach()
        if fp32.dtype != torch.float32:
            return None
        state = self.optim(rank)["optimizer_state_dict"]["state"].get(index, {})
        shapes = [self.layout.locations[name].shape for name in names]
        own = {name: self.own_scalars[name] for name in names if name in self.own_scalars}
        return SubGroupState(0, list(names), shapes, fp32.view(-1), dict(state), own)

    def mapped_frozen(self, name: str, world_size: int, rank: int) -> torch.Tensor | None:
        if world_size != self.layout.world_size or name not in self.layout.frozen:
            return None
        shard: torch.Tensor = self.model(rank)["frozen_param_fragments"][name]
        return shard.detach().view(-1)

    def read_weight(self, name: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        place = self.layout.locations.get(name)
        for piece in pieces(self.shapes[name].numel(), self.layout.world_size, world_size, rank):
            if place is None:
                stored, base = self.model(piece.source_rank)["frozen_param_fragments"][name], 0
            else:
                stored, base = self.optim(piece.source_rank)["fp32_flat_groups"][place.group], place.offset
            _copy(stored, base + piece.source_start, out, piece.target_start, piece.length)

    def _state(self, rank: int, name: str) -> Mapping[str, StateValue]:
        state: Mapping[str, StateValue] = self.optim(rank)["optimizer_state_dict"]["state"].get(
            self.layout.locations[name].group, {}
        )
        return state

    def state_keys(self, name: str) -> tuple[dict[str, torch.dtype], dict[str, StateValue]]:
        if name not in self.trainable:
            return {}, {}
        arrays: dict[str, torch.dtype] = {}
        single: dict[str, StateValue] = {}
        size = self.layout.group_numel[self.layout.locations[name].group]
        for key, value in self._state(self._home, name).items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                single[key] = value
            elif value.numel() == size:
                arrays[key] = value.dtype
            else:
                raise CheckpointMismatch(
                    f"{self.where}: optimizer state {key!r} of {name} has {value.numel()} elements for {size} "
                    "parameters and cannot be re-sliced; load it with the world size and sub_group_size of its save"
                )
        return arrays, single

    def read_state(self, name: str, key: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        place = self.layout.locations[name]
        for piece in pieces(place.shape.numel(), self.layout.world_size, world_size, rank):
            stored = self._state(piece.source_rank, name).get(key)
            if not isinstance(stored, torch.Tensor):
                raise CheckpointCorrupt(f"{self.where}: rank {piece.source_rank} lacks state {key!r} of {name}")
            _copy(stored, place.offset + piece.source_start, out, piece.target_start, piece.length)

    def hyper_parameters(self, name: str) -> dict[str, Any] | None:
        place = self.layout.locations.get(name)
        for group in self.optim(self._home)["optimizer_state_dict"]["param_groups"]:
            if place is not None and place.group in group.get("params", ()):
                return {key: value for key, value in group.items() if key != "params"}
        return None

    def group_hyper_parameters(self) -> list[dict[str, Any]]:
        groups = self.optim(self._home)["optimizer_state_dict"]["param_groups"]
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _copy(stored: torch.Tensor, start: int, out: torch.Tensor, target: int, length: int) -> None:
    out[target : target + length].copy_(stored.detach().view(-1)[start : start + length])
