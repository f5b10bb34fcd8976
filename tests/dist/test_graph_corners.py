# SPDX-License-Identifier: Apache-2.0
"""Promise: corners of autograd neither crash nor give other numbers than plain torch.

Gradient penalties (a backward through a backward), gradients of inputs through an engine that trains nothing, views of
weights that outlive a forward, outputs that are written in place, tiled backwards, an encoder-decoder whose layers hand
the same tensors on; and while all that runs, weights are released as soon as a module's backward is done.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist import plain, shapes
from tests.dist.support import LIMITS, assert_tensors, full_grads, initialize, settings
from tests.harness import models, reference
from tests.harness.pool import run_ranks

WIDTH = shapes.WIDTH


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([models.Block(WIDTH, 7) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).sum()


class InPlace(nn.Module):
    """What a layer returned is a view (``F.linear`` with a bias, three dimensions) and is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.second = nn.Linear(7, 2 * WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = nn.functional.relu(self.first(hidden), inplace=True)
        left, right = self.second(inner).tensor_split(2, -1)
        left = self.third(left * right)
        left[..., 0] = 0
        left += hidden
        return left.square().mean()


def written_in_place(hpz: int) -> None:
    engine = initialize(models.seeded(InPlace), settings(hpz=hpz, zero=LIMITS["nothing stays"]), reference.sgd)
    twin = models.seeded(InPlace)
    for step in range(2):
        data = shapes.hidden_batch(step, dist.get_rank()).view(1, -1, WIDTH)
        loss, wanted = engine(data), twin(data)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        engine.backward(loss)
        wanted.backward()
        grads = {}
        for name, param in twin.named_parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            grads[name] = param.grad / dist.get_world_size()
        assert_tensors(full_grads(engine.module), grads, 1e-5, 1e-7)
        engine.optimizer.zero_grad()
        twin.zero_grad()


def penalty(model: Any, backward: Any, step: int, rank: int) -> Tensor:
    hidden = shapes.hidden_batch(step, rank).requires_grad_(True)
    score = model(hidden)
    (slope,) = torch.autograd.grad(score, hidden, create_graph=True)
    loss = score + (slope.norm() - 1).square()
    backward(loss)
    return loss.detach()


def gradient_penalty(hpz: int) -> list[Tensor]:
    engine = initialize(models.seeded(Critic), settings(hpz=hpz, zero=LIMITS["nothing stays"]), reference.sgd)
    twin = models.seeded(Critic)
    optimizer = reference.sgd(twin.parameters())
    losses = []
    for step in range(3):
        losses.append(penalty(engine, engine.backward, step, dist.get_rank()))
        wanted = penalty(twin, lambda loss: loss.backward(), step, dist.get_rank())
        torch.testing.assert_close(losses[-1], wanted, rtol=1e-6, atol=1e-6)
        grads = {}
        for name, param in twin.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = grads[name] = grad / dist.get_world_size()
        assert_tensors(full_grads(engine.module), grads, 1e-5, 1e-6)
        engine.step()
        optimizer.step()
        twin.zero_grad()
    return losses


def input_gradients_without_training() -> None:
    """A frozen scorer steers an input."""
    module = models.seeded(Critic).requires_grad_(False)
    engine = initialize(module, settings(zero=LIMITS["nothing stays"]), None)
    twin = models.seeded(Critic)
    for step in range(2):
        mine, theirs = (shapes.hidden_batch(step, dist.get_rank()).requires_grad_(True) for _ in range(2))
        engine(mine).backward()
        twin(theirs).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        assert engine.optimizer_model.fetcher.ledger.live == 0


def views_that_stay() -> None:
    """What a module returned is readable after its weights were released and changed."""
    engine = initialize(models.seeded(lambda: shapes.Lender(True)), settings(hpz=2), reference.sgd)
    before = torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH)[1:6]
    with torch.no_grad():
        kept = engine.module.lend()
        engine(shapes.hidden_batch(0, 0))
    assert torch.equal(kept, before)
    used = engine.module.lend()
    engine.backward((used * 2).sum() + engine(shapes.hidden_batch(0, 0)))
    engine.step()
    assert torch.equal(kept, before) and torch.equal(used.detach(), before)
    grads = full_grads(engine.module)
    assert grads["lend.weight"] is not None and (grads["lend.weight"][1:6] != 0).any()


class Tiles(torch.autograd.Function):
    """A module run tile by tile, forward and backward, as tiled MLPs are; the gradient is ready at the last tile."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, hidden: Tensor, tiles: int, *weights: Tensor) -> Tensor:
        ctx.module, ctx.tiles = module, tiles
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return torch.cat([module(tile) for tile in hidden.chunk(tiles)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (hidden,) = ctx.saved_tensors
        params = list(ctx.module.parameters())
        pieces = []
        for index, (tile, part) in enumerate(zip(hidden.chunk(ctx.tiles), grad.chunk(ctx.tiles), strict=True)):
            for param in params:
                param.ds_grad_is_ready = index == ctx.tiles - 1
            tile = tile.detach().requires_grad_(True)
            with torch.enable_grad():
                out = ctx.module(tile)
            torch.autograd.backward(out, part)
            pieces.append(tile.grad)
        return (None, torch.cat(pieces), None, *[None] * len(params))


class Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mlp = models.Block(WIDTH, 7)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.last(Tiles.apply(self.mlp, self.first(hidden), 3)).square().mean()


class Decoder(nn.Module):
    """Every layer attends to the encoder's output and hands the first layer's bias on."""

    class Layer(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.mix, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.bias = nn.Linear(WIDTH, WIDTH) if first else None

        def forward(self, hidden: Tensor, memory: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if bias is None:
                assert self.bias is not None
                bias = self.bias(memory)
            return hidden + (self.mix(hidden) + self.cross(memory) + bias).tanh(), bias

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Decoder.Layer(index == 0) for index in range(6)])

    def forward(self, hidden: Tensor) -> Tensor:
        memory, bias = self.encode(hidden), None
        for layer in self.layers:
            hidden, bias = layer(hidden, memory, bias=bias)
        return hidden.square().mean()


PEAKS = {
    "decoder": (lambda: models.seeded(Decoder), shapes.one_hidden_loss),
    "frozen decoder": (lambda: half_frozen(models.seeded(Decoder)), shapes.one_hidden_loss),
    "tiled": (lambda: models.seeded(Tiled), shapes.one_hidden_loss),
    "deep": (lambda: models.seeded(lambda: models.Blocks(8)), shapes.one_loss),
    "deep, frozen": (lambda: models.seeded(lambda: models.Frozen(8)), shapes.one_loss),
    "deep, reentrant": (lambda: models.seeded(lambda: models.Blocks(8, recompute="reentrant")), shapes.one_loss),
    "deep, recomputed": (lambda: models.seeded(lambda: models.Frozen(8, "non-reentrant")), shapes.one_loss),
    "deep, two forwards": (lambda: models.seeded(lambda: models.Blocks(8)), shapes.two_forwards_one_backward),
}


def half_frozen(model: nn.Module) -> nn.Module:
    for index, param in enumerate(model.parameters()):
        param.requires_grad_(index % 2 == 0)
    return model


def peak_of(name: str) -> tuple[int, int, int, float]:
    """Most elements live in a step, the largest unit, what is live at the end, and the number of extra reductions."""
    build, step_fn = PEAKS[name]
    engine = initialize(build(), settings(zero=LIMITS["nothing stays"]), reference.sgd)
    ledger = engine.optimizer_model.fetcher.ledger
    for step in range(2):
        ledger.peak = 0
        engine.communication_stats(reset=True)
        step_fn(engine, engine.backward, step, dist.get_rank())
        engine.step()
    units = engine.optimizer_model.units
    trained = sum(bool(unit.trainable) for unit in units)
    result = ledger.peak, max(unit.numel for unit in units), ledger.live
    extra = engine.communication_stats()["reductions"] - trained
    engine.destroy()
    return *result, extra


def peaks() -> dict[str, tuple[int, int, int, float]]:
    return {name: peak_of(name) for name in PEAKS}


@pytest.mark.parametrize("hpz", [1, 2])
def test_gradient_penalty(hpz: int) -> None:
    run_ranks(gradient_penalty, 4, hpz)


@pytest.mark.parametrize("hpz", [1, 2])
def test_outputs_written_in_place(hpz: int) -> None:
    run_ranks(written_in_place, 4, hpz)


def test_input_gradients_without_training() -> None:
    run_ranks(input_gradients_without_training, 2)


def test_views_that_stay() -> None:
    run_ranks(views_that_stay, 4)


def test_weights_are_released_when_a_backward_leaves_them() -> None:
    for found in run_ranks(peaks, 2):
        for name, (peak, largest, live, extra) in found.items():
            assert live == 0 and extra == 0, name
            assert peak <= 2 * largest, f"{name}: {peak} elements live, the largest unit has {largest}"


def test_tiles_and_decoder_equal_plain_torch() -> None:
    for build in (Tiled, Decoder):
        wanted = plain.by_plain_torch(
            shapes.Shape(shapes.built(lambda build=build: Untiled(build)), shapes.one_hidden_loss), 2, 3
        )
        for rank, losses in enumerate(run_ranks(losses_of, 2, build)):
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(wanted[rank].losses).flatten(), rtol=1e-6, atol=1e-6
            )


class Untiled(nn.Module):
    """The same numbers without tiles."""

    def __init__(self, build: type[nn.Module]) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.inner
        if isinstance(inner, Tiled):
            return inner.last(inner.mlp(inner.first(hidden))).square().mean()
        return inner(hidden)


def losses_of(build: type[nn.Module]) -> list[float]:
    engine = initialize(models.seeded(build), settings(), reference.sgd)
    losses = []
    for step in range(3):
        (loss,) = shapes.one_hidden_loss(engine, engine.backward, step, dist.get_rank())
        engine.step()
        losses.append(loss.item())
    return losses
