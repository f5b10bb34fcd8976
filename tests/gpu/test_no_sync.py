# SPDX-License-Identifier: Apache-2.0
"""Promise: a bf16 step, clipping included, never makes the host wait for the device.

Two proofs: torch's own sync detector, set to raise; and a device kept busy for seconds, which must still be busy after
the host has returned from forward, backward and step.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import place
from tests.gpu.train import Case, engine_of

pytestmark = place.cuda_only
BUSY = 1.5  # seconds
CASES = [
    Case(model="blocks", dtype="bf16", clip=0.5),
    Case(model="blocks", dtype="bf16", clip=0.5, limits="default"),
    Case(model="blocks_non_reentrant", dtype="bf16", clip=0.5, accum=2),
    Case(model="blocks_non_reentrant", dtype="bf16", clip=0.5, accum=2, limits="no reuse"),
]


def _step(engine: Any, data: list[Any]) -> None:
    for batch in data:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()


def _who_waits(engine: Any, data: list[Any]) -> list[str]:
    """Every place of this package (or of whoever it called) that torch's detector warns about."""
    found: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack()[:-2] if "deepspeed" in f.filename or "torch" in f.filename]
            found.append(" < ".join(f"{f.filename.split('/')[-1]}:{f.lineno} {f.name}" for f in reversed(frames[-5:])))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _step(engine, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _watch(cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        engine = engine_of(case)
        rank = dist.get_rank()
        data = [[place.batches()(step, rank, micro) for micro in range(case.accum)] for step in range(8)]
        for step in range(4):
            _step(engine, data[step])
        place.synchronize()
        waits = _who_waits(engine, data[4])
        place.synchronize()
        error = ""
        torch.cuda.set_sync_debug_mode("error")
        try:
            _step(engine, data[5])
        except RuntimeError:
            error = traceback.format_exc()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        place.synchronize()
        still_busy = None
        if not error:
            begun = torch.cuda.Event()
            place.pause(BUSY)
            begun.record()
            _step(engine, data[6])
            still_busy = not begun.query()
        place.synchronize()
        results.append({"waits": waits, "error": error, "still_busy": still_busy})
        engine.destroy()
    return results


@pytest.mark.parametrize("world", place.worlds(1, 2))
def test_a_step_waits_for_nothing(world: int) -> None:
    by_rank = place.launch(_watch, world, CASES)
    problems = []
    for rank, results in enumerate(by_rank):
        for case, result in zip(CASES, results, strict=True):
            for wait in result["waits"]:
                place.note(f"world {world} rank {rank} {case.model}/{case.limits} waits: {wait}")
            if result["error"] or result["waits"] or not result["still_busy"]:
                problems.append(f"rank {rank} {case}: device still busy {result['still_busy']}\n{result['error']}")
    assert not problems, "\n".join(problems)
