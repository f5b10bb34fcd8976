# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.zero`: sharding, gathering and registration of parameters; each name is loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.lazy import submodules

if TYPE_CHECKING:
    from .partition_parameters import GatheredParameters as GatheredParameters
    from .partition_parameters import Init as Init
    from .partition_parameters import register_external_parameter as register_external_parameter

_HOME = {
    "DeepSpeedZeRoOffload": "parameter_offload",
    "GatheredParameters": "partition_parameters",
    "Init": "partition_parameters",
    "TiledLinear": "tiling",
    "TiledLinearReturnBias": "tiling",
    "ZeroParamStatus": "partition_parameters",
    "ZeroParamType": "partition_parameters",
    "register_external_parameter": "partition_parameters",
    "unregister_external_parameter": "partition_parameters",
    "unwrap_model_for_generation": "generation",
}

__all__ = list(_HOME)
_submodule = submodules(__name__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        return _submodule(name)
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
