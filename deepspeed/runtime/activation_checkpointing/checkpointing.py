# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.checkpointing`: activation checkpointing over `torch.utils.checkpoint`.

What must hold: a recomputation sees the same random numbers as its forward, those of named states included; options
that cannot be honoured raise in `configure`, by name.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import NotSupportedError
from deepspeed.runtime.activation_checkpointing.rng import MODEL_PARALLEL_RNG, CudaRNGStatesTracker, seed_all
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_sections import ActivationCheckpointingConfig
from deepspeed.runtime.config_utils import load_source, parse_section
from deepspeed.utils.logging import logger

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "reset",
]

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL_RNG
_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


@dataclass(frozen=True)
class _Options:
    cpu: bool = False
    synchronize: bool = False
    profile: bool = False


_SECTION = "activation_checkpointing"
_DEFAULTS = _Options()
_configured: _Options | None = None
_mpu: Any = None


def configure(
    mpu_: Any,
    deepspeed_config: DeepSpeedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set the options of `checkpoint`; arguments that are not None win over the section of the configuration.

    Partitioned activations are spread over model-parallel ranks; with one such rank there is nothing to spread, and
    the option changes nothing. `num_checkpoints` sizes the contiguous buffer, which is not built.

    Raises:
        NotSupportedError: contiguous checkpointing, or partitioned activations over several model-parallel ranks.
        ConfigError: the section of the configuration is wrong.
    """
    global _configured, _mpu
    section = _section_of(deepspeed_config)

    def choose(argument: bool | None, configured: bool) -> bool:
        return configured if argument is None else argument

    if choose(contiguous_checkpointing, section.contiguous_memory_optimization):
        raise NotSupportedError(f"{_SECTION}.contiguous_memory_optimization: it is not built; set it to false")
    if choose(partition_activations, section.partition_activations) and _model_parallel(mpu_, "world_size", 1) > 1:
        raise NotSupportedError(
            f"{_SECTION}.partition_activations: spreading activations over several model-parallel ranks is not built; "
            "set it to false"
        )
    _mpu = mpu_
    _configured = _Options(
        cpu=choose(checkpoint_in_cpu, section.cpu_checkpointing),
        synchronize=choose(synchronize, section.synchronize_checkpoint_boundary),
        profile=choose(profile, section.profile),
    )


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _configured is not None


def reset() -> None:
    """Drop buffers between two iterations. There are none, so this does nothing; callers may rely on the name."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)`, keep its inputs only, and recompute the rest in the backward.

    Returns what `function` returns. With `cpu_checkpointing` the inputs are kept in host memory.
    """
    options = _configured or _DEFAULTS
    states = _CUDA_RNG_STATE_TRACKER.get_states()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), _CUDA_RNG_STATE_TRACKER.replay(states)

    accelerator = get_accelerator()
    keep: AbstractContextManager[Any] = contextlib.nullcontext()
    if options.cpu:
        keep = torch.autograd.graph.save_on_cpu(pin_memory=accelerator.device_name() == "cuda")
    if options.synchronize:
        accelerator.synchronize()
    start = time.perf_counter()
    with keep:
        result = torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if options.synchronize:
        accelerator.synchronize()
    if options.profile:
        logger.info("checkpoint: forward took %.2f ms", (time.perf_counter() - start) * 1e3)
    return result


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker whose states `checkpoint` replays."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator, and the named state of this model-parallel rank (as configured; without one, rank 0)."""
    seed_all(_CUDA_RNG_STATE_TRACKER, seed, _model_parallel(_mpu, "rank", 0))


def _section_of(config: Any) -> ActivationCheckpointingConfig:
    if config is None:
        return ActivationCheckpointingConfig()
    if isinstance(config, DeepSpeedConfig):
        return config.activation_checkpointing
    return parse_section(ActivationCheckpointingConfig, load_source(config).get(_SECTION), _SECTION)


def _model_parallel(mpu: Any, what: str, default: int) -> int:
    for name in (f"get_model_parallel_{what}", f"get_tensor_model_parallel_{what}"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return default
