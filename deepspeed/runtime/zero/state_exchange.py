# SPDX-License-Identifier: Apache-2.0
"""Between the core's live shards and the dataclasses that checkpoints are written from and read into.

Exporting makes views, no copies; only split masters are joined, in host memory. Importing writes primary shards and
masters as a new version and leaves no copy of old weights valid (hpZ promise H2). Everything was checked before:
importing does not fail half-way on a bad file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.state import SubGroupState, Zero3State
from deepspeed.errors import CheckpointMismatch

from .core import host
from .core.master import MasterWeights
from .core.model import ShardedModel
from .core.param import ShardedParam
from .core.subgroup import Apart, SubGroup

CPU = torch.device("cpu")


def shared_names(module: nn.Module) -> dict[str, str]:
    """Alias of every tied parameter -> the name it is listed under."""
    first: dict[nn.Parameter, str] = {}
    shared = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            shared[name] = first[param]
    return shared


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the state dict, by name."""
    found = {}
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _common(model: ShardedModel, frozen: dict[str, ShardedParam]) -> dict[str, Any]:
    groups = model.plan.groups
    return {
        "world_size": groups.primary.size,
        "rank": groups.primary.rank,
        "frozen": {name: (p.shape, p.shard) for name, p in frozen.items()},
        "shared": shared_names(model.module),
        "buffers": persistent_buffers(model.module),
        "param_dtype": model.plan.dtype or torch.float32,
    }


def export_model_state(model: ShardedModel) -> Zero3State:
    """State of a model without an optimizer: every parameter is listed as frozen."""
    return Zero3State(sub_groups=[], param_groups=[], **_common(model, model.params))


def export_training_state(
    model: ShardedModel, master: MasterWeights, loss_scaler: Any, dynamic: bool, overflow: bool
) -> Zero3State:
    """State of a model with master weights and an optimizer."""
    sub_groups = []
    for sub in master.sub_groups:
        state = master.optimizer.state.get(sub.master, {})
        sub_groups.append(
            SubGroupState(
                param_group=sub.group_index,
                names=[p.name for p in sub.params],
                shapes=[p.shape for p in sub.params],
                fp32=sub.fp32(CPU),
                state={key: value for key, value in state.items() if value is not None},
                own_scalars=own_scalars(sub),
            )
        )
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in master.optimizer.param_groups
    ]
    frozen = {name: p for name, p in model.params.items() if p not in master.places}
    return Zero3State(
        sub_groups=sub_groups,
        param_groups=options,
        loss_scaler=loss_scaler,
        dynamic_loss_scale=dynamic,
        overflow=overflow,
        **_common(model, frozen),
    )


def import_model_state(model: ShardedModel, state: Zero3State) -> None:
    """Copy shards listed as frozen, and buffers, into the model."""
    for name, (_, shard) in state.frozen.items():
        p = model.params[name]
        host.before_write((p,))
        p.shard.copy_(shard)
        p.wrote_primary()
    live = persistent_buffers(model.module)
    for name, buffer in state.buffers.items():
        if name in live:
            live[name].copy_(buffer)
    model.fetcher.weights_changed()


def import_training_state(
    model: ShardedModel, master: MasterWeights, state: Zero3State, load_optimizer_states: bool
) -> None:
    """Copy masters, optimizer state and everything of ``import_model_state`` in."""
    if len(state.sub_groups) != len(master.sub_groups):
        raise CheckpointMismatch(
            f"the checkpoint was cut into {len(state.sub_groups)} sub-groups, this engine has {len(master.sub_groups)}"
        )
    for sub, saved in zip(master.sub_groups, state.sub_groups, strict=True):
        sub.write(saved.fp32)
        if load_optimizer_states:
            _import_optimizer_state(master, sub.master, saved.state)
            import_own_scalars(sub, saved.own_scalars)
    if load_optimizer_states:
        for group, options in zip(master.optimizer.param_groups, state.param_groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
    import_model_state(model, state)


def own_scalars(sub: SubGroup) -> dict[str, dict[str, Any] | None]:
    """See ``SubGroupState``."""
    return {sub.params[i].name: dict(apart.scalars) if apart.begun else None for i, apart in sub.apart.items()}


def import_own_scalars(sub: SubGroup, saved: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Set apart what missed steps; parameters with the same values share them again."""
    alike: dict[Any, Apart] = {}
    sub.apart = {}
    for i, p in enumerate(sub.params):
        if p.name in saved:
            scalars = saved[p.name]
            key = None if scalars is None else tuple(sorted((name, float(value)) for name, value in scalars.items()))
            if key not in alike:
                alike[key] = Apart(scalars is not None, scalars or {})
            sub.apart[i] = alike[key]


def _import_optimizer_state(master: MasterWeights, flat: torch.Tensor, saved: dict[str, Any]) -> None:
    live = master.optimizer.state[flat]
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        current = live.get(key)
        if not isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
            current.fill_(value)
        elif not isinstance(value, torch.Tensor):
            live[key] = torch.tensor(float(value), dtype=torch.float32) if key == "step" else value
        elif isinstance(current, torch.Tensor) and current.shape == value.shape:
            current.copy_(value)
        elif value.dim() == 0:
            live[key] = value.detach().clone().to(torch.float32)
        else:
            live[key] = value.detach().to(device=flat.device, copy=True)
    step = live.get("step")
    fused = any(group.get("fused") or group.get("capturable") for group in master.optimizer.param_groups)
    if isinstance(step, torch.Tensor) and fused and step.device != flat.device:
        live["step"] = step.to(flat.device)
