# SPDX-License-Identifier: Apache-2.0
"""The smaller sections of the configuration, and the scalars of its top level.

What must hold: each field says who acts on it, or why it is inert (see `config_utils`).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deepspeed.runtime.config_utils import (
    ConfigSection,
    Dtype,
    Float,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    acted,
    inert,
)

_NO_MOE = "mixture-of-experts parallelism is not part of this package"
_COMPILE = "an option of deepcompile, which is refused by name"
_AIO = "an option of NVMe offload, which is refused by name"


class ScalarConfig(ConfigSection):
    """The scalar keys of the top level."""

    train_batch_size: Int | None = acted(None, by="batch", doc="samples per optimizer step over all ranks")
    train_micro_batch_size_per_gpu: Int | None = acted(None, by="batch", doc="samples per rank and micro-batch")
    gradient_accumulation_steps: Int | None = acted(None, by="batch", doc="micro-batches per optimizer step")
    steps_per_print: Annotated[int | float | None, Field(gt=0)] = acted(
        None, by="engine (reporting)", doc="optimizer steps between progress lines; null and infinity print none"
    )
    gradient_clipping: NonNegativeFloat = acted(1.0, by="zero core (master)", doc="largest global L2 norm; 0: no limit")
    max_skipped_steps: NonNegativeInt = acted(
        0, by="engine (step)", doc="skipped steps in a row (non-finite gradients) that raise; 0: no limit"
    )
    communication_data_type: Dtype = acted(None, by="zero core (grads)", doc="dtype of the gradient reduce-scatter")
    prescale_gradients: bool = acted(False, by="refused if true", doc="scale before the reduction")
    gradient_predivide_factor: Float = acted(1.0, by="refused unless 1", doc="scale before the reduction")
    gradient_allreduce_op: Literal["mean", "sum"] = acted("mean", by="refused unless mean", doc="how to reduce")
    managed_gradient_accumulation: bool = acted(True, by="refused if false", doc="the engine divides by accumulation")
    zero_allow_untested_optimizer: bool = acted(False, by="engine (build)", doc="accept any client optimizer")
    zero_force_ds_cpu_optimizer: bool = acted(
        True, by="engine (build)", doc="with optimizer offload, a client optimizer must be a CPU one"
    )
    wall_clock_breakdown: bool = acted(False, by="engine (reporting)", doc="log how long each phase takes")
    memory_breakdown: bool = acted(False, by="engine (reporting)", doc="log memory at the ends of phases")
    dump_state: bool = acted(False, by="engine (reporting)", doc="log the configuration at start")
    dataloader_drop_last: bool = acted(False, by="engine (dataloader)", doc="drop the last, smaller batch")
    disable_python_gc: bool = acted(False, by="engine (step)", doc="collect garbage between steps only")
    log_level: str | None = acted(None, by="engine (build)", doc="level of the package's logger")
    sequence_parallel_size: PositiveInt = acted(1, by="refused unless 1", doc="ranks per sequence")
    seq_parallel_communication_data_type: Dtype = inert(None, why="sequence parallelism is refused by name")
    disable_allgather: bool = inert(False, why="an option of stages 1 and 2")
    vocabulary_size: NonNegativeInt | None = inert(None, why="read by nothing")
    use_data_before_expert_parallelism: bool = inert(False, why=_NO_MOE)

    other_spellings: ClassVar[dict[str, str]] = {
        "use_data_before_expert_parallel": "use_data_before_expert_parallelism",
        "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    }


class OptimizerConfig(ConfigSection):
    """`optimizer`: a type name and the arguments of its constructor (checked when it is built)."""

    type: str = acted(..., by="optimizers", doc="see optimizers.build_optimizer")
    params: dict[str, Any] = acted({}, by="optimizers", doc="constructor arguments")
    legacy_fusion: bool = inert(False, why="there is one way of building an optimizer")


class SchedulerConfig(ConfigSection):
    """`scheduler`: a type name and the arguments of its constructor (checked when it is built)."""

    type: str = acted(..., by="lr_schedules", doc="see lr_schedules.build_scheduler")
    params: dict[str, Any] = acted({}, by="lr_schedules", doc="constructor arguments")


class ActivationCheckpointingConfig(ConfigSection):
    """`activation_checkpointing`: defaults of `deepspeed.checkpointing.configure`."""

    tolerates_unknown: ClassVar[bool] = True
    partition_activations: bool = acted(
        False, by="checkpointing.configure", doc="refused over several model-parallel ranks, else nothing to spread"
    )
    cpu_checkpointing: bool = acted(False, by="checkpointing", doc="keep saved inputs in host memory")
    contiguous_memory_optimization: bool = acted(False, by="checkpointing.configure", doc="refused if true")
    number_checkpoints: PositiveInt | None = inert(None, why="sizes the contiguous buffer, which is refused by name")
    synchronize_checkpoint_boundary: bool = acted(False, by="checkpointing", doc="synchronize at every boundary")
    profile: bool = acted(False, by="checkpointing", doc="log the time of each call")


class TagValidation(str, Enum):
    """What to do where ranks save under different tags."""

    ignore = "Ignore"
    warn = "Warn"
    fail = "Fail"


def _any_case(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) and not isinstance(value, Enum) else value


class ParallelWriteConfig(ConfigSection):
    """`checkpoint.parallel_write`."""

    pipeline_stage: bool = inert(False, why="there are no pipeline stages; every rank writes its own shard")


class CheckpointConfig(ConfigSection):
    """`checkpoint`: how checkpoints are written and read."""

    tag_validation: Annotated[TagValidation, BeforeValidator(_any_case)] = acted(
        TagValidation.warn, by="engine (checkpoint)", doc="Ignore, Warn or Fail where tags differ between ranks"
    )
    load_universal: bool = acted(False, by="engine (checkpoint)", doc="load from the universal layout")
    use_node_local_storage: bool = acted(False, by="engine (checkpoint)", doc="every node writes its own shared files")
    parallel_write: ParallelWriteConfig = inert(ParallelWriteConfig(), why="see its only key")
    checkpoint_serialization: bool = acted(True, by="refused if false", doc="the zip format of torch.save")
    writer: dict[str, Any] | None = acted(None, by="refused if given", doc="other writers")
    verify_on_load: bool = acted(True, by="engine (checkpoint)", doc="compare the hash of every file that is read")
    wait_timeout: NonNegativeFloat | None = acted(
        None, by="engine (checkpoint)", doc="seconds that a save or load waits for the other ranks"
    )
    allow_globals: list[str] = acted(
        [], by="engine (checkpoint)", doc="classes beyond the built-in list that loading may rebuild, by full name"
    )


class CommsLoggerConfig(ConfigSection):
    """`comms_logger`: counters per collective, printed by `deepspeed.comm.log_summary()`."""

    enabled: bool = acted(False, by="comm", doc="count collectives")
    verbose: bool = acted(False, by="comm", doc="log every call")
    prof_all: bool = acted(True, by="comm", doc="count all kinds")
    debug: bool = acted(False, by="comm", doc="log the caller of every call")
    prof_ops: list[str] = acted([], by="comm", doc="the kinds to count where prof_all is false")


class FlopsProfilerConfig(ConfigSection):
    """`flops_profiler`: a profile of one step."""

    tolerates_unknown: ClassVar[bool] = True
    enabled: bool = acted(False, by="engine (reporting)", doc="profile one step")
    recompute_fwd_factor: NonNegativeFloat = acted(
        0.0, by="flops profiler", doc="forward passes recomputed per backward"
    )
    profile_step: PositiveInt = acted(1, by="engine (reporting)", doc="the step that is profiled")
    module_depth: Int = acted(-1, by="flops profiler", doc="depth of the printed tree; -1 is all of it")
    top_modules: PositiveInt = acted(1, by="flops profiler", doc="modules listed per depth")
    detailed: bool = acted(True, by="flops profiler", doc="print the tree")
    output_file: str | None = acted(None, by="flops profiler", doc="write there instead of to standard output")


class CompileConfig(ConfigSection):
    """`compile`: options of deepcompile. `torch.compile` is asked for through `engine.compile()`."""

    tolerates_unknown: ClassVar[bool] = True
    deepcompile: bool = acted(False, by="refused if true", doc="a compiler pass for ZeRO")
    offload_activation: bool = inert(False, why=_COMPILE)
    offload_opt_states: bool = inert(False, why=_COMPILE)
    offload_parameters: bool = inert(False, why=_COMPILE)
    double_buffer: bool = inert(True, why=_COMPILE)
    symmetric_memory: bool = inert(False, why=_COMPILE)
    passes: list[str] | None = inert(None, why=_COMPILE)
    disable: bool | None = inert(None, why="written by older recipes; compilation starts with engine.compile() only")
    enabled: bool | None = inert(None, why="written by older recipes; compilation starts with engine.compile() only")
    backend: str | None = inert(None, why="written by older recipes; pass it to engine.compile(backend=...)")
    kwargs: dict[str, Any] | None = inert(None, why="written by older recipes; pass them to engine.compile()")


class AioConfig(ConfigSection):
    """`aio`: options of the NVMe engine."""

    tolerates_unknown: ClassVar[bool] = True
    block_size: PositiveInt = inert(1_048_576, why=_AIO)
    queue_depth: PositiveInt = inert(8, why=_AIO)
    intra_op_parallelism: PositiveInt = inert(1, why=_AIO)
    single_submit: bool = inert(False, why=_AIO)
    overlap_events: bool = inert(True, why=_AIO)
    use_gds: bool = inert(False, why=_AIO)
    thread_count: PositiveInt = inert(1, why="the older name of intra_op_parallelism, still emitted by callers")


class ThroughputTimerConfig(ConfigSection):
    """`timers.throughput`."""

    enabled: bool = acted(True, by="engine (reporting)", doc="samples per second in each progress line")
    synchronized: bool = acted(True, by="engine (reporting)", doc="wait for the device at each progress line")


class TimersConfig(ConfigSection):
    """`timers`."""

    throughput: ThroughputTimerConfig = acted(ThroughputTimerConfig(), by="engine (reporting)", doc="section")


class TensorParallelConfig(ConfigSection):
    """`tensor_parallel`: refused unless it asks for one rank."""

    tolerates_unknown: ClassVar[bool] = True
    autotp_size: NonNegativeInt = acted(0, by="refused above 1", doc="ranks per tensor-parallel group")
