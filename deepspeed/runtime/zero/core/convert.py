# SPDX-License-Identifier: Apache-2.0
"""From an ``nn.Parameter`` with full weights to a sharded one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from . import host, layout, wire
from .param import ShardedParam, ShardGroups
from .parameter import ReleasedZeroParameter, ZeroParameter, adopt_shard

BROADCAST_CHUNK = 1 << 26
"""Elements broadcast at a time, so that a huge parameter needs no second full copy on the device."""


def shard_parameter(
    param: nn.Parameter,
    groups: ShardGroups,
    device: torch.device | None = None,
    shard_device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    broadcast: bool = True,
    pin: bool = False,
) -> ShardedParam:
    """Shard ``param`` in place over ``groups``; its weights are those of rank 0. Collective.

    Needs the memory of the shard and of ``BROADCAST_CHUNK`` elements beside the parameter, however it lies in memory.
    The parameter becomes a unit of its own until a model's units are formed.

    Args:
        device: where full weights live (default: where they are now); ``shard_device``: where the shard lives.
        dtype: dtype of shard and gathered weights for floating-point parameters (default: kept).
        pin: page-lock the shard, which lives on the host.
    """
    device = device if device is not None else param.device
    if dtype is None or not param.dtype.is_floating_point:
        dtype = param.dtype
    shape, numel = param.shape, param.numel()
    size = layout.shard_numel(numel, groups.primary.size)
    start, end = layout.valid_span(numel, size, groups.primary.rank)
    shard = host.zeros(size, dtype, shard_device if shard_device is not None else device, pin)
    for low, piece in _pieces(param.data, BROADCAST_CHUNK):
        high = low + piece.numel()
        piece = piece.to(device=device, dtype=dtype)
        if broadcast:
            piece = piece.contiguous()
            try:
                wire.broadcast(piece, groups.primary)
            except RuntimeError as error:
                raise groups.lost(f"sharding a parameter of shape {tuple(shape)}", error) from error
        first, last = max(low, start), min(high, end)
        if first < last:
            shard[first - start : last - start].copy_(piece[first - low : last - low])
    return adopt_shard(param, shard, shape, groups, device)


def _pieces(data: torch.Tensor, limit: int, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut ``data`` into 1-D pieces of at most ``limit`` elements, each with its position in the flattened tensor.

    Where to cut depends on the shape alone, so that ranks agree. Only a piece that is not contiguous is copied.
    """
    if not data.numel():
        return
    if not data.dim():
        data = data.reshape(1)
    row = data.numel() // len(data)
    if row > limit:
        for index, part in enumerate(data):
            yield from _pieces(part, limit, start + index * row)
        return
    rows = max(limit // row, 1)
    for first in range(0, len(data), rows):
        yield start + first * row, data[first : first + rows].reshape(-1)


def is_sharded(param: object) -> bool:
    """Whether ``param`` is a sharded parameter."""
    return isinstance(param, ZeroParameter)


def is_released(param: object) -> bool:
    """Whether ``param`` is a sharded parameter that shows no weights."""
    return isinstance(param, ReleasedZeroParameter)
