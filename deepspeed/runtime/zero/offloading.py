# SPDX-License-Identifier: Apache-2.0
"""``offload_states`` and ``reload_states``: free device memory between phases (generation in RLHF, say).

Tensors keep their identity: their data moves to the host and back, so every view that the core holds of a flat tensor
is made anew on the way back. Works with any torch optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from deepspeed.errors import ConfigError, UsageError
from deepspeed.utils.logging import logger

from .offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

if TYPE_CHECKING:
    from .stage3 import DeepSpeedZeroOptimizer_Stage3

Kinds = OffloadStateTypeEnum


def offload_states(
    optimizer: DeepSpeedZeroOptimizer_Stage3,
    include: Iterable[OffloadStateTypeEnum] | None,
    device: OffloadDeviceEnum,
    pin_memory: bool,
    non_blocking: bool,
) -> None:
    """Move the kinds of state in ``include`` (default: all) to the host; those there already are skipped.

    Raises:
        ConfigError: a device other than cpu or none.
        UsageError: parameters are offloaded by configuration.
    """
    device = OffloadDeviceEnum(device)
    if device is OffloadDeviceEnum.none:
        logger.warning("offload_states(device=none): nothing to do")
        return
    if device is not OffloadDeviceEnum.cpu:
        raise ConfigError(f"offload_states: device {device.value!r} is not supported; use OffloadDeviceEnum.cpu")
    plan = optimizer.sharded.plan
    if plan.shard_device != plan.device:
        raise UsageError("offload_states: zero_optimization.offload_param keeps parameters on the host already")
    wanted = {Kinds(kind) for kind in include} if include is not None else set(Kinds)
    wanted -= optimizer.offloaded
    optimizer.resolve()
    optimizer.sharded.fetcher.release_all(persistent=True)
    pin = pin_memory and plan.device.type == "cuda"
    for kind in wanted:
        for tensor in _tensors(optimizer, kind):
            if tensor.device.type == plan.device.type:
                _to_host(tensor, pin, non_blocking)
    _renew_views(optimizer, wanted)
    if Kinds.contiguous_grad_buffer in wanted and not optimizer.grads.has_gradients:
        optimizer.grad_shards.free()
    optimizer.offloaded |= wanted
    if non_blocking and plan.device.type == "cuda":
        torch.cuda.current_stream(plan.device).synchronize()


def reload_states(optimizer: DeepSpeedZeroOptimizer_Stage3, non_blocking: bool) -> None:
    """Bring everything back to the device; weights count as written, so no older copy is used."""
    plan, master = optimizer.sharded.plan, optimizer.master
    offloaded, optimizer.offloaded = optimizer.offloaded, set()
    for kind in offloaded:
        target = plan.device if kind in (Kinds.lp_params, Kinds.lp_grads) else master.master_device
        for tensor in _tensors(optimizer, kind):
            tensor.data = tensor.data.to(target, non_blocking=non_blocking)
    _renew_views(optimizer, offloaded)


def _renew_views(optimizer: DeepSpeedZeroOptimizer_Stage3, kinds: set[OffloadStateTypeEnum]) -> None:
    """Make views of moved tensors anew: an old view would keep the old memory alive, and be stale."""
    if kinds & {Kinds.lp_params, Kinds.hp_params}:
        optimizer.master.renew_views()
        for unit in optimizer.sharded.units:
            unit.renew_shards()
    if Kinds.lp_grads in kinds:
        optimizer.grad_shards.renew_views()


def _tensors(optimizer: DeepSpeedZeroOptimizer_Stage3, kind: OffloadStateTypeEnum) -> list[torch.Tensor]:
    master = optimizer.master
    if kind is Kinds.optim_states:
        states = [master.optimizer.state.get(sub.master, {}) for sub in master.sub_groups]
        return [
            value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()
        ]
    if kind is Kinds.hp_params:
        return [sub.master if sub.low is None else sub.low for sub in master.sub_groups]
    if kind is Kinds.lp_params:
        flats = [sub.shards for sub in master.sub_groups if sub.shards is not None and not sub.aliased]
        return [*flats, *(p.shard for p in optimizer.sharded.params.values() if p not in master.flat_params)]
    if kind is Kinds.lp_grads:
        return optimizer.grad_shards.flats()
    return []


def _to_host(tensor: torch.Tensor, pin: bool, non_blocking: bool) -> None:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
    host.copy_(tensor, non_blocking=non_blocking)
    tensor.data = host
