# SPDX-License-Identifier: Apache-2.0
"""Promise: leaf modules are marked by class, name or suffix, and are one unit each."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed.utils as ds
from deepspeed.runtime.zero.core import partition
from tests.dist.support import LIMITS, assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks


def test_marking_by_class() -> None:
    model = models.blocks()
    marked = ds.set_z3_leaf_modules(model, [models.Block])
    assert marked == list(model.layers) == ds.get_z3_leaf_modules(model)
    assert all(ds.z3_leaf_module(layer) for layer in model.layers) and not ds.z3_leaf_module(model)
    assert ds.unset_z3_leaf_modules(model, ["Block"]) == list(model.layers)
    assert ds.get_z3_leaf_modules(model) == []
    assert ds.set_z3_leaf_modules(model, ["tests.harness.models.Block"]) == list(model.layers)
    ds.unset_z3_leaf_modules(model, [models.Block])
    assert len(ds.set_z3_leaf_modules(model, ["Linear", nn.LayerNorm])) == 11
    with pytest.raises(ValueError, match="Conv2d"):
        ds.set_z3_leaf_modules(model, [nn.Conv2d])
    assert ds.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ValueError):
        ds.unset_z3_leaf_modules(model, ["Nothing"])


def test_marking_by_name() -> None:
    model = models.blocks()
    found, missing = ds.set_z3_leaf_modules_by_name(model, ["layers.1", "layers.9"])
    assert found == [model.layers[1]] and missing == ["layers.9"]
    found, missing = ds.set_z3_leaf_modules_by_suffix(model, ["up", "nothing"], raise_if_not_found=False)
    assert found == [layer.up for layer in model.layers] and missing == ["nothing"]
    ds.set_z3_leaf_module(model.head, True)
    assert ds.z3_leaf_module(model.head)
    ds.set_z3_leaf_module(model.head, False)
    assert not ds.z3_leaf_module(model.head)
    with pytest.raises(ValueError):
        ds.set_z3_leaf_modules_by_name(model, ["nothing"])


def units_with(how: str) -> tuple[list[str], list[bool], list[float]]:
    model = models.blocks()
    zero = dict(LIMITS["nothing stays"])
    if how == "call":
        ds.set_z3_leaf_modules(model, [models.Block])
    elif how == "classes":
        zero["leaf_module"] = {"classes": ["Block"]}
    elif how == "names":
        zero["leaf_module"] = {"names": ["layers.0", "layers.1", "layers.2"]}
    elif how == "granularity":
        zero["stage3_module_granularity_threshold"] = 200
    with mock.patch.object(partition, "MIN_UNIT_BOUND", 1):
        engine = initialize(model, settings(zero=zero))
    names = [unit.name for unit in engine.optimizer_model.units]
    leaf = [p.ds_z3_leaf_module and ds.z3_leaf_parameter(p) for p in engine.module.layers.parameters()]
    losses, _ = train(engine, models.batch, range(2))
    engine.destroy()
    return names, leaf, losses


def test_a_leaf_is_one_unit() -> None:
    plain, leaf, wanted = run_ranks(units_with, 2, "")[0]
    assert "layers.0.up" in plain and not any(leaf)
    for how in ("call", "classes", "names"):
        names, leaf, losses = run_ranks(units_with, 2, how)[0]
        assert [name for name in names if name.startswith("layers")] == [f"layers.{i}" for i in range(3)], how
        assert all(leaf)
        assert losses == pytest.approx(wanted, rel=1e-6)
    names, _, losses = run_ranks(units_with, 2, "granularity")[0]
    assert len(names) < len(plain) and losses == pytest.approx(wanted, rel=1e-6)


class Constant(nn.Module):
    """Experts of which each rank uses others, on inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, index: int) -> Tensor:
        return self.experts[index % 3](torch.ones(2, 5)) + self.experts[index % 2](torch.ones(2, 5))  # type: ignore[no-any-return]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.constant, self.head = Constant(), nn.Linear(5, 1)

    def forward(self, index: int) -> Tensor:
        return nn.functional.softplus(self.head(self.constant(index))).mean()


def routed(step: int, rank: int, micro: int = 0) -> tuple[int]:
    return (step + rank,)


def inputs_without_gradient() -> None:
    model = models.seeded(Routed)
    ds.set_z3_leaf_modules(model, [Constant])
    engine = initialize(model, settings(), reference.sgd)
    losses, _ = train(engine, routed, range(4))
    world = dist.get_world_size()
    wanted = reference.train(lambda: models.seeded(Routed), routed, 4, world, optimizer_fn=reference.sgd)
    assert losses == pytest.approx([step[dist.get_rank()] for step in wanted.losses], rel=1e-6)
    assert_tensors(full_params(model), wanted.params, 1e-6, 1e-7)


def test_a_leaf_whose_inputs_need_no_gradient() -> None:
    run_ranks(inputs_without_gradient, 3)
