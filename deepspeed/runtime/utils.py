# SPDX-License-Identifier: Apache-2.0
"""Small helpers that users' scripts import from here: move nested data, seed everything, report memory."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import log_dist


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return `item` with its tensors on `device`; lists, tuples (named too), mappings and dataclasses are followed.

    `criterion_func(leaf)` False leaves a leaf where it is. Anything that is not a container and has no `.to` is
    returned unchanged.
    """

    def move(value: Any) -> Any:
        return move_to_device(value, device, criterion_func)

    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(move, item))
    if isinstance(item, list | tuple):
        return type(item)(map(move, item))
    if isinstance(item, dict):
        moved = {key: move(value) for key, value in item.items()}
        return moved if type(item) is dict else _rebuild(item, moved)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.replace(
            item, **{f.name: move(getattr(item, f.name)) for f in dataclasses.fields(item) if f.init}
        )
    if isinstance(item, Mapping):
        return _rebuild(item, {key: move(value) for key, value in item.items()})
    if not hasattr(item, "to") or (criterion_func is not None and not criterion_func(item)):
        return item
    return item.to(device)


def _rebuild(original: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping like `original` with other values; where its class cannot be built from a dict, a plain dict."""
    try:
        return type(original)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy (where installed) and torch on every device."""
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)
    random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log device and host memory on rank 0 with `message` in front; does nothing unless `force` is True."""
    if not force:
        return
    gc.collect()
    device = get_accelerator()
    gib = 2.0**30
    text = (
        f"{message} | device GiB: allocated {device.memory_allocated() / gib:.2f}, peak "
        f"{device.max_memory_allocated() / gib:.2f}, reserved {device.memory_reserved() / gib:.2f}"
    )
    try:
        import psutil
    except ImportError:
        pass
    else:
        host = psutil.virtual_memory()
        text += f" | host GiB: used {(host.total - host.available) / gib:.2f}, {host.percent}%"
    device.reset_peak_memory_stats()
    log_dist(text, ranks=[0])
