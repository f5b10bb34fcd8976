# SPDX-License-Identifier: Apache-2.0
"""Promise: device memory is state, activations and the unit at work; gradients live until they are used; an engine that
was destroyed leaves nothing.

Bytes are those that torch's allocator hands out. "State" is what an engine holds at rest; activations are measured on
the same blocks in plain torch; what is above is counted in units (the weights of one block).
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu import place
from tests.gpu.train import Case, engine_of
from tests.harness import models

ROWS = 256
SLACK = 4 << 20


def _settle() -> int:
    gc.collect()
    place.synchronize()
    return place.allocated()


def _warm() -> None:
    """What libraries take once per process (cuBLAS workspaces) is there before anything is measured."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(256, 256, device=place.device(), dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()
    place.synchronize()


def _activations() -> int:
    """Bytes that forward and backward of the model take in plain torch, above weights and gradients of one block."""
    block = models.Block(place.WIDTH, 4 * place.WIDTH).to(place.device(), torch.bfloat16).requires_grad_(False)
    hidden = place.activations(0, 0, rows=ROWS).requires_grad_()
    before = _settle()
    torch.cuda.reset_peak_memory_stats()
    out = hidden
    for _ in range(place.DEPTH):
        out = block(out)
    out.float().pow(2).mean().backward()
    return torch.cuda.max_memory_allocated() - before


def _step(engine: Any, step: int) -> None:
    engine.backward(engine(place.activations(step, dist.get_rank(), rows=ROWS)))
    engine.step()


def _peak(case: Case) -> dict[str, float]:
    base = _settle()
    engine = engine_of(case)
    for step in range(3):
        _step(engine, step)
    state = _settle() - base
    torch.cuda.reset_peak_memory_stats()
    engine.optimizer.sharded.fetcher.ledger.peak = 0
    _step(engine, 3)
    place.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    sharded = engine.optimizer.sharded
    shards = sum(p.shard.numel() for p in sharded.params.values())
    unit = max(u.numel for u in sharded.fetcher.units)
    found = {
        "state": state,
        "state_per_param": state / shards,
        "peak": peak,
        "unit": 2 * unit,
        "live_units": sharded.fetcher.ledger.peak / unit,
    }
    engine.destroy()
    del engine, sharded
    found["left"] = _settle() - base
    return found


TIGHT = (
    ("overlap_comm", False),
    ("stage3_prefetch_bucket_size", 0),
    ("stage3_max_live_parameters", 0),
    ("stage3_max_reuse_distance", 0),
)


def _peaks() -> dict[str, Any]:
    _warm()
    found: dict[str, Any] = {"activations": _activations()}
    found["tight"] = _peak(Case(model="wide", dtype="bf16", clip=1.0, zero=TIGHT))
    found["overlap"] = _peak(Case(model="wide", dtype="bf16", clip=1.0, zero=(("stage3_max_reuse_distance", 0),)))
    return found


@place.cuda_only
@place.needs(2)
def test_the_peak_is_state_activations_and_the_unit_at_work() -> None:
    """Without overlap: one unit's weights, its gradients, and at most one unit more. Gathering ahead and reducing
    behind the backward keep three units more."""
    for rank, found in enumerate(place.launch(_peaks, 2)):
        for how, most, live in (("tight", 3.1, 1.2), ("overlap", 6.1, 3.2)):
            one = found[how]
            above = (one["peak"] - one["state"] - found["activations"] - SLACK) / one["unit"]
            if rank == 0:
                place.note(
                    f"memory, {how}: state {one['state'] >> 20} MiB ({one['state_per_param']:.1f} bytes a parameter), "
                    f"activations {found['activations'] >> 20} MiB, peak {one['peak'] >> 20} MiB, i.e. {above:.2f} "
                    f"units of {one['unit'] >> 20} MiB above; full weights at most {one['live_units']:.2f} units"
                )
            assert above <= most, (how, found)
            assert one["live_units"] <= live, (how, found)
            assert one["state_per_param"] <= 16.5, (how, found)
            assert one["left"] <= SLACK, (how, found)


def _lives() -> dict[str, Any]:
    """Five engines, one after the other; what each leaves, and whether gradients go when they should."""
    _warm()
    base, left, gone, problems = _settle(), [], [], []
    for build in range(5):
        engine = engine_of(Case(model="wide", dtype="bf16", clip=1.0, hpz=1 + build % 2))
        model, rank = engine.module, dist.get_rank()
        for step in range(2):
            loss = engine(place.activations(step, rank))
            if engine.optimizer.grad_shards.allocated:
                problems.append(f"build {build}: gradient shards of the last step are alive after a forward")
            engine.backward(loss)
            if any(param.grad is not None for param in model.parameters()):
                problems.append(f"build {build}: full gradients are alive after the backward")
            if engine.optimizer.sharded.fetcher.ledger.live:
                problems.append(f"build {build}: full weights are alive after the backward")
            engine.step()
        watched = [weakref.ref(engine), weakref.ref(engine.optimizer)]
        engine.destroy()
        del engine, model, loss
        left.append(_settle() - base)
        gone.append([ref() is None for ref in watched])
    return {"left": left, "gone": gone, "problems": problems}


@place.needs(2)
def test_five_engines_in_a_process_leave_nothing() -> None:
    for found in place.launch(_lives, 2):
        assert not found["problems"], found["problems"]
        assert all(all(refs) for refs in found["gone"]), f"engine or optimizer is still referenced: {found['gone']}"
        assert max(found["left"]) <= SLACK, found["left"]
        assert found["left"][-1] <= found["left"][0] + (1 << 20), f"memory grows: {found['left']}"
