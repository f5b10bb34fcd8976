# SPDX-License-Identifier: Apache-2.0
"""Promise: `offload_states` and `reload_states` work with any torch optimizer and change nothing (V14, case 72)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import ConfigError, UsageError
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks

Kinds = OffloadStateTypeEnum
INCLUDES: list[Any] = [
    None,
    [Kinds.optim_states],
    [Kinds.hp_params, Kinds.lp_grads, Kinds.contiguous_grad_buffer, Kinds.optim_states],
    [Kinds.lp_params],
    ["optim_states", "lp_params"],
]


def run(away: bool, dtype: str, optimizer: str, hpz: int) -> tuple[list[float], dict[str, Any]]:
    config = settings(hpz=hpz, **({"bf16": {"enabled": True}} if dtype == "bf16" else {}))
    engine = initialize(models.uneven(), config, getattr(reference, optimizer))
    losses: list[float] = []
    for step, include in enumerate(INCLUDES):
        losses += train(engine, models.batch, [step])[0]
        with torch.no_grad():
            engine(*models.batch(step + 50, dist.get_rank()))
        if not away:
            continue
        target = engine if step % 2 else engine.optimizer
        target.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False)
        target.offload_states(include=include)  # a second call skips what is there
        engine.empty_partition_cache()
        with pytest.raises(UsageError, match="reload_states"):
            engine.backward(engine(*models.batch(step, dist.get_rank())))
            engine.step()
        engine.optimizer.zero_grad()
        engine.reload_states(non_blocking=False)
        engine.reload_states()
    return losses, full_params(engine.module)


@pytest.mark.parametrize(("dtype", "optimizer", "hpz"), [("fp32", "sgd", 1), ("fp32", "adam", 2), ("bf16", "adamw", 2)])
def test_a_round_trip_changes_nothing(dtype: str, optimizer: str, hpz: int) -> None:
    for (wanted, weights), (losses, params) in zip(
        run_ranks(run, 4, False, dtype, optimizer, hpz), run_ranks(run, 4, True, dtype, optimizer, hpz), strict=True
    ):
        assert losses == wanted
        assert_tensors(params, weights, 0, 0)


def refusals() -> None:
    engine = initialize(models.uneven(), settings())
    engine.offload_states(device=OffloadDeviceEnum.none)
    train(engine, models.batch, range(1))
    with pytest.raises((ConfigError, ValueError)):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    engine.destroy()
    engine = initialize(models.uneven(), settings(), None)
    with pytest.raises(AssertionError):
        engine.offload_states()


def test_refusals() -> None:
    run_ranks(refusals, 2)
