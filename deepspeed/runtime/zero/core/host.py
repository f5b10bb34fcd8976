# SPDX-License-Identifier: Apache-2.0
"""Shards and masters in host memory: page-locking them, and writing them while the device may still be reading.

Invariant (``hpz.md``, H1: never torn): a copy from page-locked memory to the device is queued, and the device reads the
memory later. ``send`` notes an event behind each such copy of a shard; whoever is about to write a shard calls
``before_write`` first, which waits for it. Shards on the device have no event and nothing to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .param import ShardedParam

LOOK = 2e-5
"""Seconds between two looks at the device."""


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool: ...


def wait(event: Event, timeout: float) -> None:
    """Wait until the device got to ``event``, in a way that ends if it never does.

    Raises:
        TimeoutError: not within ``timeout`` seconds: the device waits for something.
    """
    if event.query():
        return
    end = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the device did not get there within {timeout:.0f} s")
        time.sleep(LOOK)


# -- page-locked memory ----------------------------------------------------------------------------------------------


def can_pin(device: torch.device) -> bool:
    """Whether page-locked memory serves the copies to and from ``device``."""
    return device.type == "cuda"


def zeros(numel: int, dtype: torch.dtype, device: torch.device, pin: bool = False) -> torch.Tensor:
    """1-D zeros on ``device``; ``pin`` page-locks them and is for the host."""
    return allocate_pinned(numel, dtype).zero_() if pin else torch.zeros(numel, dtype=dtype, device=device)


def empty(numel: int, dtype: torch.dtype, device: torch.device, pin: bool = False) -> torch.Tensor:
    """1-D memory on ``device``; ``pin`` page-locks it and is for the host."""
    return allocate_pinned(numel, dtype) if pin else torch.empty(numel, dtype=dtype, device=device)


def allocate_pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """1-D page-locked memory. torch's host allocator rounds it up to a power of two and keeps what is freed."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The 1-D ``tensor`` of the host in page-locked memory: itself if it is there, else a copy."""
    return tensor if tensor.is_pinned() else allocate_pinned(tensor.numel(), tensor.dtype).copy_(tensor)


def release_unused(device: torch.device) -> None:
    """Give page-locked memory that is not in use any more back to the system; torch keeps it for later otherwise."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # not in every torch that is supported
    if can_pin(device) and release is not None:
        release()


# -- shards that the device reads ------------------------------------------------------------------------------------


def send(params: Sequence[ShardedParam], device: torch.device) -> list[torch.Tensor]:
    """The shards of those ``params`` that have elements, on ``device``. Copies from the host are queued, and noted."""
    used = [p for p in params if p.numel]
    sent = [p.shard.to(device, non_blocking=True) for p in used]
    moved = [p for p, there in zip(used, sent, strict=True) if there is not p.shard]
    if moved:
        event = _mark(device, {p.reading for p in moved})
        for p in moved:
            p.reading = event
    return sent


def _mark(device: torch.device, earlier: Iterable[Event | None]) -> Event:
    """An event behind what the current stream of ``device`` has queued, and behind ``earlier`` ones of any stream."""
    stream = torch.cuda.current_stream(device)
    for event in earlier:
        if event is not None:
            stream.wait_event(event)  # type: ignore[arg-type]  # they were made below
    return stream.record_event()


def before_write(params: Iterable[ShardedParam]) -> None:
    """The host is about to write the shards of ``params``: wait until no queued copy reads them.

    Raises:
        CollectiveTimeout: the device does not get to a copy, since it waits for another rank.
    """
    for p in params:
        if p.reading is None:
            continue
        try:
            wait(p.reading, p.groups.primary.timeout or float("inf"))
        except TimeoutError as error:
            raise p.groups.lost(f"the copy of {p.name} to the device", error) from error
        p.reading = None
