# SPDX-License-Identifier: Apache-2.0
"""Building an engine's parts from a module and a configuration: shards, masters, optimizer, units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ConfigError, NotSupportedError, UsageError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import create_loss_scaler
from deepspeed.runtime.optimizers import build_optimizer
from deepspeed.runtime.zero import checks
from deepspeed.runtime.zero.checks import Agreement
from deepspeed.runtime.zero.core import host
from deepspeed.runtime.zero.core.fetch import FetchLimits
from deepspeed.runtime.zero.core.grads import GradShards
from deepspeed.runtime.zero.core.master import MasterWeights
from deepspeed.runtime.zero.core.model import ShardedModel, ShardingPlan
from deepspeed.runtime.zero.core.param import ShardedParam
from deepspeed.runtime.zero.core.parameter import sharded_of
from deepspeed.runtime.zero.core.sanity import SanityChecks
from deepspeed.runtime.zero.init_context import suspended
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.topology import current_device, shard_groups
from deepspeed.utils.logging import log_dist, logger
from deepspeed.utils.z3_leaf_module import (
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    z3_leaf_module,
)

OptimizerLike = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None
CPU = torch.device("cpu")


def build_optimizer_and_shards(
    module: nn.Module,
    config: DeepSpeedConfig,
    client_optimizer: OptimizerLike,
    model_parameters: Any,
    agreement: Agreement,
) -> DeepSpeedZeroOptimizer_Stage3 | DeepSpeedZeRoOffload:
    """Shard ``module`` and build what steps it; without an optimizer only the sharding. Collective.

    Raises:
        UsageError: ranks differ in what they are about to build.
    """
    zero = config.zero_config
    groups = _optimizer_groups(module, client_optimizer, model_parameters, config)
    _mark_leaf_modules(module, config)
    agreement.hold(_subjects(module, config, client_optimizer, groups))
    with agreement.waiting("making process groups"):
        plan = _plan(config)
    agreement.hand_over(plan.groups)
    if zero.enable_sanity_checks:
        plan.groups.checks = SanityChecks(plan.groups)
    with suspended():
        sharded = ShardedModel(module, plan)
    is_leaf = _leaf_test(zero.module_granularity_threshold)
    if groups is None:
        sharded.form_units(is_leaf, None, None)
        _announce(sharded, config, 0)
        return DeepSpeedZeRoOffload(sharded)
    offload = zero.optimizer_device is OffloadDeviceEnum.cpu
    master_device = CPU if offload else plan.device
    shards = GradShards(config.grad_accum_dtype or config.param_dtype, plan.device)
    master = MasterWeights(
        [(sharded_of(params), options) for params, options in groups],
        zero.sub_group_size,
        plan.device,
        master_device,
        plan.shard_device,
        shards,
        plan.pin_shards,
        # the low halves of split masters stay with the shards and never cross
        zero.pins_optimizer and host.can_pin(plan.device) and not zero.split_master_weights,
    )
    optimizer = _torch_optimizer(client_optimizer, config, master, master_device, offload)
    master.attach(optimizer, zero.split_master_weights)
    reducer = sharded.form_units(is_leaf, shards, config.communication_data_type)
    assert reducer is not None
    sharded.fetcher.warn_on_change = zero.log_trace_cache_warnings
    reducer.max_inflight_numel = zero.reduce_bucket_size if zero.overlaps_comm else 0
    _announce(sharded, config, sum(sub.numel for sub in master.sub_groups))
    return DeepSpeedZeroOptimizer_Stage3(
        sharded,
        master,
        reducer,
        shards,
        create_loss_scaler(config.fp16, config.param_dtype),
        config.param_dtype,
        config.gradient_clipping,
        config.bf16.check_grad_overflow if config.bf16.enabled else True,
        config.max_skipped_steps,
    )


def _subjects(
    module: nn.Module,
    config: DeepSpeedConfig,
    client: OptimizerLike,
    groups: list[tuple[list[nn.Parameter], dict[str, Any]]] | None,
) -> list[checks.Section]:
    """What every rank must have alike."""
    kind = config.optimizer.type if config.optimizer is not None and client is None else type(client).__qualname__
    return [
        checks.versions(),
        checks.configuration(config),
        checks.parameters(module),
        checks.optimizer_groups(kind, groups, module),
    ]


def _plan(config: DeepSpeedConfig) -> ShardingPlan:
    zero = config.zero_config
    device = current_device()
    return ShardingPlan(
        groups=shard_groups(zero.zero_hpz_partition_size),
        device=device,
        shard_device=CPU if zero.param_device is OffloadDeviceEnum.cpu else device,
        dtype=config.param_dtype,
        limits=FetchLimits(zero.max_live_parameters, zero.prefetch_bucket_size, zero.max_reuse_distance),
        persistence_threshold=zero.param_persistence_threshold,
        model_persistence_threshold=zero.model_persistence_threshold,
        pin_shards=zero.pins_params and host.can_pin(device),
    )


def _leaf_test(granularity: int) -> Callable[[nn.Module], bool]:
    """Marked modules, and those finer than ``stage3_module_granularity_threshold`` elements per module."""

    def is_leaf(module: nn.Module) -> bool:
        if z3_leaf_module(module):
            return True
        if not granularity or not any(True for _ in module.children()):
            return False
        numel = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in module.parameters())
        count = sum(1 for _ in module.modules())
        return 0 < numel / count < granularity

    return is_leaf


def _mark_leaf_modules(module: nn.Module, config: DeepSpeedConfig) -> None:
    leaf = config.leaf_module
    if not set_z3_leaf_modules(module, leaf.classes, raise_if_not_found=False) and leaf.classes_given:
        logger.warning(f"zero_optimization.leaf_module.classes: none of {list(leaf.classes)} is in the model")
    for names, mark in ((leaf.names, set_z3_leaf_modules_by_name), (leaf.name_suffixes, set_z3_leaf_modules_by_suffix)):
        _, missing = mark(module, names, raise_if_not_found=False)
        if missing:
            logger.warning(f"zero_optimization.leaf_module: {missing} are not in the model")


# -- optimizer -----------------------------------------------------------------------------------------------------


def _optimizer_groups(
    module: nn.Module, client: OptimizerLike, model_parameters: Any, config: DeepSpeedConfig
) -> list[tuple[list[nn.Parameter], dict[str, Any]]] | None:
    """Optimizer groups as (trainable parameters, hyper-parameters), or None where nothing is trained.

    Empty groups keep their place, so that group indices, learning rates and schedulers line up.
    """
    if isinstance(client, torch.optim.Optimizer):
        if any(client.state.values()):
            raise UsageError("the optimizer has state already; pass a new one, and load its state from a checkpoint")
        groups: Any = client.param_groups
    elif client is None and config.optimizer is None:
        return None
    else:
        groups = _as_groups(module, model_parameters)
    known = {param for param in module.parameters()}
    seen: set[nn.Parameter] = set()
    result = []
    for index, group in enumerate(groups):
        chosen = []
        for param in group["params"]:
            if param not in known:
                raise UsageError(
                    f"parameter group {index} holds a tensor of shape {tuple(param.shape)} that is no parameter of the "
                    "model; pass parameters of the model that is given to deepspeed.initialize"
                )
            if param in seen:
                raise UsageError(f"parameter group {index}: a parameter appears in more than one place")
            seen.add(param)
            if param.requires_grad:
                chosen.append(param)
        result.append((chosen, {key: value for key, value in group.items() if key != "params"}))
    if not any(chosen for chosen, _ in result):
        raise UsageError("no parameter that was given to the optimizer requires a gradient")
    left_out = sum(1 for param in known if param.requires_grad and param not in seen)
    if left_out:
        logger.info(
            f"{left_out} parameters require a gradient but were not given to the optimizer; they stay as they are"
        )
    return result


def _as_groups(module: nn.Module, model_parameters: Any) -> list[dict[str, Any]]:
    params = list(model_parameters) if model_parameters is not None else []
    if not params:
        params = [param for param in module.parameters() if param.requires_grad]
    if params and isinstance(params[0], dict):
        return [
            {
                **group,
                "params": [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"]),
            }
            for group in params
        ]
    return [{"params": params}]


def _torch_optimizer(
    client: OptimizerLike, config: DeepSpeedConfig, master: MasterWeights, device: torch.device, offload: bool
) -> torch.optim.Optimizer:
    flat = master.flat_groups()
    if isinstance(client, torch.optim.Optimizer):
        _check_client(type(client), config, offload)
        return client
    if client is not None:
        optimizer = client(flat)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer=: the callable returned {type(optimizer).__name__}, no torch optimizer")
        _check_client(type(optimizer), config, offload)
        return optimizer
    assert config.optimizer is not None
    return build_optimizer(config.optimizer, flat, device.type, offload)


_WHOLE_PARAMETER = ("Muon", "Adafactor", "LBFGS", "SparseAdam", "Shampoo", "SOAP")


def _check_client(cls: type, config: DeepSpeedConfig, offload: bool) -> None:
    """Optimizers see flat 1-D shards: those that need whole matrices cannot work; others must be asked for by key."""
    if cls.__name__ in _WHOLE_PARAMETER:
        raise NotSupportedError(
            f"optimizer {cls.__name__} needs whole parameters, and ZeRO-3 steps flat shards; use AdamW"
        )
    known = cls.__module__.startswith(("torch.optim", "deepspeed."))
    if not known and not config.zero_allow_untested_optimizer:
        raise ConfigError(
            f"zero_allow_untested_optimizer: false, but the optimizer is {cls.__module__}.{cls.__qualname__}; it must "
            "be element-wise, since it sees flat shards; set the key to true if it is"
        )
    on_cpu = cls.__module__.startswith(("deepspeed.", "torch.optim"))
    if offload and config.zero_force_ds_cpu_optimizer and not on_cpu:
        raise ConfigError(
            f"zero_force_ds_cpu_optimizer: true, but optimizer states are offloaded and the optimizer is "
            f"{cls.__qualname__}; use deepspeed.ops.adam.DeepSpeedCPUAdam or set the key to false"
        )


# -- what is said at the start ---------------------------------------------------------------------------------------


def _announce(sharded: ShardedModel, config: DeepSpeedConfig, trained: int) -> None:
    params: list[ShardedParam] = list(sharded.params.values())
    groups = sharded.plan.groups
    world = groups.primary.size
    total = sum(p.numel for p in params)
    text = (
        f"ZeRO-3: {total:,} parameters in {len(sharded.fetcher.units)} units over {world} rank(s), "
        f"{sum(p.shard.numel() for p in params):,} a rank, {trained:,} trained; "
        f"{sum(p.numel for p in params if p.persistent):,} stay gathered"
    )
    log_dist(text, ranks=[0])
    if groups.secondary is None:
        return
    if groups.aliased:
        log_dist(
            f"hpZ: zero_hpz_partition_size {world} equals the world size; secondary shards are the primary shards, no "
            "extra memory, no traffic between groups to save",
            ranks=[0],
        )
        return
    size = groups.secondary.size
    extra = sum(p.padded_numel // size * p.shard.element_size() for p in params)
    micro = config.gradient_accumulation_steps
    inside = (2 * micro - 1) / (2 * micro)
    log_dist(
        f"hpZ: {world // size} groups of {size} ranks; secondary shards take {extra:,} bytes a rank for "
        f"{len(params)} of {len(params)} parameters; about {inside:.0%} of the gathers of a step stay inside a group",
        ranks=[0],
    )
