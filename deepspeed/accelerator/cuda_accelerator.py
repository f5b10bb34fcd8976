# SPDX-License-Identifier: Apache-2.0
"""CUDA devices, NCCL between processes.

What must hold: asking whether there is a device does not initialise CUDA, so that a process may still fork afterwards.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CUDA_Accelerator"]


class CUDA_Accelerator(DeepSpeedAccelerator):
    """NVIDIA GPUs."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    @property
    def module(self) -> ModuleType:
        return torch.cuda

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def is_bf16_supported(self) -> bool:
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return importlib.util.find_spec("triton") is not None

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        index = torch.cuda.current_device() if device_index is None else device_index
        return int(torch.cuda.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes free on the device plus those cached by this process."""
        free, _ = torch.cuda.mem_get_info(device_index)
        return free + self.memory_reserved(device_index) - self.memory_allocated(device_index)

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        torch.cuda._lazy_call(callback)

    def range_push(self, msg: str) -> None:
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        torch.cuda.nvtx.range_pop()

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self) -> list[str]:
        return ["NCCL"]
