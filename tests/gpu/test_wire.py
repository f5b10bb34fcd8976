# SPDX-License-Identifier: Apache-2.0
"""Promise: grouped collectives are right for every list of shapes, and reach flat bandwidth on block-sized units."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.zero.core import wire
from tests.gpu import place
from tests.harness.skips import needs

SHARE = 0.9
# Weights of one Llama block; norms are persistent and not in it.
BLOCKS = {
    "1B block": [2048 * 2048, 2048 * 256, 2048 * 256, 2048 * 2048, 2048 * 5632, 2048 * 5632, 5632 * 2048],
    "8B block": [4096 * 4096, 4096 * 1024, 4096 * 1024, 4096 * 4096, 4096 * 14336, 4096 * 14336, 14336 * 4096],
    "100 norms": [2048] * 100,
}
LISTS = {
    "one": [5],
    "few": [1, 7, 4096],
    "many small": [3] * 40,
    "small and large": [5] * 20 + [1 << 18, 1 << 17],
    "some large": [1 << 17] * 20,
}


def _data(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that every sum and average over 2 or 4 ranks is exact in bf16."""
    return ((torch.arange(numel, device=place.device()) * 3 + 7 * rank + index) % 16 * 4).to(dtype)


def _right() -> list[str]:
    channel, problems = wire.Channel.of(None), []
    for name, sizes in LISTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            ins = [_data(channel.rank, i, n, dtype) for i, n in enumerate(sizes)]
            outs = [torch.full((channel.size * n,), -1, dtype=dtype, device=place.device()) for n in sizes]
            wire.gather(outs, ins, channel).wait()
            for i, (n, out) in enumerate(zip(sizes, outs, strict=True)):
                if not torch.equal(out, torch.cat([_data(r, i, n, dtype) for r in range(channel.size)])):
                    problems.append(f"gather, {name}, {dtype}, tensor {i}")
            full = [_data(channel.rank, i, channel.size * n, dtype) for i, n in enumerate(sizes)]
            for average in (True, False):
                parts = [torch.full((n,), -1, dtype=dtype, device=place.device()) for n in sizes]
                wire.reduce_scatter(parts, list(full), channel, average).wait()
                for i, (n, part) in enumerate(zip(sizes, parts, strict=True)):
                    total = torch.stack([_data(r, i, channel.size * n, torch.float32) for r in range(channel.size)])
                    wanted = total.mean(0) if average else total.sum(0)
                    if not torch.equal(part.float(), wanted[channel.rank * n : (channel.rank + 1) * n]):
                        problems.append(f"reduce_scatter, {name}, {dtype}, average {average}, tensor {i}")
    return problems


@pytest.mark.parametrize("world", place.worlds(2, 4))
def test_right_for_every_list(world: int) -> None:
    for problems in place.launch(_right, world):
        assert not problems, "\n".join(problems[:8])


def _milliseconds(call: Callable[[], Any], repeats: int = 5, rounds: int = 9) -> float:
    """Median over rounds of the mean time of a call; the slowest rank's."""
    times = []
    for number in range(rounds + 2):
        place.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / repeats)
    slowest = torch.tensor(statistics.median(times), device=place.device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _measure() -> dict[str, dict[str, float]]:
    channel, table = wire.Channel.of(None), {}
    world, kwargs = channel.size, {"dtype": torch.bfloat16, "device": place.device()}
    for name, numels in BLOCKS.items():
        sizes = [-(-numel // world) for numel in numels]
        shards = list(torch.zeros(sum(sizes), **kwargs).split(sizes))
        fulls = list(torch.zeros(world * sum(sizes), **kwargs).split([world * n for n in sizes]))
        shard, full = torch.zeros(sum(sizes), **kwargs), torch.zeros(world * sum(sizes), **kwargs)
        options = channel.reduce_options(True)

        def copy_out(full: Any = full, shard: Any = shard, fulls: Any = fulls, sizes: Any = sizes) -> None:
            channel.group._allgather_base(full, shard).wait()
            columns = full.view(world, -1).split(sizes, dim=1)
            torch._foreach_copy_([f.view(world, -1) for f in fulls], list(columns))

        table[name] = {
            "MB": full.nbytes / 1e6,
            "gather": _milliseconds(lambda f=fulls, s=shards: wire.gather(f, s, channel).wait()),
            "gather flat": _milliseconds(lambda f=full, s=shard: channel.group._allgather_base(f, s).wait()),
            "flat and copy-out": _milliseconds(copy_out),
            "reduce": _milliseconds(lambda f=fulls, s=shards: wire.reduce_scatter(s, list(f), channel).wait()),
            "reduce flat": _milliseconds(
                lambda f=full, s=shard, o=options: channel.group._reduce_scatter_base(s, f, o).wait()
            ),
        }
    return table


def _share(table: dict[str, dict[str, float]], world: int) -> dict[str, float]:
    place.note(f"wire, {world} ranks, ms:    MB   gather    flat  +copy   share | reduce    flat   share")
    shares = {}
    for name, row in table.items():
        gather, reduce = row["gather flat"] / row["gather"], row["reduce flat"] / row["reduce"]
        place.note(
            f"  {name:12}{row['MB']:14.1f} {row['gather']:8.3f}{row['gather flat']:8.3f}{row['flat and copy-out']:7.3f}"
            f"{gather:8.2f} |{row['reduce']:7.3f}{row['reduce flat']:8.3f}{reduce:8.2f}"
        )
        shares[f"{name}, gather"], shares[f"{name}, reduce"] = gather, reduce
    return shares


@place.cuda_only
@pytest.mark.parametrize("world", place.worlds(2, 4))
def test_grouped_reaches_flat_bandwidth(world: int) -> None:
    shares = _share(place.launch(_measure, world)[0], world)
    if place.SHARED and torch.cuda.device_count() < world:
        pytest.skip(needs("a device for each rank, else bandwidth says nothing", "a machine with more devices"))
    slow = {what: share for what, share in shares.items() if "block" in what and share < SHARE}
    assert not slow, f"below {SHARE} of flat bandwidth: {slow}"
