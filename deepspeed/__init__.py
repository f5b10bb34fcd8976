# SPDX-License-Identifier: Apache-2.0
"""An independent implementation of the ZeRO runtime of the ``deepspeed`` package: ZeRO-3 with coherent hpZ.

Importing this package loads torch only when a name that needs it is used; nothing is compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from deepspeed.version import __version__

if TYPE_CHECKING:
    from deepspeed.api import add_config_arguments as add_config_arguments
    from deepspeed.api import initialize as initialize
    from deepspeed.comm import init_distributed as init_distributed
    from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

version = __version__
__git_hash__ = None
__git_branch__ = None

_HOME = {
    "initialize": "deepspeed.api",
    "add_config_arguments": "deepspeed.api",
    "OnDevice": "deepspeed.api",
    "tp_model_init": "deepspeed.api",
    "init_distributed": "deepspeed.comm",
    "DeepSpeedEngine": "deepspeed.runtime.engine",
    "DeepSpeedConfig": "deepspeed.runtime.config",
    "DeepSpeedConfigError": "deepspeed.errors",
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer",
    "get_accelerator": "deepspeed.accelerator",
    "log_dist": "deepspeed.utils.logging",
    "logger": "deepspeed.utils.logging",
}
_MODULES = {
    "zero": "deepspeed.runtime.zero",
    "comm": "deepspeed.comm",
    "dist": "deepspeed.comm",
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "checkpoint": "deepspeed.checkpoint",
    "ops": "deepspeed.ops",
    "utils": "deepspeed.utils",
    "runtime": "deepspeed.runtime",
    "elasticity": "deepspeed.elasticity",
    "module_inject": "deepspeed.module_inject",
    "launcher": "deepspeed.launcher",
    "accelerator": "deepspeed.accelerator",
    "monitor": "deepspeed.monitor",
    "profiling": "deepspeed.profiling",
    "git_version_info": "deepspeed.git_version_info",
    "errors": "deepspeed.errors",
}

__all__ = ["__version__", "version", *_HOME, *_MODULES]

_NOT_BUILT = {
    "init_inference": "inference kernels",
    "InferenceEngine": "inference kernels",
    "replace_transformer_layer": "inference kernels",
    "revert_transformer_layer": "inference kernels",
    "PipelineEngine": "pipeline parallelism",
    "PipelineModule": "pipeline parallelism",
    "DeepSpeedHybridEngine": "the hybrid engine",
    "DeepSpeedTransformerLayer": "transformer kernels",
    "DeepSpeedTransformerConfig": "transformer kernels",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "HAS_TRITON":
        return importlib.util.find_spec("triton") is not None
    hint = f": {_NOT_BUILT[name]} is not part of this package" if name in _NOT_BUILT else ""
    raise AttributeError(f"module 'deepspeed' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "HAS_TRITON"})
