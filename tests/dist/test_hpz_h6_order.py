# SPDX-License-Identifier: Apache-2.0
"""Promise H6: the copy into the secondary is complete before a gather reads it, under any injected delay.

Delays sit before every gather, before every wait and before every copy, on one rank or another
(deepspeedai/DeepSpeed#5059: NaN or zero loss). The runs agree to the last bit.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from deepspeed.runtime.zero.core import fetch, wire
from deepspeed.runtime.zero.core.unit import ShardedUnit
from tests.dist.support import LIMITS, assert_tensors, full_params, initialize, settings, train
from tests.harness import models
from tests.harness.faults import delay, watch
from tests.harness.pool import run_ranks

PLACES: dict[str, tuple[Any, str]] = {
    "before gathers": (wire, "gather"),
    "before waits": (fetch, "finish_gather"),
    "before copies": (ShardedUnit, "refresh_secondaries"),
    "before reductions": (wire, "reduce_scatter"),
}


def delayed(where: str | None, slow_rank: int) -> tuple[list[float], dict[str, Any], int]:
    engine = initialize(models.blocks(), settings(hpz=2, accum=2, zero=LIMITS["nothing stays"]))
    with contextlib.ExitStack() as stack:
        if where is not None and dist.get_rank() == slow_rank:
            owner, name = PLACES[where]
            stack.enter_context(watch(owner, name, delay(0.003)))
        losses, _ = train(engine, models.batch, range(3), 2)
    inside = engine.communication_stats()["gathers_inside"]
    result = losses, full_params(engine.module), inside
    engine.destroy()
    return result


def test_delays_change_nothing() -> None:
    wanted = run_ranks(delayed, 4, None, 0)
    for number, where in enumerate(PLACES):
        for got, expected in zip(run_ranks(delayed, 4, where, number % 4), wanted, strict=True):
            assert got[0] == expected[0], where
            assert_tensors(got[1], expected[1], 0, 0)
            assert got[2] == expected[2] > 0
