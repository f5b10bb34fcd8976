# SPDX-License-Identifier: Apache-2.0
"""The section `zero_optimization`.

What must hold: Python names carry no `stage3_` prefix; as keys both spellings are accepted, but not together.
`validate_hpz` is the one place that decides whether a secondary partition size fits a world size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from deepspeed.errors import ConfigError
from deepspeed.runtime.config_utils import (
    AUTO,
    ConfigSection,
    Int,
    NonNegativeInt,
    PositiveInt,
    acted,
    inert,
    warn_once,
)
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"
_PREFIX = "stage3_"
_PREFIXED = (
    "max_live_parameters",
    "max_reuse_distance",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_LOWER_STAGES = "an option of stages 1 and 2; stage 3 never had it"
_LAYOUT = "a choice of data movement only; results are the same, and the core has one way of moving data"


class ZeroStageEnum(IntEnum):
    """What is sharded over the ranks: nothing, optimizer states, also gradients, also weights."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _off_only(value: Any) -> Any:
    return None if value is False or value == {} else value


class DeepSpeedZeroConfig(ConfigSection):
    """`zero_optimization`, frozen and complete. Sizes count elements, not bytes."""

    other_spellings: ClassVar[Mapping[str, str]] = {
        **{_PREFIX + name: name for name in _PREFIXED},
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }

    stage: ZeroStageEnum = acted(ZeroStageEnum.disabled, by="engine; refused unless 3", doc="3: everything is sharded")
    # Gathering
    max_live_parameters: NonNegativeInt = acted(
        1_000_000_000, by="zero core (fetch)", doc="gathered elements that may stay resident"
    )
    max_reuse_distance: NonNegativeInt = acted(
        1_000_000_000, by="zero core (fetch)", doc="keep a unit gathered if it is needed again within so many elements"
    )
    prefetch_bucket_size: NonNegativeInt = acted(
        50_000_000, by="zero core (fetch)", doc="elements gathered ahead along the recorded order"
    )
    param_persistence_threshold: NonNegativeInt = acted(
        100_000, by="zero core (fetch)", doc="parameters of at most this size stay gathered after first use"
    )
    model_persistence_threshold: NonNegativeInt = acted(
        sys.maxsize, by="zero core (fetch)", doc="cap on the elements of all persistent parameters"
    )
    module_granularity_threshold: NonNegativeInt = acted(
        0, by="zero core (partition)", doc="modules with fewer parameter elements per module become one unit"
    )
    zero_hpz_partition_size: NonNegativeInt = acted(
        1, by="zero core (secondary shards)", doc="ranks per secondary (node-local) group; 1 turns hpZ off"
    )
    memory_efficient_linear: bool = inert(True, why="saved views of weights hold no memory: their storage is freed")
    override_module_apply: bool = acted(True, by="zero.Init", doc="Module.apply gathers, runs, writes back")
    use_all_reduce_for_fetch_params: bool = inert(False, why=_LAYOUT)
    allgather_sequential: bool = inert(False, why=_LAYOUT)
    # Gradients and step
    reduce_bucket_size: PositiveInt = acted(
        500_000_000, by="zero core (grads)", doc="gradient elements whose reduction may be in flight; at least one unit"
    )
    sub_group_size: NonNegativeInt = acted(
        1_000_000_000, by="zero core (master)", doc="shard elements per step group; 0 makes one group per parameter"
    )
    split_master_weights: bool | None = acted(
        None,
        by="zero core (master)",
        doc="keep fp32 masters as the bf16 shard and 16 low bits, exact, 2 bytes a parameter less; null: on CUDA",
    )
    overlap_comm: bool | None = acted(
        None, by="zero core (grads)", doc="overlap reductions with the backward; null is true for stage 3"
    )
    contiguous_gradients: bool = inert(True, why="gradients always go to one contiguous bucket")
    reduce_scatter: bool = inert(True, why="gradients are always reduce-scattered; the result is the same")
    compute_grad_norm: bool = inert(True, why="stage 3 always computes the norm; it decides clipping and overflow")
    # Offload, leaves, saving
    offload_param: DeepSpeedZeroOffloadParamConfig | None = acted(None, by="zero core (offload)", doc="section")
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = acted(None, by="zero core (offload)", doc="section")
    leaf_module: DeepSpeedZeroLeafModuleConfig = acted(
        DeepSpeedZeroLeafModuleConfig(), by="engine (leaf modules)", doc="section"
    )
    gather_16bit_weights_on_model_save: bool = acted(
        False, by="engine (checkpoint)", doc="allow a consolidated save of the low-precision weights"
    )
    pipeline_loading_checkpoint: bool = inert(False, why="shards are read lazily, so ranks need not take turns")
    elastic_checkpoint: bool = inert(False, why="checkpoints load at any world size without it")
    load_from_fp32_weights: bool = inert(True, why=_LOWER_STAGES)
    # Checks
    enable_sanity_checks: bool = acted(False, by="zero core, GatheredParameters", doc="further checks that raise")
    log_trace_cache_warnings: bool = acted(False, by="zero core (trace)", doc="warn when the order of units changes")
    # Refused if on
    zero_quantized_weights: bool = acted(False, by="refused if true", doc="qwZ")
    zero_quantized_nontrainable_weights: bool = acted(False, by="refused if true", doc="qwZ for frozen weights")
    zero_quantized_gradients: bool = acted(False, by="refused if true", doc="qgZ")
    mics_shard_size: Int = acted(-1, by="refused if positive", doc="MiCS")
    mics_hierarchical_params_gather: bool = acted(False, by="refused if true", doc="MiCS")
    zeropp_loco_param: Annotated[dict[str, Any] | None, BeforeValidator(_off_only)] = acted(
        None, by="refused if given", doc="error feedback of qgZ"
    )
    zenflow: Annotated[dict[str, Any] | None, BeforeValidator(_off_only)] = acted(
        None, by="refused if given", doc="asynchronous CPU step"
    )
    # Options of other stages and optimizers
    allgather_partitions: bool = inert(True, why=_LOWER_STAGES)
    allgather_bucket_size: NonNegativeInt = inert(500_000_000, why=_LOWER_STAGES)
    use_multi_rank_bucket_allreduce: bool = inert(True, why=_LOWER_STAGES)
    round_robin_gradients: bool = inert(False, why=_LOWER_STAGES)
    legacy_stage1: bool = inert(False, why=_LOWER_STAGES)
    ignore_unused_parameters: bool = inert(True, why="unused parameters always get a zero gradient")
    parameter_alignment: bool = inert(False, why="shards have one layout, ceil(numel / world) elements each")
    save_muon_momentum_buffer_in_memory: bool = inert(False, why="used by Muon only, which is refused by name")

    @classmethod
    def from_user(cls, value: Any) -> Any:
        """Bring legacy forms of the section to today's: a bool, and the flags before `offload_*` existed."""
        if isinstance(value, bool):
            return {"stage": 1 if value else 0}
        if not isinstance(value, Mapping):
            return value
        value = dict(value)
        pin_memory = value.pop("cpu_offload_use_pin_memory", None)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            flag = value.pop(old, None)
            if flag in (None, False, AUTO):
                continue
            if flag is not True:
                raise ConfigError(f"{ZERO_OPTIMIZATION}.{old}: a boolean is expected, got {flag!r}")
            if value.get(new) not in (None, AUTO):
                raise ConfigError(f"{ZERO_OPTIMIZATION}.{old}: given together with {new}; keep {new} only")
            value[new] = {"device": "cpu"}
            if pin_memory not in (None, AUTO):
                value[new]["pin_memory"] = pin_memory
            warn_once(f'{ZERO_OPTIMIZATION}.{old} is deprecated; write "{new}": {{"device": "cpu"}}')
        return value

    @property
    def param_device(self) -> OffloadDeviceEnum:
        """Where parameter shards live."""
        return self.offload_param.device if self.offload_param is not None else OffloadDeviceEnum.none

    @property
    def pins_params(self) -> bool:
        """Whether parameter shards are on the host and to be page-locked."""
        section = self.offload_param
        return section is not None and section.device is OffloadDeviceEnum.cpu and section.pin_memory

    @property
    def pins_optimizer(self) -> bool:
        """Whether master weights are on the host and to be page-locked."""
        section = self.offload_optimizer
        return section is not None and section.device is OffloadDeviceEnum.cpu and section.pin_memory

    @property
    def optimizer_device(self) -> OffloadDeviceEnum:
        """Where master weights and optimizer states live."""
        return self.offload_optimizer.device if self.offload_optimizer is not None else OffloadDeviceEnum.none

    @property
    def overlaps_comm(self) -> bool:
        """`overlap_comm` with its default filled in."""
        return self.stage == ZeroStageEnum.weights if self.overlap_comm is None else self.overlap_comm


def validate_hpz(size: int, world_size: int) -> None:
    """Check that `size` consecutive ranks can form the secondary groups of a world (cases V6 and 82).

    Raises:
        ConfigError: `size` is not between 1 and `world_size`, or does not divide it; names both and what is allowed.
    """
    if size < 1 or world_size % size:
        allowed = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"{ZERO_OPTIMIZATION}.zero_hpz_partition_size: {size} does not divide the world size {world_size} into "
            f"groups; allowed here: {allowed} (1 turns hpZ off)"
        )
