# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeedConfig`: reads, checks and completes a configuration once, and is frozen from then on.

What must hold:
- After construction every section is complete; nothing downstream validates, or fills in a default.
- Batch sizes are solved with the true data-parallel world size.
- A key that asks for something this package does not do raises, naming the key (`UNSUPPORTED`, `FEATURES`,
  `REMOVED`); a key that changes nothing is declared inert with the reason (`config_sections`).
- Unknown top-level keys never fail (callers write comments and sections of their own there); one warning lists them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed.errors import (
    BatchConfigError,
    ConfigConflictError,
    ConfigError,
    DeepSpeedConfigError,
    UnsupportedConfigError,
    UsageError,
)
from deepspeed.monitor.config import CometConfig, CSVConfig, MonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config_sections as sections
from deepspeed.runtime.batch import ACCUMULATION, MICRO, TRAIN, solve_batch
from deepspeed.runtime.config_utils import (
    AUTO,
    ConfigSection,
    load_source,
    nearest,
    parse_section,
    to_plain,
    warn_once,
)
from deepspeed.runtime.precision_config import (
    DataTypesConfig,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    TorchAutocastConfig,
)
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig, ZeroStageEnum, validate_hpz
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.utils.logging import logger

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

SECTIONS: dict[str, type[ConfigSection]] = {
    ZERO_OPTIMIZATION: DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "torch_autocast": TorchAutocastConfig,
    "data_types": DataTypesConfig,
    "optimizer": sections.OptimizerConfig,
    "scheduler": sections.SchedulerConfig,
    "activation_checkpointing": sections.ActivationCheckpointingConfig,
    "checkpoint": sections.CheckpointConfig,
    "comms_logger": sections.CommsLoggerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "flops_profiler": sections.FlopsProfilerConfig,
    "compile": sections.CompileConfig,
    "aio": sections.AioConfig,
    "timers": sections.TimersConfig,
    "tensor_parallel": sections.TensorParallelConfig,
}
"""Top-level key -> class of its section."""

SECTION_SPELLINGS = {"bfloat16": "bf16"}
"""Other spelling of a section -> its key."""


class Rule(NamedTuple):
    """A key that is refused by name unless `allowed(value)`."""

    key: str
    allowed: Callable[[Any], bool]
    remedy: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


_OFF = _is(None, False)
_NO_QUANTISATION = "quantised communication is not built; set it to false"
_NO_NVME = 'NVMe offload is not built; use "cpu" or "none"'
_FP32_STATES = "master weights and optimizer states are fp32; set it to false"
_PLAIN_MEAN = "gradients are averaged over the ranks in one step; remove the key"

UNSUPPORTED: tuple[Rule, ...] = (
    Rule(
        "zero_optimization.stage",
        _is(ZeroStageEnum.weights),
        'only stage 3 is built; set it to 3 (a missing key, or one left at "auto", means 0)',
    ),
    Rule("zero_optimization.offload_param.device", _is("none", "cpu"), _NO_NVME),
    Rule("zero_optimization.offload_optimizer.device", _is("none", "cpu"), _NO_NVME),
    Rule("zero_optimization.offload_optimizer.ratio", _is(1.0), "all of the step runs on the CPU; set it to 1"),
    Rule("zero_optimization.offload_optimizer.super_offload", _OFF, "it is not built; set it to false"),
    Rule("zero_optimization.zero_quantized_weights", _OFF, _NO_QUANTISATION),
    Rule("zero_optimization.zero_quantized_nontrainable_weights", _OFF, _NO_QUANTISATION),
    Rule("zero_optimization.zero_quantized_gradients", _OFF, _NO_QUANTISATION),
    Rule("zero_optimization.zeropp_loco_param", _OFF, _NO_QUANTISATION),
    Rule(
        "zero_optimization.mics_shard_size",
        lambda size: size <= 0,
        "MiCS is not built; zero_hpz_partition_size keeps gathers inside a node",
    ),
    Rule("zero_optimization.mics_hierarchical_params_gather", _OFF, "MiCS is not built; remove the key"),
    Rule("zero_optimization.zenflow", _OFF, "it is not built; remove the section"),
    Rule("fp16.fp16_master_weights_and_grads", _OFF, _FP32_STATES),
    Rule("bf16.bf16_master_weights_and_grads", _OFF, _FP32_STATES),
    Rule("bf16.bf16_optimizer_states", _OFF, _FP32_STATES),
    Rule("data_types.buffer_dtype", _OFF, "buffers keep the dtype the model gives them; remove the key"),
    Rule(
        "data_types.keep_in_fp32_modules", lambda names: not names, "every parameter gets the mode's dtype; remove it"
    ),
    Rule("prescale_gradients", _OFF, _PLAIN_MEAN),
    Rule("gradient_predivide_factor", _is(1.0), _PLAIN_MEAN),
    Rule("gradient_allreduce_op", _is("mean"), _PLAIN_MEAN),
    Rule(
        "managed_gradient_accumulation",
        _is(True),
        "remove the key and call backward(loss, scale_wrt_gas=False) with set_gradient_accumulation_boundary()",
    ),
    Rule("sequence_parallel_size", _is(1), "sequence parallelism is not built; set it to 1"),
    Rule("tensor_parallel.autotp_size", _is(0, 1), "tensor parallelism is not built; set it to 1"),
    Rule("compile.deepcompile", _OFF, "it is not built; call engine.compile() for torch.compile"),
    Rule("checkpoint.checkpoint_serialization", _is(True), "checkpoints use the zip format; remove the key"),
    Rule("checkpoint.writer", _OFF, "there is one checkpoint writer; remove the section"),
)
"""The reviewed list of keys that parse, and are then refused unless they ask for what is built."""

FEATURES = {
    "autotuning": "run the launcher without --autotuning",
    "data_efficiency": "pass your own sampler or data loader",
    "expert_parallel": "mark expert blocks as leaf modules",
    "hybrid_engine": "use GatheredParameters around generation",
    "weight_quantization": "quantise the saved weights instead",
}
"""Top-level features of other releases that are refused where they are switched on."""

REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
"""Top-level keys that the field has removed: an error where switched on, ignored with a warning where off."""


class DeepSpeedConfig:
    """A complete, frozen configuration.

    Args:
        config: a dict, the path of a JSON or HJSON file, or urlsafe base64 of JSON.
        mpu: an object whose `get_data_parallel_world_size()` gives the data-parallel world size.
        world_size: the data-parallel world size, where neither `mpu` nor torch.distributed should be asked.

    Attributes: `raw` is a copy of the user's dict. The others are the sections of `SECTIONS` (`zero_optimization`
    as `zero_config`; the monitors under `monitor`; `optimizer` and `scheduler` are None where not given) and the
    scalars of `config_sections.ScalarConfig`, with the batch triple filled in.

    Raises:
        ConfigError: an unknown key in a section, a wrong value, a contradiction between keys.
        UnsupportedConfigError: a key asks for a feature that is not built (also a ConfigError).
        BatchConfigError: the batch sizes do not fit the world size (also a ConfigError and an AssertionError).
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str],
        mpu: Any = None,
        *,
        world_size: int | None = None,
    ) -> None:
        self.raw: dict[str, Any] = load_source(config)
        self.world_size: int = _world_size(mpu) if world_size is None else world_size
        values, scalars, unknown = _sort_keys(self.raw)

        def read(key: str, cls: type[Any]) -> Any:
            return parse_section(cls, values.get(key), key, unknown)

        values[ZERO_OPTIMIZATION] = DeepSpeedZeroConfig.from_user(values.get(ZERO_OPTIMIZATION))
        self.zero_config: DeepSpeedZeroConfig = read(ZERO_OPTIMIZATION, DeepSpeedZeroConfig)
        self.fp16: DeepSpeedFP16Config = read("fp16", DeepSpeedFP16Config)
        self.bf16: DeepSpeedBF16Config = read("bf16", DeepSpeedBF16Config)
        self.torch_autocast: TorchAutocastConfig = read("torch_autocast", TorchAutocastConfig)
        self.data_types: DataTypesConfig = read("data_types", DataTypesConfig)
        self.optimizer: sections.OptimizerConfig | None = (
            read("optimizer", sections.OptimizerConfig) if values.get("optimizer") is not None else None
        )
        self.scheduler: sections.SchedulerConfig | None = (
            read("scheduler", sections.SchedulerConfig) if values.get("scheduler") is not None else None
        )
        self.activation_checkpointing: sections.ActivationCheckpointingConfig = read(
            "activation_checkpointing", sections.ActivationCheckpointingConfig
        )
        self.checkpoint: sections.CheckpointConfig = read("checkpoint", sections.CheckpointConfig)
        self.comms_logger: sections.CommsLoggerConfig = read("comms_logger", sections.CommsLoggerConfig)
        self.monitor: MonitorConfig = MonitorConfig(
            tensorboard=read("tensorboard", TensorBoardConfig),
            csv_monitor=read("csv_monitor", CSVConfig),
            wandb=read("wandb", WandbConfig),
            comet=read("comet", CometConfig),
        )
        self.flops_profiler: sections.FlopsProfilerConfig = read("flops_profiler", sections.FlopsProfilerConfig)
        self.compile: sections.CompileConfig = read("compile", sections.CompileConfig)
        self.aio: sections.AioConfig = read("aio", sections.AioConfig)
        self.timers: sections.TimersConfig = read("timers", sections.TimersConfig)
        self.tensor_parallel: sections.TensorParallelConfig = read("tensor_parallel", sections.TensorParallelConfig)

        scalar: sections.ScalarConfig = parse_section(sections.ScalarConfig, scalars, "")
        self.steps_per_print: int | float | None = scalar.steps_per_print
        self.gradient_clipping: float = scalar.gradient_clipping
        self.max_skipped_steps: int = scalar.max_skipped_steps
        self.communication_data_type: torch.dtype | None = scalar.communication_data_type
        self.seq_parallel_communication_data_type: torch.dtype | None = scalar.seq_parallel_communication_data_type
        self.prescale_gradients: bool = scalar.prescale_gradients
        self.gradient_predivide_factor: float = scalar.gradient_predivide_factor
        self.gradient_allreduce_op: str = scalar.gradient_allreduce_op
        self.managed_gradient_accumulation: bool = scalar.managed_gradient_accumulation
        self.zero_allow_untested_optimizer: bool = scalar.zero_allow_untested_optimizer
        self.zero_force_ds_cpu_optimizer: bool = scalar.zero_force_ds_cpu_optimizer
        self.wall_clock_breakdown: bool = scalar.wall_clock_breakdown or self.flops_profiler.enabled
        self.memory_breakdown: bool = scalar.memory_breakdown
        self.dump_state: bool = scalar.dump_state
        self.dataloader_drop_last: bool = scalar.dataloader_drop_last
        self.disable_python_gc: bool = scalar.disable_python_gc
        self.log_level: str | None = scalar.log_level
        self.sequence_parallel_size: int = scalar.sequence_parallel_size

        _refuse_unsupported(self)
        _check_precision(self)
        validate_hpz(self.zero_config.zero_hpz_partition_size, self.world_size)
        batch = solve_batch(
            scalar.train_batch_size,
            scalar.train_micro_batch_size_per_gpu,
            scalar.gradient_accumulation_steps,
            self.world_size,
        )
        self.train_batch_size: int = batch.train_batch_size
        self.train_micro_batch_size_per_gpu: int = batch.micro_batch_size
        self.gradient_accumulation_steps: int = batch.gradient_accumulation_steps
        _report(self, unknown)
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise UsageError(f"DeepSpeedConfig.{name}: the configuration is frozen; build a new one to change it")
        super().__setattr__(name, value)

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of parameters: float16, bfloat16 or float32."""
        if self.fp16.enabled:
            return torch.float16
        return torch.bfloat16 if self.bf16.enabled else torch.float32

    @property
    def grad_accum_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients accumulate; None: that of the parameters."""
        return self.data_types.grad_accum_dtype

    @property
    def leaf_module(self) -> DeepSpeedZeroLeafModuleConfig:
        """`zero_optimization.leaf_module`."""
        return self.zero_config.leaf_module

    @property
    def zero_enabled(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_config.stage > ZeroStageEnum.disabled

    @property
    def zero_optimization_stage(self) -> int:
        """The stage as a plain int."""
        return int(self.zero_config.stage)

    def to_dict(self) -> dict[str, Any]:
        """The completed configuration as plain values that `json.dumps` writes as strict JSON (`raw` is left out)."""
        plain = {key: to_plain(value) for key, value in vars(self).items() if key not in ("raw", "monitor", "_frozen")}
        plain[ZERO_OPTIMIZATION] = plain.pop("zero_config")
        for key in ("tensorboard", "csv_monitor", "wandb", "comet"):
            plain[key] = to_plain(getattr(self.monitor, key))
        if plain["comet"]["api_key"] is not None:
            plain["comet"]["api_key"] = "(hidden)"
        return plain

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Log the completed configuration as JSON."""
        logger.info("%s: %s", name, self)

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False)

    def __repr__(self) -> str:
        return f"DeepSpeedConfig({self.raw!r}, world_size={self.world_size})"


def _world_size(mpu: Any) -> int:
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE") or "1"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"WORLD_SIZE: the environment variable must be an integer, got {text!r}") from None


def _sort_keys(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Split the top level into sections, scalars and unknown keys; refuse what is switched on and gone."""
    values: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    unknown: list[str] = []
    known_scalars = sections.ScalarConfig.known_keys()
    candidates = [*SECTIONS, *SECTION_SPELLINGS, *known_scalars]
    for key, value in raw.items():
        section = SECTION_SPELLINGS.get(key, key)
        if section in SECTIONS:
            if section in values:
                raise ConfigError(f"{key}: given twice, also under its other spelling; keep one of the two sections")
            values[section] = None if value == AUTO else value
        elif key in known_scalars:
            scalars[key] = value
        elif key in FEATURES:
            if _switched_on(value):
                raise UnsupportedConfigError(
                    f"{key}: this feature is not built; remove the section and {FEATURES[key]}"
                )
        elif key in REMOVED:
            if _switched_on(value):
                raise UnsupportedConfigError(f"{key}: this key has been removed (value {value!r}); remove it")
            warn_once(f"config key {key!r} has been removed; it is switched off here and ignored")
        elif not str(key).startswith("_"):
            unknown.append(_describe_unknown(str(key), candidates))
    for key in (TRAIN, MICRO, ACCUMULATION):
        if scalars.get(key) == AUTO:
            raise BatchConfigError(
                f'{key}: "auto" was not resolved; give a number, or remove the key to have it computed from the others'
            )
    if scalars.get("steps_per_print") in ("Infinity", "inf"):
        scalars["steps_per_print"] = float("inf")
    return values, scalars, unknown


def _describe_unknown(key: str, candidates: list[str]) -> str:
    head, _, tail = key.partition(".")
    if tail and head in SECTIONS:
        return f"{key} (dotted keys have no effect; write {tail!r} inside the {head!r} object)"
    hint = nearest(key, candidates)
    return f"{key} ({hint})" if hint.startswith("Did you mean") else key


def _switched_on(value: Any) -> bool:
    """Whether a section of a feature asks for it: a true scalar, or an object not wholly `enabled: false`."""
    if not isinstance(value, Mapping):
        return bool(value) and value != AUTO
    if "enabled" in value:
        return bool(value["enabled"]) and value["enabled"] != AUTO
    parts = [item for item in value.values() if isinstance(item, Mapping)]
    return bool(value) and (not parts or any(_switched_on(item) for item in parts))


def _refuse_unsupported(config: DeepSpeedConfig) -> None:
    for key, allowed, remedy in UNSUPPORTED:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, "zero_config" if name == ZERO_OPTIMIZATION else name)
            if value is None:
                break
        if value is not None and not allowed(value):
            raise UnsupportedConfigError(f"{key}: {to_plain(value)!r} is not supported; {remedy}")


def _check_precision(config: DeepSpeedConfig) -> None:
    on = [key for key in ("fp16", "bf16", "torch_autocast") if getattr(config, key).enabled]
    if len(on) > 1:
        raise ConfigConflictError(f"{on[0]}.enabled: true together with {on[1]}.enabled; switch one of the two off")
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.param_dtype:
        raise ConfigError(
            f"data_types.param_dtype: {to_plain(wanted)} differs from {to_plain(config.param_dtype)}, which "
            f"{on[0] + '.enabled' if on else 'no precision section'} implies; remove the key or switch the section"
        )


def _report(config: DeepSpeedConfig, unknown: list[str]) -> None:
    if unknown:
        warn_once(f"config keys that are not known, and are ignored: {', '.join(unknown)}")
    for key in ("disable", "enabled", "backend", "kwargs"):
        if getattr(config.compile, key) is not None:
            warn_once(f"compile.{key} has no effect; compilation starts with engine.compile(backend=...)")
