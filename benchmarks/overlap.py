# SPDX-License-Identifier: Apache-2.0
"""How much of the communication a step hides: from a profiler's trace of the device.

Kernels whose name begins with ``nccl`` are communication, every other kernel, copy and fill is compute. *Exposed* is
the time in which this rank's device communicates and computes nothing; *idle*, in which it does neither. Where several
ranks share a device, each sees its own kernels only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = tuple[float, float]
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaFree")
"""Calls of the runtime in which the host stands still."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans merged where they overlap, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Total length of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """From ``(name, begin, end)`` of a device's kernels: the window that they span and what fills it, in their unit.

    Returns:
        ``window``; ``compute`` and ``comm``, in which there is some; ``exposed``, communication alone; ``idle``;
        ``hidden``, the share of communication that is not exposed (1 where there is none).
    """
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for name, begin, end in kernels:
        spans[name.startswith("nccl")].append((begin, end))
    comm, compute = union(spans[True]), union(spans[False])
    busy = union([*comm, *compute])
    window = busy[-1][1] - busy[0][0] if busy else 0.0
    exposed = length(busy) - length(compute)
    total = length(comm)
    return {
        "window": window,
        "compute": length(compute),
        "comm": total,
        "exposed": exposed,
        "idle": window - length(busy),
        "hidden": 1.0 - exposed / total if total else 1.0,
    }


def trace(run: Callable[[], object], steps: int, path: str | None = None) -> dict[str, Any]:
    """Run ``steps`` steps under torch's profiler; milliseconds a step of ``overlap``, and where they went.

    Args:
        run: one step, not waited for; ``path``: where to write the trace for a viewer (Chrome's format), if anywhere.

    Returns:
        the figures of ``overlap`` in ms a step, ``kernels`` (name, ms, count a step; largest first) and ``waits``, the
        calls of the runtime in which the host stood still (name, ms, count a step).
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    if path is not None:
        profile.export_chrome_trace(path)
    results = profile.profiler.kineto_results
    assert results is not None
    kernels, waits = [], []
    for event in results.events():
        item = (event.name(), event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6)
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels.append(item)
        elif item[0].startswith(WAITS):
            waits.append(item)
    found: dict[str, Any] = {key: value / (1 if key == "hidden" else steps) for key, value in overlap(kernels).items()}
    return {**found, "kernels": _largest(kernels, steps), "waits": _largest(waits, steps)}


def _largest(items: list[tuple[str, float, float]], steps: int, count: int = 24) -> list[tuple[str, float, float]]:
    """Time and number a step of what has the same name, by time."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in items:
        times[name[:100]].append(end - begin)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:count]
    return [(name, round(sum(spans) / steps, 4), len(spans) / steps) for name, spans in ranked]
