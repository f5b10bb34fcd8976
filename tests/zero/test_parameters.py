# SPDX-License-Identifier: Apache-2.0
"""Promise: a sharded parameter has the attributes, methods and looks that clients read.

Outside a gather it shows an empty tensor of shape (0,) with its dtype and `requires_grad`; `ds_*` names tell the rest.
"""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, ZeroParamType, is_zero_param
from deepspeed.utils import logging
from tests.dist.support import Heard, initialize, settings
from tests.harness import models
from tests.harness.pool import run_ranks

METHODS = (
    "all_gather",
    "partition",
    "all_gather_coalesced",
    "ds_summary",
    "aligned_size",
    "padding_size",
    "partition_numel",
    "item",
)


def attributes(hpz: int) -> None:
    engine = initialize(models.frozen(), settings(hpz=hpz))
    plain = models.frozen()
    world = dist.get_world_size()
    ids = []
    for (name, param), (other, wanted) in zip(engine.module.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other and is_zero_param(param) and isinstance(param, nn.Parameter)
        ids.append(param.ds_id)
        assert tuple(param.shape) == (0,) and param.numel() == 0 and param.data.numel() == 0
        assert param.dtype == wanted.dtype and param.requires_grad == wanted.requires_grad
        assert param.device == wanted.device and param.is_leaf and param.grad is None
        assert param.ds_shape == wanted.shape and isinstance(param.ds_shape, torch.Size)
        assert param.ds_numel == wanted.numel()
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        size = -(-wanted.numel() // world)
        assert param.ds_tensor.dim() == 1 and param.ds_tensor.numel() == size and param.ds_tensor.dtype == wanted.dtype
        assert param.ds_tensor.ds_numel == size and param.ds_tensor.status is not None
        assert param.ds_tensor.final_location is None
        assert param.partition_numel() == size and param.aligned_size() == size * world == param.ds_numel_aligned
        assert param.padding_size() == size * world - wanted.numel()
        assert not param.ds_persist and param.ds_active_sub_modules == set()
        assert param.ds_param_type == ZeroParamType.NORMAL
        assert param.is_external_param is False and param.ds_z3_leaf_module is False and param.nvme_swapper is None
        assert not hasattr(param, "ds_quant_scale")
        for method in METHODS:
            assert callable(getattr(param, method))
        summary = param.ds_summary()
        assert summary["id"] == param.ds_id and summary["status"] == "NOT_AVAILABLE" and summary["numel"] == 0
        assert summary["ds_numel"] == wanted.numel() and tuple(summary["ds_shape"]) == tuple(wanted.shape)
        assert summary["requires_grad"] == wanted.requires_grad and summary["grad_shape"] is None
        flat = torch.zeros(size * world)
        flat[: wanted.numel()] = wanted.detach().flatten()
        rank = dist.get_rank()
        assert torch.equal(param.ds_tensor, flat[rank * size : (rank + 1) * size])
        param.ds_active_sub_modules.clear()
        if world > 1:
            assert dist.get_world_size(param.ds_process_group) == world
    assert len(set(ids)) == len(ids)
    assert [member.name for member in ZeroParamStatus] == ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"]


def gather_and_partition() -> None:
    engine = initialize(models.uneven(), settings())
    plain = dict(models.uneven().named_parameters())
    params = dict(engine.module.named_parameters())
    first = params["embed.weight"]
    first.all_gather()
    assert first.ds_status == ZeroParamStatus.AVAILABLE and torch.equal(first.detach(), plain["embed.weight"])
    assert first.shape == first.ds_shape
    assert params["up.weight"].ds_status == ZeroParamStatus.NOT_AVAILABLE
    first.partition()
    assert first.ds_status == ZeroParamStatus.NOT_AVAILABLE and first.numel() == 0
    handle = first.all_gather(param_list=list(params.values()), async_op=True)
    assert all(p.ds_status in (ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE) for p in params.values())
    handle.wait()
    for name, param in params.items():
        assert torch.equal(param.detach(), plain[name])
    first.partition(param_list=list(params.values()))
    assert all(p.numel() == 0 for p in params.values())
    first.all_gather_coalesced(list(params.values())[:3]).wait()
    assert [p.numel() > 0 for p in params.values()] == [True] * 3 + [False] * (len(params) - 3)
    first.partition(list(params.values())[:3])
    assert params["scale"].item() == 1.0 and params["scale"].numel() == 0
    with pytest.raises(RuntimeError):
        params["shift"].item()
    params["shift"].partition()


def copies() -> None:
    engine = initialize(models.uneven(), settings())
    assert all(hasattr(p, "ds_id") for p in copy.deepcopy(engine.module.up).parameters())
    with deepspeed.zero.GatheredParameters(engine.module.up.parameters(), modifier_rank=0):
        twin = copy.deepcopy(engine.module.up)
    plain = models.uneven().up
    for name, param in twin.named_parameters():
        assert type(param) is nn.Parameter and not hasattr(param, "ds_id")
        assert torch.equal(param, getattr(plain, name)) and param.requires_grad
    assert torch.isfinite(twin(torch.ones(2, 16))).all()
    with Heard() as heard, mock.patch.object(logging, "_said", set()):
        state = engine.module.state_dict()
        engine.module.state_dict()
        engine.state_dict()
    (said,) = [text for text in heard.texts if "placeholders" in text]
    assert "GatheredParameters" in said and "scale" in said
    assert all(tuple(value.shape) == (0,) for value in state.values())
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.module.load_state_dict(models.uneven().state_dict())
    with Heard() as heard, deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        full = engine.module.state_dict()
        assert heard.texts == []
        file = io.BytesIO()
        torch.save(engine.module.up.weight, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert type(loaded) is nn.Parameter and torch.equal(loaded, plain.weight)
        rebuilt = type(engine.module.up.weight)(engine.module.up.weight.data)
        assert not hasattr(rebuilt, "ds_id")
    assert {key: tuple(value.shape) for key, value in full.items()} == {
        key: tuple(value.shape) for key, value in models.uneven().state_dict().items()
    }


def inspections() -> Any:
    """What clients do to parameters outside a gather, on one rank alone: no collective, no error."""
    engine = initialize(models.uneven(), settings())
    if dist.get_rank() == 0:
        for name, param in engine.module.named_parameters():
            text = f"{name} {param} {param.shape} {param.size()} {param.dim()} {len(param)} {param.stride()}"
            assert "0" in text
            assert param.detach().numel() == param.clone().numel() == param.data.float().numel() == 0
            assert param.to("cpu").numel() == 0 and param.view(-1).numel() == 0 and param.cpu().is_floating_point()
            assert torch.zeros_like(param).numel() == 0 and hash(param) == id(param)
            assert param in {param} and param.element_size() == 4 and param.is_contiguous()
        assert sum(p.ds_numel for p in engine.parameters()) == sum(p.numel() for p in models.uneven().parameters())
        assert sum(p.numel() for p in engine.parameters()) == 0
        repr(engine.module), str(engine)
        assert next(engine.parameters()).dtype == torch.float32
    dist.barrier()
    with torch.no_grad():
        assert torch.isfinite(engine(*models.batch(0, 0)))


@pytest.mark.parametrize(("world", "hpz"), [(1, 1), (3, 1), (4, 2)])
def test_attributes(world: int, hpz: int) -> None:
    run_ranks(attributes, world, hpz)


def test_gather_and_partition() -> None:
    run_ranks(gather_and_partition, 2)


def test_copies() -> None:
    run_ranks(copies, 2)


def test_inspections_by_one_rank() -> None:
    run_ranks(inspections, 2)
