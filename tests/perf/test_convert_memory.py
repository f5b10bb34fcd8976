# SPDX-License-Identifier: Apache-2.0
"""Sharding a parameter needs the parameter, its shard and one chunk: never a second full copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import measure
from deepspeed.runtime.zero.core import convert
from deepspeed.runtime.zero.core.param import ShardGroups
from deepspeed.runtime.zero.core.wire import Channel

WORLD, RANK, CHUNK = 8, 3, 1 << 14
CPU = torch.device("cpu")


def groups() -> ShardGroups:
    """Rank 3 of 8 as far as layout goes; a channel without a group sends nothing."""
    return ShardGroups(Channel(None, WORLD, RANK, tuple(range(WORLD))))


MAKERS = {
    "matrix": lambda: torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024),
    "transposed": lambda: torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024).t(),
    "fused experts": lambda: torch.arange(1 << 20, dtype=torch.float32).view(4, 512, 512).transpose(1, 2),
    "one long row": lambda: torch.arange(1 << 20, dtype=torch.float32).view(1, 1 << 20),
    "vector": lambda: torch.arange(1 << 20, dtype=torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_peak_is_parameter_shard_and_chunk(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "BROADCAST_CHUNK", CHUNK)

    def run() -> None:
        param = nn.Parameter(MAKERS[name]())
        convert.shard_parameter(param, groups(), CPU, dtype=dtype)

    before = measure.allocated_on_cpu()
    size = dtype.itemsize
    allowed = 4 * (1 << 20) + size * (1 << 20) // WORLD + 2 * 4 * CHUNK  # a piece, and the piece in another dtype
    assert measure.peak_on_cpu(run) - before <= allowed + 4096


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (5, 0), (0,), (2, 3, 4), (1, 37), (37, 1), (2, 1, 19)], ids=str
)
@pytest.mark.parametrize("limit", [1, 4, 100])
def test_pieces_are_the_flattened_tensor(shape: tuple[int, ...], limit: int) -> None:
    straight = torch.randn(shape)
    for data in (straight, straight.transpose(0, -1) if straight.dim() > 1 else straight):
        flat, end = data.reshape(-1), 0
        for start, piece in convert._pieces(data, limit):
            assert start == end
            assert 0 < piece.numel() <= limit
            end = start + piece.numel()
            assert torch.equal(piece, flat[start:end])
        assert end == flat.numel()


def test_the_shard_of_a_transposed_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "BROADCAST_CHUNK", 100)
    full = torch.arange(37 * 11, dtype=torch.float32).view(37, 11).t()
    size = -(-full.numel() // WORLD)
    expected = torch.nn.functional.pad(full.reshape(-1), (0, size * WORLD - full.numel()))
    sharded = convert.shard_parameter(nn.Parameter(full), groups(), CPU)
    assert torch.equal(sharded.shard, expected[RANK * size : (RANK + 1) * size])
