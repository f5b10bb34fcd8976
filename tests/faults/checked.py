# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests of ``enable_sanity_checks`` do."""

from __future__ import annotations

from typing import Any

import torch

import deepspeed
from deepspeed.runtime.zero.core import wire
from tests.faults.numerics import logged
from tests.faults.scenarios import build, config, full_weights, idle, pair, rank, step
from tests.harness import models
from tests.harness.faults import watch


def _attempt(call: Any) -> list[str]:
    try:
        call()
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def losses(on: bool, zero: dict[str, Any]) -> Any:
    engine = build(models.blocks_non_reentrant(), config(enable_sanity_checks=on, **zero))
    return [[step(engine, number) for number in range(3)], full_weights(engine)]


def cost(on: bool) -> Any:
    """Exchanges of one step, and whether there is anything to ask."""
    engine = build(models.blocks(), config(enable_sanity_checks=on))
    step(engine, 0)
    with watch(wire, "exchange") as seen:
        step(engine, 1)
    return {"exchanges": seen.calls, "object": engine.optimizer_model.plan.groups.checks is not None}


def swap() -> Any:
    engine = build(pair(), config(enable_sanity_checks=True))
    engine.module.swap = rank() == 1
    error = _attempt(lambda: step(engine, 0))
    return {"error": error, "left": idle(engine)}


def damaged_secondary() -> Any:
    """One rank's secondary changes behind the version's back."""
    engine = build(models.blocks(), config(enable_sanity_checks=True, zero_hpz_partition_size=2))
    step(engine, 0)
    with torch.no_grad():
        engine(*models.batch(1, rank()))
    if rank() == 3:
        engine.optimizer.sharded.params["layers.1.up.weight"].secondary[1] += 1
    engine.empty_partition_cache()
    return _attempt(lambda: step(engine, 1))


def read_only() -> Any:
    outcomes = []
    for on in (True, False):
        engine = build(models.blocks(), config(enable_sanity_checks=on))
        weight = engine.module.head.weight

        def edit(weight: Any = weight) -> None:
            with deepspeed.zero.GatheredParameters(weight), torch.no_grad():
                weight.add_(1.0)

        outcomes.append(_attempt(edit))
        engine.destroy()
    return outcomes


def missing() -> Any:
    engine = build(models.conditional(), config(enable_sanity_checks=True))
    with logged() as lines:
        for number in range(2):
            step(engine, number, models.batch_by_rank)
    return lines
