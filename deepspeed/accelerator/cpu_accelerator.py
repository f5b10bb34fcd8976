# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: one synchronous device per process, gloo between processes.

What must hold: nothing is compiled, no stream exists, and memory figures are those of this process.
"""

from __future__ import annotations

import contextlib
import os
from types import ModuleType
from typing import Any

import psutil
import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CPU_Accelerator"]


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        self._peak_rss = 0

    @property
    def module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        """Processes that a host is meant to run: `LOCAL_SIZE` where a launcher set it, else 1."""
        return int(os.environ.get("LOCAL_SIZE", 1))

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Always `"cpu"`: tensors of every rank of a host are on one device."""
        return self._name

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """Nothing to choose."""

    def current_device(self) -> int | str:
        """The device, which for the CPU is a name."""
        return self._name

    def current_device_name(self) -> str:
        return self._name

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is ever pending."""

    # --- random numbers: the CPU has torch's own generator ---

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # --- no streams ---

    @property
    def Stream(self) -> Any:
        return None

    @property
    def Event(self) -> Any:
        return None

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return None

    def default_stream(self, device_index: int | None = None) -> Any:
        return None

    # --- memory of this process ---

    def empty_cache(self) -> None:
        """The C library decides."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        rss = int(psutil.Process().memory_info().rss)
        self._peak_rss = max(self._peak_rss, rss)
        return rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Highest of the values that were looked at since the last reset."""
        self.memory_allocated()
        return self._peak_rss

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak_rss = 0

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().available)

    # --- data types ---

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """float16 on CPUs is emulated, but complete."""
        return True

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int | str]) -> None:
        """Ranks on the CPU see no GPU."""
        current_env["CUDA_VISIBLE_DEVICES"] = ""

    def export_envs(self) -> list[str]:
        return []
