# SPDX-License-Identifier: Apache-2.0
"""Promise: after a backward no weights stay gathered, whatever activation checkpointing wraps; and it is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dist.support import assert_tensors, full_params, initialize, settings
from tests.harness import models, reference
from tests.harness.pool import run_ranks

Wrapped = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    def __init__(self, reentrant: bool, what: str) -> None:
        super().__init__()
        self.reentrant, self.what = reentrant, what
        self.first, self.blocks, self.head = nn.Linear(5, 5), nn.ModuleList(Block() for _ in range(3)), nn.Linear(5, 3)

    def wrapped(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x, (one, two, three) = self.first(x), self.blocks
        if self.what == "blocks":
            for block in self.blocks:
                x = self.wrapped(block, x)
        elif self.what == "two blocks":
            x = three(self.wrapped(lambda y: two(one(y)), x))
        elif self.what == "inner modules":
            for block in self.blocks:
                x = x + block.b(self.wrapped(block.a, x))
        elif self.what == "nested":
            x = three(self.wrapped(lambda y: self.wrapped(two, self.wrapped(one, y)), x))
        elif self.what == "weights alone":
            for block in self.blocks:
                x = self.wrapped(lambda y, b=block: y @ b.a.weight.t() @ b.b.weight.t() + b.a.bias.sum() + b.b.bias, x)
        elif self.what == "everything":
            return self.wrapped(lambda y: self.head(three(two(one(y)))), x).pow(2).mean()
        return self.head(x).pow(2).mean()  # type: ignore[no-any-return]


def batch(step: int, rank: int, micro: int = 0) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(3, 5, generator=generator),)


def trained(reentrant: bool, what: str, hpz: int) -> list[float]:
    engine = initialize(models.seeded(lambda: Model(reentrant, what)), settings(hpz=hpz), reference.sgd)
    losses = []
    for step in range(3):
        loss = engine(*batch(step, dist.get_rank()))
        engine.backward(loss)
        assert [name for name, p in engine.module.named_parameters() if p.numel()] == []
        engine.step()
        losses.append(loss.item())
    plain = reference.train(
        lambda: models.seeded(lambda: Model(reentrant, what)), batch, 3, dist.get_world_size(),
        optimizer_fn=reference.sgd,
    )  # fmt: skip
    assert_tensors(full_params(engine.module), plain.params, 1e-6, 1e-7)
    assert losses == pytest.approx([step[dist.get_rank()] for step in plain.losses], rel=1e-6)
    return losses


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("what", ["blocks", "two blocks", "inner modules", "nested", "weights alone", "everything"])
def test_checkpointed(what: str, reentrant: bool) -> None:
    run_ranks(trained, 2, reentrant, what, 1)
    run_ranks(trained, 4, reentrant, what, 2)
