# SPDX-License-Identifier: Apache-2.0
"""Promise: clients that take the hooks off for generation and put them back get what a run without that gives.

The names are those that TRL walks (cases 39, DS PR 8043).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks


def offload_of(engine: Any) -> Any:
    optimizer = engine.optimizer
    if optimizer is not None and hasattr(optimizer, "parameter_offload"):
        return optimizer.parameter_offload
    return optimizer


def remove_hooks(engine: Any) -> None:
    offload = offload_of(engine)
    for param in engine.module.parameters():
        param.ds_active_sub_modules.clear()
    for hook in offload.forward_hooks:
        hook.remove()
    for hook in offload.backward_hooks:
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def add_hooks(engine: Any) -> None:
    offload = offload_of(engine)
    coordinator = offload.param_coordinator
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    assert coordinator.is_invalid_trace()
    names = [name for name, _ in offload.module.ds_external_parameters()]
    assert names == []
    offload._register_deepspeed_module(offload.module)


def run(generate: bool, hpz: int, optimizer: bool) -> tuple[list[float], dict[str, Any], int]:
    engine = initialize(models.uneven(), settings(hpz=hpz), reference.sgd if optimizer else None)
    losses: list[float] = []
    rank = dist.get_rank()
    for step in range(3):
        if optimizer:
            losses += train(engine, models.batch, [step])[0]
        if generate:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                remove_hooks(engine)
                assert not any(m._forward_pre_hooks or m._forward_hooks for m in engine.module.modules())
                with torch.no_grad():
                    for other in range(4):
                        engine.module(*models.batch(other, rank))
                add_hooks(engine)
        with torch.no_grad():
            losses.append(engine(*models.batch(step + 9, rank)).item())
    return losses, full_params(engine.module), engine.communication_stats()["gathers_across"]


@pytest.mark.parametrize(("hpz", "optimizer"), [(1, True), (2, True), (2, False)])
def test_hooks_off_and_on(hpz: int, optimizer: bool) -> None:
    plain, generated = run_ranks(run, 4, False, hpz, optimizer), run_ranks(run, 4, True, hpz, optimizer)
    for (losses, params, _), (others, weights, _) in zip(plain, generated, strict=True):
        assert losses == others
        assert_tensors(params, weights, 0, 0)


def names() -> None:
    engine = initialize(models.uneven(), settings())
    offload = engine.optimizer.parameter_offload
    assert type(offload) is deepspeed.zero.DeepSpeedZeRoOffload and offload.module is engine.module
    assert isinstance(offload.forward_hooks, list) and isinstance(offload.backward_hooks, list)
    assert offload.forward_hooks and offload.backward_hooks
    assert not hasattr(engine.optimizer, "train") and not hasattr(engine.optimizer, "eval")
    inference = initialize(models.uneven(), settings(), None)
    assert type(inference.optimizer) is deepspeed.zero.DeepSpeedZeRoOffload
    with deepspeed.zero.unwrap_model_for_generation(engine) as module:
        assert module is engine.module and module.up.weight.numel()
    deepspeed.zero.register_external_parameter(engine.module.head, engine.module.embed.weight)
    with pytest.raises(RuntimeError):
        deepspeed.zero.register_external_parameter(engine.module.head, torch.ones(3))
    deepspeed.zero.register_external_parameter(engine.module, engine.module.embed.weight)
    assert [p is engine.module.embed.weight for _, p in engine.module.ds_external_parameters()] == [True]
    train(engine, models.batch, range(1))


def test_names() -> None:
    run_ranks(names, 2)
