# SPDX-License-Identifier: Apache-2.0
"""What is counted besides time: collectives with their bytes, Python calls, and memory on devices without counters."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("_allgather_base_", "allgather_into_tensor_coalesced_", "allgather_", "allgather_coalesced_")
_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_")
_REDUCES = ("allreduce_", "allreduce_coalesced_", "reduce_")


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives and messages issued inside, by kind, and the bytes that this rank receives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[-1]
            if name == "send":  # the other rank's message counts
                return func(*args, **(kwargs or {}))
            kind, received = name.strip("_"), 0
            if name in _GATHERS:
                kind, received = "all_gather", max(_nbytes(args[0]) - _nbytes(args[1]), 0)
            elif name in _SCATTERS:
                kind, received = "reduce_scatter", max(_nbytes(args[1]) - _nbytes(args[0]), 0)
            elif name in _REDUCES:
                kind, received = "all_reduce", _nbytes(args[0])
            elif name == "recv_":
                kind, received = "message", _nbytes(args[0])
            elif name == "broadcast_":
                kind, received = "broadcast", _nbytes(args[0])
            self.calls[kind] += 1
            self.received[kind] += received
        return func(*args, **(kwargs or {}))

    def as_dict(self) -> dict[str, Any]:
        """Calls and received bytes by kind and in total."""
        return {
            "calls": dict(self.calls),
            "received": dict(self.received),
            "calls_total": sum(self.calls.values()),
            "received_total": sum(self.received.values()),
        }


def count_collectives(run: Callable[[], object]) -> dict[str, Any]:
    """Run once under a counter."""
    with CollectiveCounter() as counter:
        run()
    return counter.as_dict()


def count_python_calls(run: Callable[[], object]) -> int:
    """Python function calls of all threads while ``run`` runs."""
    total = [0]

    def tally(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            total[0] += 1

    threading.setprofile(tally)
    sys.setprofile(tally)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return total[0]


def allocated_on_cpu() -> int:
    """Bytes of all CPU tensors that Python can see, each storage once."""
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        plain = type(item) in (torch.Tensor, torch.nn.Parameter) or type(item).__name__.endswith("ZeroParameter")
        if plain and item.device.type == "cpu" and item.layout is torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            grad = item.grad if item.is_leaf else None
            if type(grad) is torch.Tensor:
                storages[grad.untyped_storage().data_ptr()] = grad.untyped_storage().nbytes()
    return sum(storages.values())


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Largest number of bytes of CPU tensors while ``run`` runs: those seen before plus the allocator's trace.

    Runs twice and measures the second: the trace does not show that memory is freed which it did not see allocated, and
    a step frees what the one before it left.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
        gc.collect()
        before = allocated_on_cpu()
        with torch.profiler.record_function("measured run"):
            run()
    results = profile.profiler.kineto_results
    assert results is not None
    events = results.events()
    begin = next(event.start_ns() for event in events if event.name() == "measured run")
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    live = peak = 0
    for _, change in sorted((c for c in changes if c[0] >= begin), key=lambda item: item[0]):
        live += change
        peak = max(peak, live)
    return before + peak
