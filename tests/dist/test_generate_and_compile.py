# SPDX-License-Identifier: Apache-2.0
"""Promise: generation-like loops and compiled units give what plain torch gives; limits on live weights hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.errors import UsageError
from tests.dist.support import LIMITS, assert_close, assert_tensors, expected, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks


class Talker(nn.Module):
    """Gives logits, and grows a sequence by its own forward (a root method that is no forward)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.Blocks()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body.embed(tokens)
        for layer in self.body.layers:
            hidden = layer(hidden)
        return self.body.head(self.body.norm(hidden))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def talk(hpz: int, limits: str) -> tuple[Tensor, Tensor, int, dict[str, int]]:
    engine = initialize(models.seeded(Talker), settings(hpz=hpz, zero=LIMITS[limits]), reference.sgd)
    start = models.batch(0, 3)[0]
    first = engine.module.generate(start, 6)
    logits = engine(start)
    engine.backward(logits.square().mean())
    engine.step()
    engine.module.generate(start, 1)
    engine.communication_stats(reset=True)
    second = engine.generate(start, 6)
    return first, second, engine.optimizer_model.fetcher.ledger.live, engine.communication_stats()


def plain_talk() -> tuple[Tensor, Tensor]:
    model = models.seeded(Talker)
    optimizer = reference.sgd(model.parameters())
    start = models.batch(0, 3)[0]
    first = model.generate(start, 6)
    model(start).square().mean().backward()
    optimizer.step()
    return first, model.generate(start, 6)


@pytest.mark.parametrize("limits", ["no persistence", "nothing stays", "default"])
def test_generation(limits: str) -> None:
    first, second = plain_talk()
    for got_first, got_second, live, stats in run_ranks(talk, 4, 2, limits):
        assert torch.equal(got_first, first) and torch.equal(got_second, second)
        assert stats["gathers_across"] == 0
        if limits == "nothing stays":
            assert live == 0 and stats["gathers_inside"] > 0
        else:
            assert stats["gathers_inside"] == 0, "weights stay within stage3_max_live_parameters"


def peaks(limit: int) -> tuple[int, int, int, list[float]]:
    """Largest number of live elements over training steps and evaluations, and the largest unit."""
    engine = initialize(
        models.blocks(), settings(zero={"stage3_max_live_parameters": limit, "stage3_prefetch_bucket_size": 1 << 20})
    )
    ledger = engine.optimizer_model.fetcher.ledger
    losses = []
    for step in range(3):
        losses += train(engine, models.batch, [step])[0]
        with torch.no_grad():
            engine(*models.batch(step, dist.get_rank()))
    engine.empty_partition_cache()
    largest = max(unit.numel for unit in engine.optimizer_model.units)
    return ledger.peak, ledger.live, largest, losses


def test_live_weights_stay_within_the_limit() -> None:
    """The limit is exceeded by no more than what one unit needs (case 70)."""
    wanted = None
    for limit in (0, 600, 10**9):
        for peak, live, largest, losses in run_ranks(peaks, 2, limit):
            assert live == 0
            assert peak <= max(limit, 0) + 2 * largest
            wanted = wanted or losses
        if limit == 0:
            assert peak <= 2 * largest


def compiled(model: str, backend: str, hpz: int) -> tuple[list[float], dict[str, Any]]:
    torch._dynamo.reset()
    engine = initialize(getattr(models, model)(), settings(hpz=hpz), reference.sgd)
    engine.compile(backend=backend, compile_kwargs={})
    assert engine.is_compiled
    losses, _ = train(engine, models.batch, range(3))
    with torch.no_grad():
        losses.append(engine(*models.batch(9, dist.get_rank())).item())
    params = full_params(engine.module)
    engine.destroy()
    return losses, params


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_units(backend: str) -> None:
    """Case 78."""
    for model in ("blocks", "frozen") if backend == "aot_eager" else ("blocks",):
        wanted = expected(model, "batch", 3, 2, 1, 0.0, "sgd")
        for rank, (losses, params) in enumerate(run_ranks(compiled, 2, model, backend, 1, timeout=240)):
            assert_close(losses[:3], [step[rank] for step in wanted.losses], 1e-6)
            assert_tensors(params, wanted.params)


def compiled_before(hpz: int) -> list[float]:
    """Blocks that `torch.compile` replaced before the model was sharded."""
    torch._dynamo.reset()
    model = models.blocks()
    for position, layer in enumerate(model.layers):
        model.layers[position] = torch.compile(layer, backend="eager")
    engine = initialize(model, settings(hpz=hpz, zero=LIMITS["no persistence"]), reference.sgd)
    losses, _ = train(engine, models.batch, range(3))
    engine.destroy()
    return losses


@pytest.mark.parametrize("hpz", [1, 2])
def test_blocks_compiled_before_they_are_sharded(hpz: int) -> None:
    wanted = expected("blocks", "batch", 3, 2 * hpz, 1, 0.0, "sgd")
    for rank, losses in enumerate(run_ranks(compiled_before, 2 * hpz, hpz, timeout=240)):
        assert_close(losses, [step[rank] for step in wanted.losses], 1e-6)


def compiled_whole(how: str) -> str:
    torch._dynamo.reset()
    model = models.blocks()
    try:
        if how == "before":
            initialize(torch.compile(model, backend="eager"), settings(), reference.sgd)
        engine = initialize(model, settings(zero=LIMITS["no persistence"]), reference.sgd)
        if how == "after":
            engine.module = torch.compile(engine.module, backend="eager")
        else:
            model.layers[0].compile(backend="eager")
        train(engine, models.batch, range(1))
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_a_graph_around_hooks_is_refused_by_name(how: str) -> None:
    for said in run_ranks(compiled_whole, 2, how, timeout=240):
        assert "engine.compile(backend=...)" in said
