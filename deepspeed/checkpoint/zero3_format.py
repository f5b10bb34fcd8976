# SPDX-License-Identifier: Apache-2.0
"""The ZeRO-3 folder layout: file names, and the two dictionaries that a rank writes.

    <dir>/latest                                                   tag text
    <dir>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt        model_states(...) of rank r
    <dir>/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt optim_states(...) of rank r, bf16_ iff bf16 is on

What must hold: names and keys are exactly these, because other tools glob for the names and read the keys.
Building is pure: no file is touched here.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.serialization import exact, plain
from deepspeed.checkpoint.state import Zero3State

__all__ = [
    "INTERNAL_KEYS",
    "LATEST",
    "LATEST_UNIVERSAL",
    "OWN_SCALARS",
    "STRUCTURAL_KEYS",
    "is_shard_name",
    "model_file",
    "model_states",
    "optim_file",
    "optim_states",
    "rank_of",
    "shard_names",
]

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
OWN_SCALARS = "own_scalars"
"""A key of our own beside ``fp32_flat_groups``, there only where parameters missed steps: see `SubGroupState`."""
_SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")

STRUCTURAL_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version".split()
)
"""Keys of a model_states file that describe the file itself; client state may not use them."""

INTERNAL_KEYS = frozenset(
    "module skipped_steps global_steps dp_world_size mp_world_size data_sampler random_ltd".split()
)
"""Keys that `load_checkpoint` takes out of the client state that it returns."""


def model_file(rank: int) -> str:
    """Name of a rank's model_states file."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def optim_file(rank: int, bf16: bool) -> str:
    """Name of a rank's optim_states file."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def is_shard_name(name: str) -> bool:
    """Whether a file name is one of a ZeRO checkpoint's shards."""
    return _SHARD.fullmatch(name) is not None


def rank_of(name: str) -> tuple[int, str] | None:
    """(rank, "model" or "optim") of a shard file name, None for other names and other model-parallel ranks."""
    match = _SHARD.fullmatch(name)
    if match is None or int(match.group(2)) != 0:
        return None
    return int(match.group(1)), match.group(3)


def shard_names(folder: Path) -> list[str]:
    """The shard files in a tag folder, by name."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if is_shard_name(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _module_dict(order: Iterable[str], state: Zero3State, excluded: frozenset[str]) -> OrderedDict[str, torch.Tensor]:
    """Module state dict: parameters as empty tensors, buffers whole, tied aliases included."""
    empty: dict[str, torch.Tensor] = {}
    for group in state.sub_groups:
        for name in group.names:
            empty[name] = torch.empty(0, dtype=state.param_dtype)
    for name, (_, shard) in state.frozen.items():
        if name not in excluded:
            empty[name] = torch.empty(0, dtype=shard.dtype)
    for alias, owner in state.shared.items():
        if owner in empty:
            empty[alias] = empty[owner]
    entries: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in order:
        if name in state.buffers:
            entries[name] = exact(state.buffers[name])
        elif name in empty:
            entries[name] = empty[name]
    for name, tensor in [*empty.items(), *((n, exact(b)) for n, b in state.buffers.items())]:
        entries.setdefault(name, tensor)
    return entries


def model_states(
    state: Zero3State,
    *,
    order: Iterable[str],
    counters: Mapping[str, int],
    lr_scheduler: dict[str, Any] | None,
    ds_config: Mapping[str, Any],
    version: str,
    client_state: Mapping[str, Any],
    exclude_frozen: bool,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of this rank's model_states file.

    ``extra``: further entries of the module's state dict (what modules give as their extra state).
    ``order``: names of the module's state dict in its order.  ``counters``: skipped_steps, global_steps,
    global_samples.  Raises `ValueError` when `client_state` uses a key that describes the file itself.
    """
    taken = sorted(STRUCTURAL_KEYS & set(client_state))
    if taken:
        raise ValueError(f"client_state uses {', '.join(taken)}, which the checkpoint needs itself; rename these keys")
    frozen = {} if exclude_frozen else dict(state.frozen)
    excluded = frozenset(state.frozen) if exclude_frozen else frozenset()
    return {
        "module": OrderedDict([*_module_dict(order, state, excluded).items(), *(extra or {}).items()]),
        "buffer_names": list(state.buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(shape)) for name, shape in zip(group.names, group.shapes, strict=True))
            for group in state.sub_groups
        ],
        "frozen_param_shapes": None
        if exclude_frozen
        else OrderedDict((n, torch.Size(s)) for n, (s, _) in frozen.items()),
        "shared_params": dict(state.shared) if state.rank == 0 else {},
        "frozen_param_fragments": None
        if exclude_frozen
        else OrderedDict((n, exact(t)) for n, (_, t) in frozen.items()),
        "lr_scheduler": lr_scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": state.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": plain(ds_config),
        "ds_version": version,
        **client_state,
    }


def _exact(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: exact(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def optim_states(state: Zero3State, *, ds_config: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The content of this rank's optim_states file."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(state.sub_groups):
        members.setdefault(group.param_group, []).append(index)
    inner = {
        "state": {index: _exact(group.state) for index, group in enumerate(state.sub_groups) if group.state},
        "param_groups": [
            {**plain({k: v for k, v in group.items() if k != "params"}), "params": members.get(index, [])}
            for index, group in enumerate(state.param_groups)
        ],
    }
    own = {
        name: scalars and _exact(scalars) for group in state.sub_groups for name, scalars in group.own_scalars.items()
    }
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "loss_scaler": state.loss_scaler,
            "dynamic_loss_scale": bool(state.dynamic_loss_scale),
            "overflow": bool(state.overflow),
            "partition_count": state.world_size,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [exact(group.fp32) for group in state.sub_groups],
            **({OWN_SCALARS: own} if own else {}),
        },
        "ds_config": plain(ds_config),
        "ds_version": version,
    }
