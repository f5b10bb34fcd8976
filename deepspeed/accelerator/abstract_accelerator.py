# SPDX-License-Identifier: Apache-2.0
"""The interface of a kind of device, which third parties may subclass.

What must hold: a subclass names its torch device type and its torch module (`torch.cuda`, `torch.cpu`, ...) and
overrides what differs; everything that torch spells the same for every module is written here once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["DeepSpeedAccelerator"]


class DeepSpeedAccelerator(ABC):
    """One kind of device. Indices are those of torch; `None` means the current device."""

    _name: str
    """Device type, as in `torch.device(_name)`."""
    _communication_backend_name: str
    """Name of the `torch.distributed` backend of this device."""

    # --- what a subclass says ---

    @property
    @abstractmethod
    def module(self) -> ModuleType:
        """The torch module of the device type."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine has such a device and torch can use it."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of visible devices."""

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 arithmetic runs on the device."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether float16 arithmetic runs on the device."""

    @abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Allocator statistics by name; empty where there are none."""

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors occupy (CPU: resident bytes of this process)."""

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Highest `memory_allocated` since the last reset."""

    @abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the caching allocator holds."""

    @abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Highest `memory_reserved` since the last reset."""

    @abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start the two maxima anew."""

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory of the device."""

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that could be allocated now."""

    @abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """Environment variables that choose the visible devices."""

    @abstractmethod
    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that a launcher hands to other hosts."""

    # --- device ---

    def device_name(self, device_index: int | None = None) -> str:
        """`"cuda"`, or `"cuda:1"` with an index."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context manager that makes the device current."""
        return self.module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make a device current in this thread."""
        self.module.set_device(device_index)

    def current_device(self) -> int | str:
        """Index of the current device."""
        return int(self.module.current_device())

    def current_device_name(self) -> str:
        """`device_name` of the current device."""
        return f"{self._name}:{self.current_device()}"

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until everything queued on the device has run."""
        self.module.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether every operation has finished when its call returns."""
        return False

    def use_host_timers(self) -> bool:
        """Whether time is taken on the host instead of by device events."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether streams are unnecessary for correctness."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether the device itself waits when memory runs out."""
        return self.is_synchronized_device()

    def communication_backend_name(self) -> str:
        """Name of the `torch.distributed` backend of this device."""
        return self._communication_backend_name

    # --- random numbers ---

    def random(self) -> ModuleType:
        """torch's module of random number functions."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        self.module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device."""
        self.module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """Seed of the current device."""
        return int(self.module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the generator, a ByteTensor."""
        return self.module.get_rng_state() if device_index is None else self.module.get_rng_state(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put back what `get_rng_state` returned."""
        if device_index is None:
            self.module.set_rng_state(new_state)
        else:
            self.module.set_rng_state(new_state, device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a device."""
        return self.module.default_generators[device_index]

    # --- streams ---

    @property
    def Stream(self) -> Any:
        """Class of the device's streams."""
        return self.module.Stream

    @property
    def Event(self) -> Any:
        """Class of the device's events."""
        return self.module.Event

    def stream(self, stream: Any) -> Any:
        """A context manager in which operations go to `stream`."""
        return self.module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that operations go to now."""
        return self.module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that operations go to unless told otherwise."""
        return self.module.default_stream(device_index)

    # --- memory ---

    def empty_cache(self) -> None:
        """Give unused cached memory back."""
        self.module.empty_cache()

    def memory_cached(self, device_index: int | None = None) -> int:
        """Older name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Older name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Older name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Older name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    # --- data types ---

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating types that training may use on the device."""
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the device."""
        return False

    def amp(self) -> ModuleType | None:
        """torch's module for mixed precision."""
        return torch.amp

    # --- tensors ---

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked host memory (itself where that means nothing)."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in page-locked memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on this kind of device."""
        return tensor.device.type == self._name

    # --- the rest ---

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run `callback` as soon as the device is initialised."""
        callback()

    def range_push(self, msg: str) -> None:
        """Open a named range for a profiler; nothing where there is none."""
        return None

    def range_pop(self) -> None:
        """Close the range opened last."""
        return None

    def get_compile_backend(self) -> str:
        """Default backend of `torch.compile` for this device."""
        return "inductor"

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int | str]) -> None:
        """Write the choice of devices into an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))
