# SPDX-License-Identifier: Apache-2.0
"""Promises of the wire on gloo: right for every list of shapes, without copies, the same bits whoever comes first."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.measure import peak_on_cpu
from deepspeed.runtime.zero.core import direct, fetch, wire
from tests.harness.pool import run_fresh, run_ranks

LISTS = {
    "one": [5],
    "few": [1, 7, 4096],
    "with an empty one": [3, 0, 2],
    "many small": [1 + i % 5 for i in range(40)],
    "small and large": [5] * 20 + [1 << 17, (1 << 16) + 1],
}
MANY = [1 << 16] * 4


def _value(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sums over a few ranks are exact in 16 bits."""
    return ((torch.arange(numel) * 3 + 7 * rank + index) % 16 * 4).to(dtype)


def _problems() -> list[str]:
    channel, found = wire.Channel.of(None), []
    size, rank = channel.size, channel.rank
    for name, sizes in LISTS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            ins = [_value(rank, i, n, dtype) for i, n in enumerate(sizes)]
            outs = [torch.full((size * n,), -1, dtype=dtype) for n in sizes]
            wire.gather(outs, ins, channel).wait()
            for i, (n, out) in enumerate(zip(sizes, outs, strict=True)):
                if not torch.equal(out, torch.cat([_value(r, i, n, dtype) for r in range(size)])):
                    found.append(f"gather, {name}, {dtype}, tensor {i}")
            for average in (True, False) if dtype.is_floating_point else (False,):
                full = [_value(rank, i, size * n, dtype) for i, n in enumerate(sizes)]
                parts = [torch.full((n,), -1, dtype=dtype) for n in sizes]
                wire.reduce_scatter(parts, full, channel, average).wait()
                for i, (n, part) in enumerate(zip(sizes, parts, strict=True)):
                    total = torch.stack([_value(r, i, size * n, torch.float64) for r in range(size)]).sum(0)
                    wanted = (total / size if average else total).to(dtype)[rank * n : (rank + 1) * n]
                    if not torch.equal(part, wanted):
                        found.append(f"reduce_scatter, {name}, {dtype}, average {average}, tensor {i}")
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_right_for_every_list(world: int) -> None:
    for problems in run_ranks(_problems, world):
        assert not problems, "\n".join(problems[:8])


def _sums(delays: list[float]) -> list[torch.Tensor]:
    channel = wire.Channel.of(None)
    generator = torch.Generator().manual_seed(channel.rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        full = [torch.randn(channel.size * n, generator=generator).to(dtype) for n in (33, 1025)]
        parts = [torch.empty(n, dtype=dtype) for n in (33, 1025)]
        time.sleep(delays[channel.rank])
        wire.reduce_scatter(parts, full, channel).wait()
        found += parts
    return found


def test_the_order_of_arrival_changes_no_bit() -> None:
    """fp32 addition is not associative: sums are in rank order, whoever is late."""
    expected = run_ranks(_sums, 4, [0.0] * 4)
    for late in range(4):
        got = run_ranks(_sums, 4, [0.1 if rank == late else 0.0 for rank in range(4)])
        for a, b in zip(expected, got, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _rounded_once() -> tuple[torch.Tensor, torch.Tensor]:
    channel = wire.Channel.of(None)
    fulls = [torch.randn(4 * 999, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(4)]
    part = torch.empty(999, dtype=torch.bfloat16)
    wire.reduce_scatter([part], [fulls[channel.rank]], channel).wait()
    mine = slice(channel.rank * 999, (channel.rank + 1) * 999)
    return part, torch.stack([full[mine].double() for full in fulls]).mean(0).bfloat16()


def test_sixteen_bit_averages_are_rounded_once() -> None:
    for part, exact in run_ranks(_rounded_once, 4):
        assert torch.equal(part, exact)


def _peaks() -> tuple[int, int]:
    channel = wire.Channel.of(None)
    ins = [torch.zeros(n) for n in MANY]
    outs = [torch.empty(channel.size * n) for n in MANY]
    before = sum(t.nbytes for t in [*ins, *outs])
    gather = peak_on_cpu(lambda: wire.gather(outs, ins, channel).wait()) - before
    reduce = peak_on_cpu(lambda: wire.reduce_scatter(ins, outs, channel).wait()) - before
    return gather, reduce


def test_a_gather_takes_no_memory_and_a_reduction_that_of_what_arrives() -> None:
    slices = 4 * sum(MANY)
    for gather, reduce in run_ranks(_peaks, 2):
        assert gather < 0.1 * slices
        assert reduce < 1.1 * slices


def _freed_after_failure() -> dict[str, Any]:
    """Rank 1 answers after rank 0 gave up and freed the memory that the answer was meant for."""
    channel = wire.Channel.of(dist.new_group(timeout=timedelta(seconds=1.5)))
    result: dict[str, Any] = {}
    mine, out = torch.full((1 << 18,), 1.0 + channel.rank), torch.zeros(2 << 18)
    if channel.rank == 0:
        handle = wire.gather([out], [mine], channel)
        try:
            handle.wait()
        except RuntimeError as error:
            result["error"] = str(error)
        out.untyped_storage().resize_(0)
        reused = torch.zeros(2 << 18)
        time.sleep(2.5)
        result["untouched"] = not reused.any().item()
        return result
    time.sleep(2.5)
    try:
        wire.gather([out], [mine], channel).wait()
    except RuntimeError as error:
        result["error"] = str(error)
    return result


def test_memory_may_be_freed_once_a_gather_failed() -> None:
    first, _ = run_ranks(_freed_after_failure, 2)
    assert first["error"] and first["untouched"]


def _written_after_failure(how: str) -> dict[str, Any]:
    """Rank 1 is gone, and rank 0 fails while it receives from rank 2, which sends once rank 0 has the error in hand."""
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    channel = wire.Channel.of(None)
    n = 4096
    mine, out = torch.full((n,), 1.0 + channel.rank), torch.zeros(3 * n)
    if channel.rank == 1:
        time.sleep(0.5 if how == "both" else 0.0)
        os._exit(0)
    if channel.rank == 2:
        time.sleep(1.5)
        with contextlib.suppress(RuntimeError):
            if how == "one":
                channel.group.send([mine], 0, direct.GATHER + mine.nbytes).wait()
            else:
                wire.gather([torch.zeros(2 * n)], [mine], wire.Channel.of(pairs[1])).wait()
        return {}
    error = None
    try:
        if how == "one":
            time.sleep(0.5)
            wire.gather([out], [mine], channel).wait()  # fails while it is issued, behind what it receives from rank 2
        else:
            channels = [wire.Channel.of(pair) for pair in pairs]
            outs = [torch.zeros(2 * n), out[: 2 * n]]
            fetch._Both(*[wire.gather([o], [mine], c) for o, c in zip(outs, channels, strict=True)]).wait()
    except RuntimeError as caught:
        error = caught  # and the frames that it holds
    out.zero_()
    time.sleep(2.0)
    return {"error": str(error), "written": bool(out.any())}


@pytest.mark.parametrize("how", ["one", "both"])
def test_nothing_arrives_after_an_error(how: str) -> None:
    """The error of one peer ends the messages of all: whoever catches it may free the memory."""
    first, *_ = run_fresh(_written_after_failure, 3, how)
    assert first.value is not None, first
    assert first.value["error"] != "None" and not first.value["written"]


class _Interrupts:
    def wait(self) -> None:
        raise KeyboardInterrupt("Ctrl-C")


def _interrupted() -> tuple[str, list[float]]:
    """Ctrl-C while a gather of three tensors is waited for; then another gather."""
    channel = wire.Channel.of(None)
    ins = [torch.full((n,), 1.0 + channel.rank) for n in (5, 5, 5)]
    outs = [torch.zeros(2 * 5) for _ in ins]
    error = ""
    handle = wire.gather(outs, ins, channel)
    if channel.rank == 0:
        handle.works.append(_Interrupts())  # type: ignore[attr-defined]  # waited for first
    else:
        time.sleep(0.3)
    try:
        handle.wait()
    except KeyboardInterrupt as caught:
        error = str(caught)
    other = torch.zeros(2 * 5)
    wire.gather([other], [ins[0] * 10], channel).wait()
    return error, other.tolist()


def test_an_interrupted_wait_takes_no_message_from_the_next() -> None:
    first, second = run_ranks(_interrupted, 2)
    assert first == ("Ctrl-C", [10.0] * 5 + [20.0] * 5)
    assert second == ("", [10.0] * 5 + [20.0] * 5)


def _users_messages() -> bool:
    """A user's own message between the same ranks, sent before and received after."""
    channel = wire.Channel.of(None)
    mine, out, got = torch.full((8,), 1.0 + channel.rank), torch.zeros(16), torch.zeros(8)
    sent = dist.isend(mine + 10, 1) if channel.rank == 0 else None
    handle = wire.gather([out], [mine], channel)
    handle.wait()
    if channel.rank == 1:
        dist.recv(got, 0)
    if sent is not None:
        sent.wait()
    return torch.equal(out, torch.tensor([1.0] * 8 + [2.0] * 8)) and (channel.rank == 0 or bool((got == 11).all()))


def test_messages_of_the_user_are_not_mixed_up() -> None:
    assert run_ranks(_users_messages, 2) == [True, True]
