# SPDX-License-Identifier: Apache-2.0
"""Promise: no order of streams, no delay anywhere, changes a bit (H6; deepspeedai/DeepSpeed#5059, PR #7898).

Gradients and weights of a run whose collectives are awaited at once on one stream are the reference. Against it: side
streams, overlap, and delays put on the device before gathers, reductions, hpZ copies and the step, on all ranks or one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.zero.core import wire
from deepspeed.runtime.zero.core.master import MasterWeights
from deepspeed.runtime.zero.core.unit import ShardedUnit
from tests.gpu import place
from tests.gpu.train import Case, engine_of
from tests.harness.faults import watch

STEPS = 8 if place.ON_CPU else 200
SEAMS: dict[str, tuple[Any, str]] = {
    "gather": (wire, "gather"),
    "reduce": (wire, "reduce_scatter"),
    "hpZ copy": (ShardedUnit, "refresh_secondaries"),
    "step": (MasterWeights, "step"),
}


def _checksum(flats: list[torch.Tensor]) -> torch.Tensor:
    """A number that depends on every bit and its place: int64, on the device, without waiting for it."""
    total = torch.zeros((), dtype=torch.int64, device=place.device())
    for flat in flats:
        bits = flat.contiguous().view(torch.int16 if flat.element_size() == 2 else torch.int32).long()
        total = total * 31 + (bits * torch.arange(1, bits.numel() + 1, device=flat.device)).sum()
    return total


@contextlib.contextmanager
def _delays(where: tuple[str, ...], ranks: tuple[int, ...]) -> Iterator[None]:
    def act(call: int, _args: Any, _kwargs: Any) -> None:
        if dist.get_rank() in ranks and call % 3 == 0:
            place.pause(0.002)

    with contextlib.ExitStack() as stack:
        for name in where:
            stack.enter_context(watch(*SEAMS[name], act))
        yield


def _plain(engine: Any, batch: Any) -> torch.Tensor:
    loss = engine(*batch)
    engine.backward(loss)
    return loss


def _on_side(whole: bool) -> Callable[[Any, Any], torch.Tensor]:
    """Backward alone, or forward and backward, on a side stream that is ordered with the current one."""

    def run(engine: Any, batch: Any) -> torch.Tensor:
        if place.ON_CPU:
            return _plain(engine, batch)
        here = torch.cuda.current_stream()
        side = engine.__dict__.setdefault("_test_side_stream", torch.cuda.Stream())
        loss = None if whole else engine(*batch)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            loss = engine(*batch) if loss is None else loss
            engine.backward(loss)
        here.wait_stream(side)
        loss.record_stream(here)
        return loss

    return run


def _trace(case: Case, how: str, steps: int, where: tuple[str, ...] = (), ranks: tuple[int, ...] = ()) -> list[int]:
    """Checksums of loss and averaged gradients of every step, and of the masters at the end."""
    place.exact()
    engine = engine_of(case)
    run = {"plain": _plain, "backward": _on_side(False), "both": _on_side(True), "all": _plain}[how]
    sums = []
    everything: Any = contextlib.nullcontext()
    if how == "all" and not place.ON_CPU:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        everything = torch.cuda.stream(stream)
    with everything, _delays(where, ranks):
        for step in range(steps):
            for micro in range(case.accum):
                loss = run(engine, place.batches()(step, dist.get_rank(), micro))
                grads = [g for group in engine.optimizer.averaged_gradients.values() for g in group]
                sums.append(_checksum([loss.detach().float().reshape(1), *grads]))
                engine.step()
        sums.append(_checksum(engine.optimizer.fp32_partitioned_groups_flat))
        result = torch.stack(sums).tolist()
    place.synchronize()
    engine.destroy()
    return result


def _traces(runs: list[tuple[Any, ...]]) -> list[list[int]]:
    return [_trace(*run) for run in runs]


def _assert_equal(runs: list[tuple[Any, ...]], by_rank: list[list[list[int]]], groups: int = 1) -> None:
    problems = []
    for rank, traces in enumerate(by_rank):
        for index in range(groups, len(runs)):
            wanted = traces[index % groups]
            if traces[index] != wanted:
                first = next(i for i, (a, b) in enumerate(zip(traces[index], wanted, strict=True)) if a != b)
                problems.append(
                    f"rank {rank}: {runs[index]} differs from {runs[index % groups]} from record {first} on"
                )
    assert not problems, "\n".join(problems)


BF16 = Case(model="blocks", dtype="bf16", clip=0.5, limits="nothing stays", zero=(("overlap_comm", False),))
OVERLAP = Case(model="blocks", dtype="bf16", clip=0.5, limits="no reuse")


@place.needs(2)
def test_side_streams() -> None:
    """Row 50 of the reports: 200 steps each; backward, forward and backward, or all of it on a side stream."""
    runs: list[tuple[Any, ...]] = [(BF16, "plain", STEPS)]
    runs += [(OVERLAP, how, STEPS) for how in ("plain", "backward", "both", "all")]
    _assert_equal(runs, place.launch(_traces, 2, runs, limit=80))


@pytest.mark.parametrize("world", place.worlds(2, 4))
def test_delays(world: int) -> None:
    """Each seam delayed on all ranks, on rank 0, on the last; with hpZ, accumulation and recomputation."""
    everyone, last = tuple(range(world)), (world - 1,)
    case = Case("blocks_non_reentrant", dtype="bf16", accum=2, clip=0.5, hpz=2 if world > 2 else 1, limits="no reuse")
    runs: list[tuple[Any, ...]] = [(case, "plain", 6)]
    runs += [(case, "plain", 6, (name,), ranks) for name in SEAMS for ranks in (everyone, last)]
    runs += [(case, how, 6, tuple(SEAMS), (0,)) for how in ("plain", "both")]
    _assert_equal(runs, place.launch(_traces, world, runs))


@place.needs(2)
def test_a_checksum_sees_one_bit() -> None:
    """The comparison above can fail."""
    assert place.launch(_one_bit, 1) == [True]


def _one_bit() -> bool:
    a = torch.randn(100, device=place.device()).bfloat16()
    b = a.clone()
    b.view(torch.int16)[57] ^= 1
    swapped = a.clone()
    swapped[[3, 4]] = a[[4, 3]]
    return int(_checksum([a])) not in (int(_checksum([b])), int(_checksum([swapped])))
