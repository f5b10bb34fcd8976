# SPDX-License-Identifier: Apache-2.0
"""Promise H4: while valid, the secondary serves every gather.

With k micro-batches a step each unit crosses groups once, whatever k is, with and without activation checkpointing;
evaluation and generation after a step's first forward cross none (deepspeedai/DeepSpeed#4784, #4886).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.support import LIMITS, initialize, settings, train
from tests.harness import models
from tests.harness.pool import run_ranks


def counts(model: str, accum: int, limits: str, hpz: int) -> tuple[int, list[dict[str, int]], dict[str, int]]:
    """Units, what went over the wire in each of three steps, and in an evaluation after them."""
    engine = initialize(getattr(models, model)(), settings(hpz=hpz, accum=accum, zero=LIMITS[limits]))
    units = len(engine.optimizer_model.units)
    steps = []
    for step in range(3):
        engine.communication_stats(reset=True)
        train(engine, models.batch, [step], accum)
        steps.append(engine.communication_stats())
    evaluate(engine)
    engine.communication_stats(reset=True)
    evaluate(engine)
    stats = engine.communication_stats()
    engine.destroy()
    return units, steps, stats


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        for step in range(3):
            engine(*models.batch(step, dist.get_rank()))
    engine.train()


def many(cases: list[tuple[str, int, str, int]]) -> list[tuple[int, list[dict[str, int]], dict[str, int]]]:
    return [counts(*case) for case in cases]


MODELS = ("blocks", "blocks_reentrant", "blocks_non_reentrant")


def test_once_across_groups_whatever_the_accumulation() -> None:
    cases = [
        *itertools.product(MODELS, (1, 4), ("nothing stays",), (2,)),
        *(("blocks", 4, limits, 2) for limits in ("default", "no persistence", "no reuse")),
    ]
    for results in run_ranks(many, 4, cases, timeout=120):
        for case, (units, steps, after) in zip(cases, results, strict=True):
            for step in steps:
                assert step["gathers_across"] == units, case
                assert step["reductions"] == units * case[1], case
            assert after["gathers_across"] == after["gather_bytes_across"] == 0, case


def test_later_gathers_stay_inside() -> None:
    """With nothing kept gathered every unit is gathered 2k times, 2k - 1 of them inside; 3 a unit when recomputing."""
    cases = [("blocks", 2, "nothing stays", 2), ("blocks_non_reentrant", 1, "nothing stays", 2)]
    for results in run_ranks(many, 4, cases):
        (units, steps, after), (_, recomputed, _) = results
        for step in steps[1:]:
            assert step["gathers_inside"] == 3 * units
        assert after["gathers_inside"] == 3 * units
        for step in recomputed[1:]:
            assert units <= step["gathers_inside"] <= 2 * units


def test_bytes_are_those_received() -> None:
    """Across: three quarters of the padded weights. Inside: one half of them."""
    case = ("blocks", 1, "nothing stays", 2)
    for (results,) in run_ranks(many, 4, [case]):
        _, steps, _ = results
        padded = sum(-(-p.numel() // 4) * 4 * 4 for p in models.blocks().parameters())
        for step in steps[1:]:
            assert step["gather_bytes_across"] == padded * 3 // 4
            assert step["gather_bytes_inside"] == padded // 2
            assert step["reduce_bytes"] == padded * 3 // 4


def test_without_hpz_everything_crosses() -> None:
    for ((units, steps, after),) in run_ranks(many, 4, [("blocks", 1, "nothing stays", 1)]):
        for step in steps[1:]:
            assert step["gathers_across"] == 2 * units and step["gathers_inside"] == 0
        assert after["gathers_across"] == 3 * units


def test_one_group_allocates_nothing() -> None:
    """P = N: the secondary shards are the primary shards."""
    for allocated in run_ranks(secondaries_of_one_group, 4):
        assert allocated == (0, True)


def secondaries_of_one_group() -> tuple[int, bool]:
    engine = initialize(models.blocks(), settings(hpz=4))
    train(engine, models.batch, range(2), 1)
    units = engine.optimizer_model.units
    evaluate(engine)
    params = list(engine.module.parameters())
    same = all(p.ds_secondary_tensor.data_ptr() == p.ds_tensor.data_ptr() for p in params)
    return sum(t.numel() for unit in units for t in unit.secondaries), same
