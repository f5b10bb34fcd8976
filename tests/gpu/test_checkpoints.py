# SPDX-License-Identifier: Apache-2.0
"""Promise: what NCCL ranks save, they load, bit for bit; states on the host train alike and free device memory."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import safe_set_local_fp32_param
from tests.dist.support import full_params
from tests.gpu import place
from tests.gpu.train import Case, engine_of, on_host, run_cases, worst

ACCUM = 2


def _train(engine: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(ACCUM):
            loss = engine(*place.batches()(step, dist.get_rank(), micro))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def _evaluate(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(*place.batches()(999, 0)))
    engine.train()
    return loss


def _spoil(engine: Any) -> None:
    """Other weights, moments and valid hpZ shards."""
    _train(engine, 50, 51)


def _save(cases: list[Case], folder: str) -> list[Any]:
    place.exact()
    results = []
    for index, case in enumerate(cases):
        engine = engine_of(case)
        _train(engine, 0, 1)
        engine.save_checkpoint(f"{folder}/{index}", client_state={"epoch": index})
        loss, weights = _evaluate(engine), on_host(full_params(engine.module))
        results.append((loss, weights, _train(engine, 2, 3)))
        engine.destroy()
    return results


def _resume(cases: list[Case], folder: str) -> list[Any]:
    place.exact()
    results = []
    for index, case in enumerate(cases):
        engine = engine_of(case)
        _spoil(engine)
        path, client = engine.load_checkpoint(f"{folder}/{index}")
        assert path is not None and client["epoch"] == index and engine.global_steps == 2
        loss, weights = _evaluate(engine), on_host(full_params(engine.module))
        results.append((loss, weights, _train(engine, 2, 3)))
        engine.destroy()
    return results


def _evaluate_only(cases: list[Case], folder: str) -> list[float]:
    losses = []
    for index, case in enumerate(cases):
        engine = engine_of(dataclasses.replace(case, hpz=1))
        engine.load_checkpoint(f"{folder}/{index}")
        losses.append(_evaluate(engine))
        engine.destroy()
    return losses


@pytest.mark.parametrize("world", place.worlds(2, 4))
def test_round_trip(world: int) -> None:
    """Resumed equals uninterrupted, to the last bit; another world size evaluates alike."""
    cases = [
        Case(dtype=dtype, accum=ACCUM, clip=0.5, hpz=hpz, zero=zero)
        for dtype in ("fp32", "bf16")
        for hpz in sorted({1, 2 if world > 2 else 1})
        for zero in ((), (("sub_group_size", 300),))
    ]
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        saved = place.launch(_save, world, cases, folder)
        resumed = place.launch(_resume, world, cases, folder)
        alone = place.launch(_evaluate_only, 1, cases, folder)[0]
    for rank in range(world):
        for case, before, after in zip(cases, saved[rank], resumed[rank], strict=True):
            assert before[0] == after[0], f"rank {rank}, {case}: evaluation"
            assert all(torch.equal(before[1][name], after[1][name]) for name in before[1]), f"rank {rank}, {case}"
            assert before[2] == after[2], f"rank {rank}, {case}: training after the load"
    assert worst(alone, [before[0] for before in saved[0]]) <= 1e-5


OFFLOAD = {"device": "cpu", "pin_memory": True}


@place.needs(2)
def test_offload_trains_alike() -> None:
    """Optimizer on the host, parameters too. The host's Adam rounds differently, so not bit for bit."""
    offloads: list[tuple[tuple[str, Any], ...]] = [
        (),
        (("offload_optimizer", OFFLOAD),),
        (("offload_optimizer", OFFLOAD), ("offload_param", OFFLOAD)),
    ]
    cases = [Case(dtype=dtype, accum=2, clip=0.5, zero=zero) for dtype in ("fp32", "bf16") for zero in offloads]
    for runs in place.launch(run_cases, 2, cases):
        for index, (case, run) in enumerate(zip(cases, runs, strict=True)):
            off = worst(run.losses, runs[index - index % 3].losses)
            assert off <= (1e-5 if case.dtype == "fp32" else 1e-2), f"{case}: losses off by {off:.1e}"


def _where_states_are(zero: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    engine = engine_of(Case(dtype="bf16", zero=zero))
    engine.backward(engine(*place.batches()(0, dist.get_rank())))
    engine.step()
    params = list(engine.optimizer.sharded.params.values())
    moments = [t for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    masters = engine.optimizer.fp32_partitioned_groups_flat
    found = {
        "shards": {p.shard.device.type for p in params},
        "shards_pinned": all(p.shard.is_pinned() for p in params if p.shard.numel()),
        "moments": {t.device.type for t in moments},
        "masters": {t.device.type for t in masters},
        "masters_pinned": all(t.is_pinned() for t in masters if t.numel()),
    }
    engine.destroy()
    return found


@place.cuda_only
@place.needs(2)
def test_offloaded_states_live_in_pinned_memory() -> None:
    for found in place.launch(_where_states_are, 2, (("offload_optimizer", OFFLOAD), ("offload_param", OFFLOAD))):
        assert found["shards"] == found["moments"] == found["masters"] == {"cpu"}, found
        assert found["shards_pinned"] and found["masters_pinned"], found


def _write_behind_a_forward() -> list[float]:
    """Losses of one batch: before new weights, of a forward that the device has not begun when they come, after."""
    place.exact()
    engine = engine_of(Case(dtype="bf16", zero=(("offload_optimizer", OFFLOAD), ("offload_param", OFFLOAD))))
    batch = place.batches()(999, 0)
    zeros = {param: torch.zeros(param.partition_numel()) for param in engine.module.parameters()}
    engine.eval()
    with torch.no_grad():
        losses = [engine(*batch)]
        place.synchronize()
        place.pause(0.3)
        losses.append(engine(*batch))
        for param, value in zeros.items():
            safe_set_local_fp32_param(param, value)
        losses.append(engine(*batch))
    engine.destroy()
    return [float(loss) for loss in losses]


@place.needs(2)
def test_weights_written_on_the_host_do_not_reach_a_forward_that_was_queued_before() -> None:
    for before, queued, after in place.launch(_write_behind_a_forward, 2):
        assert queued == before != after


def _offload_between_steps() -> dict[str, Any]:
    place.exact()
    case = Case(model="wide", dtype="bf16", clip=0.5)
    losses: dict[bool, list[float]] = {}
    memory: dict[str, int] = {}
    for offload in (False, True):
        engine = engine_of(case)
        found = []
        for step in range(4):
            loss = engine(place.activations(step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
            if offload and step == 1:
                place.synchronize()
                memory["before"] = place.allocated()
                engine.offload_states()
                place.synchronize()
                memory["away"] = place.allocated()
                engine.reload_states()
                place.synchronize()
                memory["back"] = place.allocated()
        losses[offload] = found
        shards = sum(p.shard.numel() for p in engine.optimizer.sharded.params.values())
        engine.destroy()
    return {"losses": losses, "memory": memory, "shards": shards}


@place.needs(2)
def test_offload_states_frees_memory_and_changes_nothing() -> None:
    """At least the 12 bytes a parameter of masters, moments and shards leave the device."""
    for found in place.launch(_offload_between_steps, 2):
        assert found["losses"][False] == found["losses"][True]
        memory = found["memory"]
        if not place.ON_CPU:
            assert memory["before"] - memory["away"] >= 0.95 * 12 * found["shards"], found
            assert memory["back"] <= memory["before"] + (1 << 20), found
