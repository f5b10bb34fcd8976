# SPDX-License-Identifier: Apache-2.0
"""Promise H7: edges. Sizes that divide by nothing, parameters smaller than a group, empty ones, frozen and trainable
mixed, tied weights, an integer parameter, persistent parameters, P = N, P = 1, and sizes that do not divide the world
(deepspeedai/DeepSpeed#6659, #5642, cases 11, V6, 82).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import ConfigError
from deepspeed.runtime.zero.core import layout
from deepspeed.runtime.zero.core.ranks import hpz_groups
from tests.dist.support import assert_close, assert_tensors, full_params, initialize, settings
from tests.harness import models, reference
from tests.harness.pool import run_ranks


class Tiny(nn.Module):
    """Parameters of 0, 1, 2, 3, 5, 7 and 33 elements; some frozen, one of integers, one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.loose = nn.ParameterList(
            [nn.Parameter(torch.linspace(0.1, 1.0, n)) if n else nn.Parameter(torch.empty(0)) for n in (0, 1, 2, 3, 5)]
        )
        self.a = nn.Linear(11, 3)
        self.b = nn.Linear(3, 7, bias=False)
        self.c = nn.Linear(3, 7)
        self.c.weight = self.b.weight
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.b.weight.requires_grad_(True)
        self.a.bias.requires_grad_(False)
        self.loose[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        out = self.b(hidden) + self.c(hidden.tanh()) * self.table.to(x.dtype)
        return out.square().mean() + sum(p.square().sum() for p in self.loose)


def tiny() -> nn.Module:
    return models.seeded(Tiny)


def data(step: int, rank: int, micro: int = 0) -> tuple[Tensor]:
    return (torch.randn(2, 11, generator=torch.Generator().manual_seed(100 * step + rank)),)


def run(hpz: int, threshold: int, under_init: bool) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    config = settings(hpz=hpz, zero={"stage3_param_persistence_threshold": threshold})
    if under_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = tiny()
    else:
        model = tiny()
    engine = initialize(model, config, reference.sgd)
    losses = []
    for step in range(4):
        loss = engine(*data(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        for p in engine.module.parameters():
            padding = p.ds_tensor.numel() * 4 - p.ds_numel
            assert 0 <= padding < 4 and p.padding_size() == padding
    full = full_params(engine.module)
    shards = [p.ds_tensor.clone() for p in engine.module.parameters()]
    secondaries = [p.ds_secondary_tensor for p in engine.module.parameters()]
    with torch.no_grad():
        engine(*data(9, dist.get_rank()))
    for p in engine.module.parameters():
        secondary = p.ds_secondary_tensor
        if hpz == 2 and secondary is not None:
            assert secondary.numel() == p.ds_tensor.numel() * 2
            rank, size = dist.get_rank() % 2, secondary.numel()
            truth = torch.zeros(size * 2, dtype=p.dtype)
            truth[: p.ds_numel] = full[next(n for n, q in engine.module.named_parameters() if q is p)].flatten()
            assert torch.equal(secondary, truth[rank * size : (rank + 1) * size]), "padding must read as zero"
    engine.destroy()
    return losses, full, [shards, secondaries]


CASES = [
    (hpz, threshold, init) for threshold, init in itertools.product((0, 4, 100000), (False, True)) for hpz in (1, 2, 4)
]


def run_all() -> list[tuple[list[float], dict[str, Tensor]]]:
    return [run(*case)[:2] for case in CASES]


def test_every_edge_trains_like_plain_torch() -> None:
    wanted = reference.train(tiny_float, data, 4, 4, optimizer_fn=reference.sgd)
    for rank, results in enumerate(run_ranks(run_all, 4, timeout=120)):
        for position, ((hpz, _, _), (losses, params)) in enumerate(zip(CASES, results, strict=True)):
            if hpz == 1:
                assert_close(losses, [step[rank] for step in wanted.losses], 1e-6)
                assert_tensors(without_table(params), without_table(wanted.params))
            else:
                plain_losses, plain = results[position - 1]
                assert losses == plain_losses
                assert_tensors(params, plain, 0, 0)
            assert torch.equal(params["table"], torch.arange(7))


def tiny_float() -> nn.Module:
    """The reference casts every parameter: its integers come as floats."""
    return tiny()


def without_table(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p for name, p in params.items() if name != "table"}


@pytest.mark.parametrize(("world", "partition"), [(64, 16), (64, 1), (64, 64), (2048, 16), (6, 2), (6, 3)])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 13, 32, 33, 2305])
def test_shard_arithmetic_for_any_world(world: int, partition: int, numel: int) -> None:
    """Every element is in exactly one shard, for primaries and for the secondaries of one group; nothing is past the
    end."""
    shard = layout.shard_numel(numel, world)
    spans = [layout.valid_span(numel, shard, rank) for rank in range(world)]
    assert [i for start, end in spans for i in range(start, end)] == list(range(numel))
    secondary = layout.secondary_numel(numel, world, partition)
    assert secondary * partition == layout.padded_numel(numel, world) >= numel
    inside = [layout.valid_span(numel, secondary, rank) for rank in range(partition)]
    assert [i for start, end in inside for i in range(start, end)] == list(range(numel))


def test_groups_are_consecutive_ranks() -> None:
    assert hpz_groups(6, 2) == [[0, 1], [2, 3], [4, 5]]
    assert hpz_groups(4, 4) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError):
        hpz_groups(4, 3)


def refused(partition: int) -> str:
    with pytest.raises(ConfigError) as caught:
        initialize(models.uneven(), settings(hpz=partition))
    with pytest.raises(ConfigError):
        deepspeed.zero.Init(config_dict_or_path=settings(hpz=partition))
    return str(caught.value)


@pytest.mark.parametrize("partition", [3, 8])
def test_sizes_that_do_not_fit_are_refused_by_name(partition: int) -> None:
    for text in run_ranks(refused, 4, partition):
        assert "zero_hpz_partition_size" in text and str(partition) in text and "4" in text and "1, 2, 4" in text
