# SPDX-License-Identifier: Apache-2.0
"""The universal layout: one file per parameter and state, unsharded, so any tool can read any of them.

    <folder>/zero/<parameter name>/{fp32,exp_avg,exp_avg_sq,...}.pt    the flattened tensor, unpadded (or under "param")
    <folder>/zero/optimizer_state.pt                                   hyper-parameters, step, loss scaler
    <folder>/*_model_states.pt                                         copies of the ZeRO files: shapes, buffers, ...
    <parent>/latest_universal                                          name of <folder>

What must hold: the layout is what other tools of the field write and read; a tensor is written and read by itself.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.folder import open_tag
from deepspeed.checkpoint.reader import Layout, ZeroSource, parse_layout
from deepspeed.checkpoint.reshard import StateValue, pieces
from deepspeed.checkpoint.serialization import exact, load_file, save_file
from deepspeed.checkpoint.state import SubGroupState
from deepspeed.checkpoint.store import Storage, safe_component
from deepspeed.checkpoint.writer import new_nonce
from deepspeed.checkpoint.zero3_format import LATEST_UNIVERSAL, OWN_SCALARS, rank_of, shard_names
from deepspeed.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch

__all__ = ["UniversalSource", "convert", "is_universal"]

_PARAMS = "zero"
_COMMON = "optimizer_state.pt"
_WEIGHT = "fp32"
_STEP = "step"


def is_universal(folder: Path) -> bool:
    """Whether a folder has the universal layout."""
    return (folder / _PARAMS).is_dir()


class UniversalSource:
    """Shards out of a universal folder (a `reshard.Source`), at any world size."""

    def __init__(self, folder: Path, allow: Iterable[str] = ()) -> None:
        self.where = str(folder)
        self._zero, self._allow = folder / _PARAMS, tuple(allow)
        models = {found[0]: n for n in shard_names(folder) if (found := rank_of(n)) is not None and found[1] == "model"}
        if not models:
            raise CheckpointCorrupt(f"{folder} holds no zero_pp_rank_*_model_states.pt files")
        self._models = {rank: folder / name for rank, name in models.items()}
        first = min(models)
        self.model_name = models[first]
        self.model: dict[str, Any] = load_file(folder / self.model_name, allow=self._allow)
        saved = int(self.model.get("dp_world_size", len(models)))
        self.layout: Layout = parse_layout(self.model, saved, str(folder / self.model_name))
        trainable = {name: place.shape for name, place in self.layout.locations.items()}
        frozen = self.layout.frozen if len(models) == saved else {}
        self.shapes: Mapping[str, torch.Size] = {**trainable, **frozen}
        self.trainable = frozenset(trainable)
        module = self.model.get("module") or {}
        names = self.model.get("buffer_names") or []
        self.buffers: Mapping[str, torch.Tensor] = {
            name: module[name] for name in names if isinstance(module.get(name), torch.Tensor)
        }
        self.aliases: Mapping[str, str] = dict(self.model.get("shared_params") or {})
        common = self._zero / _COMMON
        self._common: dict[str, Any] = load_file(common, allow=self._allow) if common.is_file() else {}
        self.loss_scaler: object | None = self._common.get("loss_scaler")
        self.dynamic_loss_scale = bool(self._common.get("dynamic_loss_scale", False))
        self.overflow = bool(self._common.get("overflow", False))
        self.own_scalars: Mapping[str, dict[str, Any] | None] = self._common.get(OWN_SCALARS) or {}
        self._fragments: dict[int, Mapping[str, torch.Tensor]] = {}

    def _tensor(self, name: str, key: str) -> torch.Tensor:
        path = self._zero / name / f"{key}.pt"
        content = load_file(path, allow=self._allow)
        if isinstance(content, Mapping):
            content = content.get("param")
        if not isinstance(content, torch.Tensor) or content.numel() != self.shapes[name].numel():
            raise CheckpointCorrupt(f"{path} does not hold the {self.shapes[name].numel()} elements of {name}")
        return content.detach().reshape(-1)

    def _keys(self, name: str) -> list[str]:
        try:
            found = sorted(entry.stem for entry in (self._zero / name).iterdir() if entry.suffix == ".pt")
        except OSError as error:
            raise CheckpointCorrupt(f"{self._zero / name} cannot be read: {error}") from error
        return [key for key in found if key not in (_WEIGHT, _STEP)]

    def prepare(self, names: Sequence[str], world_size: int, rank: int) -> None:
        for name in names:
            if name in self.trainable:
                self._tensor(name, _WEIGHT)
                for key in self._keys(name):
                    self._tensor(name, key)
            else:
                for piece in pieces(self.shapes[name].numel(), self.layout.world_size, world_size, rank):
                    self._fragment(piece.source_rank, name)

    def _fragment(self, rank: int, name: str) -> torch.Tensor:
        if rank not in self._fragments:
            self._fragments[rank] = load_file(self._models[rank], allow=self._allow).get("frozen_param_fragments") or {}
        held = self._fragments[rank].get(name)
        if not isinstance(held, torch.Tensor):
            raise CheckpointCorrupt(f"{self._models[rank]} lacks its shard of frozen {name}")
        return held.detach().reshape(-1)

    def mapped_group(self, names: Sequence[str], world_size: int, rank: int) -> SubGroupState | None:
        return None

    def mapped_frozen(self, name: str, world_size: int, rank: int) -> torch.Tensor | None:
        return None

    def read_weight(self, name: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        if name in self.trainable:
            self._read(name, _WEIGHT, world_size, rank, out)
            return
        for piece in pieces(self.shapes[name].numel(), self.layout.world_size, world_size, rank):
            stored = self._fragment(piece.source_rank, name)[piece.source_start : piece.source_start + piece.length]
            out[piece.target_start : piece.target_start + piece.length].copy_(stored)

    def _read(self, name: str, key: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        stored = self._tensor(name, key)
        for piece in pieces(stored.numel(), 1, world_size, rank):
            wanted = stored[piece.source_start : piece.source_start + piece.length]
            out[piece.target_start : piece.target_start + piece.length].copy_(wanted)

    def read_state(self, name: str, key: str, world_size: int, rank: int, out: torch.Tensor) -> None:
        self._read(name, key, world_size, rank, out)

    def state_keys(self, name: str) -> tuple[dict[str, torch.dtype], dict[str, StateValue]]:
        if name not in self.trainable:
            return {}, {}
        arrays = {key: self._tensor(name, key).dtype for key in self._keys(name)}
        common = self._optimizer().get("state", {}).get(self.layout.locations[name].group, {})
        single = {
            key: value
            for key, value in common.items()
            if key not in arrays and (not isinstance(value, torch.Tensor) or value.dim() == 0)
        }
        path = self._zero / name / f"{_STEP}.pt"
        if path.is_file():
            step = load_file(path, allow=self._allow)
            single[_STEP] = step.get("param") if isinstance(step, Mapping) else step
        return arrays, single

    def _optimizer(self) -> dict[str, Any]:
        inner: dict[str, Any] = self._common.get("optimizer_state_dict") or {}
        return inner

    def group_hyper_parameters(self) -> list[dict[str, Any]]:
        groups = self._optimizer().get("param_groups") or self._common.get("param_groups") or []
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def hyper_parameters(self, name: str) -> dict[str, Any] | None:
        place = self.layout.locations.get(name)
        for group in self._optimizer().get("param_groups") or self._common.get("param_groups") or []:
            if place is not None and place.group in group.get("params", ()):
                return {key: value for key, value in group.items() if key != "params"}
        return None


Progress = Callable[[Iterable[str], int], Iterable[str]]


def convert(
    source_folder: Path,
    target_folder: Path,
    *,
    workers: int = 2,
    inject_missing_state: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> int:
    """Write a ZeRO-3 tag folder in the universal layout; returns the number of parameters.

    ``workers``: threads; each holds one parameter at a time.  ``inject_missing_state``: write zero moments where the
    optimizer has none yet.  ``verify``: compare hashes first.  An existing universal folder is replaced once the new
    one is complete; any other existing folder is refused with `CheckpointError`.
    """
    folder = open_tag(source_folder)
    if verify:
        folder.verify([name for rank in folder.ranks for name in folder.files_of(rank)])
    source = ZeroSource(folder, folder.ranks[0])
    names = sorted(source.trainable)
    source.prepare(list(source.shapes), 1, 0)
    safe_component(target_folder.name)
    for name in names:
        if name in (".", "..") or "/" in name or "\0" in name:
            raise CheckpointMismatch(f"{source_folder}: parameter name {name!r} cannot be a folder name")
    storage, nonce = Storage(), new_nonce()
    if target_folder.exists() and any(target_folder.iterdir()) and not is_universal(target_folder):
        raise CheckpointError(f"{target_folder} exists and is not a universal checkpoint; give another folder")
    staging = target_folder.parent / f".{target_folder.name}.{nonce}.tmp"
    try:
        storage.make_dir(staging / _PARAMS)
        job = _Conversion(source, staging, storage, inject_missing_state)
        with ThreadPoolExecutor(max(1, workers)) as pool:
            done = pool.map(job.write_parameter, names)
            for _ in progress(done, len(names)) if progress else done:
                pass
        job.write_common(folder.ranks[0])
        for rank in folder.ranks:
            shutil.copyfile(source_folder / folder.model_files[rank], staging / folder.model_files[rank])
        storage.sync_dir(staging)
        _swap(storage, staging, target_folder, nonce)
    except BaseException:
        storage.remove_tree(staging)
        raise
    _write_latest(storage, target_folder, nonce)
    return len(names)


class _Conversion:
    def __init__(self, source: ZeroSource, staging: Path, storage: Storage, inject: bool) -> None:
        self._source, self._staging, self._storage, self._inject = source, staging, storage, inject
        self._largest = max((shape.numel() for shape in source.shapes.values()), default=0)
        self._thread = threading.local()

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This thread's one buffer, as large as the largest parameter needs; the heap does not grow."""
        held: torch.Tensor | None = getattr(self._thread, "buffer", None)
        if held is None or held.numel() < numel * dtype.itemsize:
            held = self._thread.buffer = torch.empty(self._largest * max(4, dtype.itemsize), dtype=torch.uint8)
        return held[: numel * dtype.itemsize].view(dtype)

    def write_parameter(self, name: str) -> str:
        folder = self._staging / _PARAMS / name
        folder.mkdir()
        numel = self._source.shapes[name].numel()
        weight = self._buffer(numel, torch.float32)
        self._source.read_weight(name, 1, 0, weight)
        self._put(folder / f"{_WEIGHT}.pt", exact(weight))
        arrays, single = self._source.state_keys(name)
        for key, dtype in arrays.items():
            value = self._buffer(numel, dtype)
            self._source.read_state(name, key, 1, 0, value)
            self._put(folder / f"{key}.pt", exact(value))
        if not arrays and self._inject:
            for key in ("exp_avg", "exp_avg_sq"):
                self._put(folder / f"{key}.pt", torch.zeros(numel))
        return name

    def write_common(self, rank: int) -> None:
        """Hyper-parameters, counters and scaler of the optimizer, without the sharded arrays."""
        inner = self._source.optim(rank)
        optimizer = inner["optimizer_state_dict"]
        single = {
            index: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor) or v.dim() == 0}
            for index, state in optimizer["state"].items()
        }
        common = {key: value for key, value in inner.items() if key not in ("fp32_flat_groups", "optimizer_state_dict")}
        common["optimizer_state_dict"] = {"state": single, "param_groups": optimizer["param_groups"]}
        common["param_groups"] = optimizer["param_groups"]
        self._put(self._staging / _PARAMS / _COMMON, common)

    def _put(self, path: Path, content: Any) -> None:
        self._storage.write_file(path, lambda sink: save_file(content, sink))


def _swap(storage: Storage, staging: Path, target: Path, nonce: str) -> None:
    old = target.parent / f".{target.name}.{nonce}.n0.tmp"
    if target.exists():
        os.rename(target, old)
    storage.rename(staging, target)
    storage.sync_dir(target.parent)
    storage.remove_tree(old)


def _write_latest(storage: Storage, target: Path, nonce: str) -> None:
    temporary = target.parent / f".{LATEST_UNIVERSAL}.{nonce}.tmp"
    with storage.open_new(temporary) as handle:
        handle.write(target.name.encode())
        os.fsync(handle.fileno())
    storage.replace(temporary, target.parent / LATEST_UNIVERSAL)
    storage.sync_dir(target.parent)
