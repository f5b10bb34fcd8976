# SPDX-License-Identifier: Apache-2.0
"""Promise: `copy.deepcopy` of a partitioned model is a partitioned model of its own (reference models, EMA).

It has its own shards and none of the original's hooks, nothing is sent for it, and it serves another engine.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.core import wire
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.faults import watch
from tests.harness.pool import run_ranks


def hooks(module: nn.Module) -> list[Any]:
    """Everything that torch calls around the forward of a module or of one inside it."""
    return [
        hook
        for child in module.modules()
        for name, value in child.__dict__.items()
        if "forward" in name and "hooks" in name
        for hook in value.values()
    ]


def twin_of(module: nn.Module) -> nn.Module:
    with ExitStack() as stack:
        sent = [
            stack.enter_context(watch(wire, what)) for what in ("gather", "broadcast", "exchange", "reduce_scatter")
        ]
        twin = copy.deepcopy(module)
    assert [seen.log for seen in sent] == [[]] * 4
    theirs = {p.ds_id for p in module.parameters()}
    assert len(theirs) == len(list(twin.parameters())) and theirs.isdisjoint(p.ds_id for p in twin.parameters())
    assert {name: tuple(p.ds_shape) for name, p in twin.named_parameters()} == {
        name: tuple(p.ds_shape) for name, p in module.named_parameters()
    }
    return twin


def reference_model(hpz: int) -> tuple[list[float], list[float]]:
    """Copied after `zero.Init`, frozen, an engine of its own without an optimizer, beside the one that is trained."""
    config = settings(hpz=hpz)
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = models.tied()
    frozen = twin_of(module).eval().requires_grad_(False)
    assert frozen.head.weight is frozen.embed.weight and all(p.requires_grad for p in module.parameters())
    engine = initialize(module, config, reference.adam)
    other = deepspeed.initialize(model=frozen, config=config)[0]
    batch = models.batch(9, dist.get_rank())
    before = full_params(frozen)
    seen = []
    for step in range(3):
        with torch.no_grad():
            seen.append(float(other(*batch)))
        train(engine, models.batch, [step])
    assert_tensors(full_params(frozen), before, 0, 0)
    return seen, train(engine, models.batch, range(3, 4))[0]


def average(zero: dict[str, Any], world: int) -> None:
    """Copied from a model that is being trained, more than once, and trained on as an engine of its own."""
    engine = initialize(models.uneven(), settings(zero=zero), reference.adam)
    module = engine.module
    module.up.weight.tag = ["kept"]
    heard: list[str] = []
    module.up.register_forward_hook(lambda *_: heard.append("up"))
    plain = hooks(models.uneven())
    for step in range(2):
        train(engine, models.batch, [step])
        now = full_params(module)
        with torch.no_grad():
            engine(*models.batch(9, 0))  # may leave weights gathered
        twin = twin_of(module)
        assert twin.up.weight.tag == ["kept"] and twin.up.weight.tag is not module.up.weight.tag
        assert len(hooks(twin)) == len(plain) + 1, "the hook of the user, and nothing of the engine"
        train(engine, models.batch, [5])
        assert_tensors(full_params(twin), now, 0, 0)
        assert_tensors(full_params(copy.deepcopy(twin)), now, 0, 0)
        second = initialize(twin, settings(zero=zero), reference.sgd)
        copied = models.uneven()
        copied.load_state_dict(now)
        wanted = reference.train(lambda c=copied: c, models.batch, 2, world, optimizer_fn=reference.sgd)  # type: ignore[misc]
        heard.clear()
        losses, _ = train(second, models.batch, range(2))
        assert heard == ["up"] * 2
        assert losses == pytest.approx([step[dist.get_rank()] for step in wanted.losses], rel=1e-6)
        assert_tensors(full_params(twin), wanted.params, 1e-6, 1e-7)
    train(engine, models.batch, [6])


def half(offload: bool) -> None:
    """In bf16, with the shards on the host."""
    zero = {"offload_param": {"device": "cpu"}} if offload else {}
    config = {**settings(zero=zero), "bf16": {"enabled": True}}
    engine = initialize(models.uneven(), config)
    train(engine, models.batch, range(2))
    now, twin = full_params(engine.module), twin_of(engine.module)
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    train(engine, models.batch, range(2))
    assert_tensors(full_params(twin), now, 0, 0)


def gathered() -> None:
    """Inside a block that shows the weights the copy is a plain model with these (PEFT's modules to save)."""
    engine = initialize(models.uneven(), settings(zero={"stage3_param_persistence_threshold": 40}))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
    assert not any(hasattr(p, "ds_id") for p in twin.parameters()) and hooks(twin) == hooks(models.uneven())
    plain, batch = models.uneven(), models.batch(3, dist.get_rank())
    assert twin(*batch).item() == plain(*batch).item()


@pytest.mark.parametrize(("world", "hpz"), [(1, 1), (4, 1), (4, 2)])
def test_a_reference_model_stays_what_it_was(world: int, hpz: int) -> None:
    wanted = reference.train(models.tied, models.batch, 4, world, optimizer_fn=reference.adam)
    for rank, (seen, last) in enumerate(run_ranks(reference_model, world, hpz)):
        assert seen == pytest.approx([models.tied()(*models.batch(9, rank)).item()] * 3, rel=1e-6)
        assert len(set(seen)) == 1
        assert last == pytest.approx([wanted.losses[3][rank]], rel=1e-5)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("persistent", [0, 40])
def test_a_copy_in_mid_training_has_the_weights_of_that_step(world: int, persistent: int) -> None:
    run_ranks(average, world, {"stage3_param_persistence_threshold": persistent}, world)


@pytest.mark.parametrize("offload", [False, True])
def test_in_half_precision(offload: bool) -> None:
    run_ranks(half, 2, offload)


def test_inside_a_block_the_copy_is_plain() -> None:
    run_ranks(gathered, 2)
