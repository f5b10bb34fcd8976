# SPDX-License-Identifier: Apache-2.0
"""The sections `offload_param` and `offload_optimizer`, and the enums that name devices and kinds of state."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deepspeed.runtime.config_utils import ConfigSection, NonNegativeInt, PositiveInt, acted, inert

_NVME_ONLY = "used by NVMe offload only, which is refused by name"


class OffloadDeviceEnum(str, Enum):
    """Where idle state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that `offload_states(include=...)` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def _to_device(value: Any) -> Any:
    if value is None:
        return OffloadDeviceEnum.none
    return value.lower() if isinstance(value, str) and not isinstance(value, Enum) else value


Device = Annotated[OffloadDeviceEnum, BeforeValidator(_to_device)]


class DeepSpeedZeroOffloadParamConfig(ConfigSection):
    """`zero_optimization.offload_param`: where the shards of parameters live while they are not in use."""

    device: Device = acted(OffloadDeviceEnum.none, by="zero core (offload)", doc="none or cpu")
    nvme_path: str | None = inert(None, why=_NVME_ONLY)
    buffer_count: PositiveInt = inert(5, why=_NVME_ONLY)
    buffer_size: PositiveInt = inert(100_000_000, why=_NVME_ONLY)
    max_in_cpu: NonNegativeInt = inert(1_000_000_000, why=_NVME_ONLY)
    pin_memory: bool = acted(
        True,
        by="zero core (offload)",
        doc="page-lock the shards where the accelerator can; torch rounds each allocation up to a power of two",
    )


class DeepSpeedZeroOffloadOptimizerConfig(ConfigSection):
    """`zero_optimization.offload_optimizer`: where master weights and optimizer states live, and are stepped."""

    device: Device = acted(OffloadDeviceEnum.none, by="zero core (master), optimizer choice", doc="none or cpu")
    nvme_path: str | None = inert(None, why=_NVME_ONLY)
    buffer_count: PositiveInt = inert(4, why=_NVME_ONLY)
    pin_memory: bool = acted(
        True,
        by="zero core (offload)",
        doc="page-lock the master weights where the accelerator can, not the moments, which never leave the host; "
        "torch rounds each allocation up to a power of two",
    )
    pipeline_read: bool = inert(False, why=_NVME_ONLY)
    pipeline_write: bool = inert(False, why=_NVME_ONLY)
    fast_init: bool = inert(False, why=_NVME_ONLY)
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = acted(1.0, by="refused unless 1", doc="share stepped on the CPU")
    super_offload: bool = acted(False, by="refused if true", doc="overlapped CPU step of a tightly coupled host")
    cpuadam_cores_perc: Annotated[float, Field(gt=0.0, le=1.0)] = inert(0.8, why="used by super_offload only")
