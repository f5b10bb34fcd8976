# SPDX-License-Identifier: Apache-2.0
"""Promise: engines can be built and destroyed many times in a process; nothing of them stays alive.

Also: the same module can be given to a new engine, and several engines train side by side.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import UsageError
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks


def build_and_forget(hpz: int) -> tuple[list[list[float]], int, int]:
    """Five engines one after the other; how many of their parts are alive at the end."""
    watched: list[weakref.ref[Any]] = []
    losses = []
    with deepspeed.zero.Init(config_dict_or_path=settings(hpz=hpz)):
        pass
    for number in range(5):
        engine = initialize(models.uneven(), settings(hpz=hpz), [reference.sgd, reference.adam][number % 2])
        losses.append(train(engine, models.batch, range(2))[0])
        with torch.no_grad():
            engine(*models.batch(7, dist.get_rank()))
        watched += [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.optimizer)]
        watched += [weakref.ref(engine.optimizer.optimizer), weakref.ref(engine.optimizer_model)]
        watched += [weakref.ref(p) for p in engine.module.parameters()]
        watched += [weakref.ref(flat) for flat in engine.optimizer.fp32_partitioned_groups_flat]
        engine.destroy()
        engine.destroy()
        del engine
    gc.collect()
    return losses, sum(ref() is not None for ref in watched), len(watched)


@pytest.mark.parametrize(("world", "hpz"), [(1, 1), (4, 2)])
def test_nothing_stays_alive(world: int, hpz: int) -> None:
    for losses, alive, watched in run_ranks(build_and_forget, world, hpz):
        assert watched > 50 and alive == 0
        assert losses[0] == losses[2] == losses[4] and losses[1] == losses[3]


def rebuilt(hpz: int) -> list[float]:
    """The same module in a second engine: hooks of the first are gone, weights go on."""
    engine = initialize(models.uneven(), settings(hpz=hpz), reference.sgd)
    losses = train(engine, models.batch, range(2))[0]
    module, masters = engine.module, [weakref.ref(flat) for flat in engine.optimizer.fp32_partitioned_groups_flat]
    before = full_params(module)
    engine.destroy()
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    del engine
    gc.collect()
    assert_tensors(full_params(module), before, 0, 0)
    engine = initialize(module, settings(hpz=hpz), reference.sgd)
    gc.collect()
    assert all(ref() is None for ref in masters), "the first engine's masters are alive"
    losses += train(engine, models.batch, range(2, 4))[0]
    engine.destroy()
    return losses


def test_a_module_in_a_second_engine() -> None:
    wanted = reference.train(models.uneven, models.batch, 4, 4, optimizer_fn=reference.sgd)
    for rank, losses in enumerate(run_ranks(rebuilt, 4, 2)):
        assert losses == pytest.approx([step[rank] for step in wanted.losses], rel=1e-6)


def succeeded(hpz: int, wrapped: bool) -> list[float]:
    """The same module in a second and a third engine while the first is alive, as clients leave it."""
    first = initialize(models.uneven(), settings(hpz=hpz), reference.sgd)
    losses = train(first, models.batch, range(2))[0]
    rank = dist.get_rank()
    with torch.no_grad():
        before = first(*models.batch(9, rank)).item()
    frozen = initialize(first.module, settings(hpz=hpz), None)
    with torch.no_grad():
        assert frozen(*models.batch(9, rank)).item() == first(*models.batch(9, rank)).item() == before
    last = initialize(Wrapper(first.module) if wrapped else first.module, settings(hpz=hpz), reference.sgd)
    losses += train(last, models.batch, range(2, 4))[0]
    for call in (lambda: first.backward(first(*models.batch(4, rank))), first.step):
        with pytest.raises(UsageError, match="whose module was given to another deepspeed.initialize since"):
            call()
    with torch.no_grad():
        assert frozen(*models.batch(9, rank)).item() == last(*models.batch(9, rank)).item() != before
    frozen.destroy()
    first.destroy()
    losses += train(last, models.batch, range(4, 6))[0]
    last.destroy()
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in last.module.modules())
    return losses


class Wrapper(torch.nn.Module):
    """Adapters and trainers put a model into another one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Any) -> Any:
        return self.inner(*batch)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("hpz", [1, 2])
def test_the_latest_engine_of_a_module_takes_over(hpz: int, wrapped: bool) -> None:
    wanted = reference.train(models.uneven, models.batch, 6, 4, optimizer_fn=reference.sgd)
    for rank, losses in enumerate(run_ranks(succeeded, 4, hpz, wrapped)):
        assert losses == pytest.approx([step[rank] for step in wanted.losses], rel=1e-6)


def side_by_side(hpz: int) -> tuple[list[float], list[float], list[float]]:
    """Policy, reference without optimizer, reward: forwards and backwards interleaved (case 22)."""
    config = settings(hpz=hpz)
    policy = initialize(models.uneven(), config, reference.sgd)
    frozen = initialize(models.uneven(), config, None)
    reward = initialize(models.blocks(), config, reference.sgd)
    rank = dist.get_rank()
    seen: tuple[list[float], list[float], list[float]] = ([], [], [])
    for step in range(3):
        data = models.batch(step, rank)
        first = policy(*data)
        with torch.no_grad():
            seen[1].append(frozen(*data).item())
        second = reward(*data)
        reward.backward(second)
        with torch.no_grad():
            frozen(*data)
        policy.backward(first)
        policy.step()
        reward.step()
        seen[0].append(first.item())
        seen[2].append(second.item())
    for engine in (policy, frozen, reward):
        engine.destroy()
    return seen


def joined(hpz: int) -> list[float]:
    """One loss over two engines, one backward: both get their gradients."""
    config = settings(hpz=hpz)
    first, second = (
        initialize(models.uneven(), config, reference.sgd),
        initialize(models.blocks(), config, reference.sgd),
    )
    losses = []
    for step in range(3):
        data = models.batch(step, dist.get_rank())
        loss = first(*data) + second(*data)
        loss.backward()
        first.step()
        second.step()
        losses.append(loss.item())
    return losses


def test_engines_side_by_side() -> None:
    policy = reference.train(models.uneven, models.batch, 3, 4, optimizer_fn=reference.sgd)
    reward = reference.train(models.blocks, models.batch, 3, 4, optimizer_fn=reference.sgd)
    for hpz in (1, 2):
        for rank, seen in enumerate(run_ranks(side_by_side, 4, hpz)):
            assert seen[0] == pytest.approx([step[rank] for step in policy.losses], rel=1e-6)
            assert seen[2] == pytest.approx([step[rank] for step in reward.losses], rel=1e-6)
            plain = models.uneven()
            assert seen[1] == pytest.approx([plain(*models.batch(s, rank)).item() for s in range(3)], rel=1e-6)
    for rank, losses in enumerate(run_ranks(joined, 4, 2)):
        both = [a[rank] + b[rank] for a, b in zip(policy.losses, reward.losses, strict=True)]
        assert losses == pytest.approx(both, rel=1e-6)
