# SPDX-License-Identifier: Apache-2.0
"""Promise: masters, optimizer states and gradients are read and written in full and by shard, for every shape.

Also where the size does not divide by the world (V4, cases 44): every rank writes, and the next forward sees it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed.utils as ds
from tests.dist.support import assert_tensors, full_params, initialize, settings
from tests.harness import models, reference
from tests.harness.pool import run_ranks


def local_of(param: Any, full: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a full tensor, padded with zeros."""
    size, rank = param.ds_tensor.numel(), dist.get_rank()
    flat = torch.zeros(size * dist.get_world_size())
    flat[: full.numel()] = full.flatten()
    return flat[rank * size : (rank + 1) * size]


def reads(offload: bool, hpz: int) -> None:
    """Everything that can be read equals plain torch's, before, between and after steps."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = initialize(models.frozen(), settings(hpz=hpz, clip=0.1, zero=zero), reference.adam)
    world = dist.get_world_size()
    wanted = reference.train(models.frozen, models.batch, 2, world, clip=0.1)
    params = dict(engine.module.named_parameters())
    for name, param in params.items():
        if not param.requires_grad:
            for read in (ds.safe_get_full_fp32_param, ds.safe_get_full_grad, ds.safe_get_local_fp32_param):
                assert read(param) is None, name
            assert ds.safe_get_full_optimizer_state(param, "exp_avg") is None
            assert ds.safe_get_local_optimizer_state(param, "exp_avg") is None and ds.safe_get_local_grad(param) is None
            continue
        with pytest.raises(KeyError):
            ds.safe_get_full_optimizer_state(param, "exp_avg")
        assert ds.safe_get_full_grad(param) is None
    assert ds.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(2))) is None
    live = {name: param for name, param in params.items() if param.requires_grad}
    for step in range(2):
        loss = engine(*models.batch(step, dist.get_rank()))
        engine.backward(loss)
        before = {name: ds.safe_get_full_grad(param) for name, param in live.items()}
        engine.step()
        after = {name: ds.safe_get_full_grad(param) for name, param in live.items()}
        assert_tensors(after, before, 1e-5, 1e-8)  # readable after the step, unclipped
    assert_tensors(before, wanted.grads, 1e-4, 1e-7)
    for name, param in live.items():
        full = ds.safe_get_full_fp32_param(param)
        assert full.shape == param.ds_shape and full.dtype == torch.float32
        torch.testing.assert_close(full, wanted.masters[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ds.safe_get_local_fp32_param(param), local_of(param, full), rtol=0, atol=0)
        torch.testing.assert_close(ds.safe_get_local_grad(param), local_of(param, before[name]), rtol=1e-5, atol=1e-8)
        for key in ("exp_avg", "exp_avg_sq"):
            state = ds.safe_get_full_optimizer_state(param, key)
            torch.testing.assert_close(state, wanted.state[name][key], rtol=1e-3, atol=1e-8)
            local = ds.safe_get_local_optimizer_state(param, key)
            assert torch.equal(local, local_of(param, state))
        with pytest.raises(KeyError):
            ds.safe_get_full_optimizer_state(param, "nothing")


def writes(dtype: str, hpz: int) -> None:
    config = settings(hpz=hpz, **({"bf16": {"enabled": True}} if dtype == "bf16" else {}))
    engine = initialize(models.uneven(), config, reference.sgd)
    rank = dist.get_rank()
    for index, param in enumerate(engine.module.parameters()):
        value = torch.randn(param.ds_shape, generator=torch.Generator().manual_seed(index))
        ds.safe_set_full_fp32_param(param, value)
        assert torch.equal(ds.safe_get_full_fp32_param(param), value)
        local = ds.safe_get_local_fp32_param(param)
        ds.safe_set_local_fp32_param(param, local * 2)
        assert torch.equal(ds.safe_get_full_fp32_param(param), value * 2)
        assert torch.equal(ds.safe_get_local_fp32_param(param), local_of(param, value * 2)), "padding stays zero"
    full = full_params(engine.module)
    for name, param in engine.module.named_parameters():
        assert torch.equal(full[name], ds.safe_get_full_fp32_param(param).to(full[name].dtype))
    plain = models.uneven().to(next(iter(full.values())).dtype)
    plain.load_state_dict(full)
    data = models.batch(0, rank)
    with torch.no_grad():
        torch.testing.assert_close(engine(*data), plain(*data), rtol=1e-6, atol=1e-6)
    for param in engine.module.parameters():
        with pytest.raises(RuntimeError):
            ds.safe_set_full_fp32_param(param, torch.zeros(param.ds_numel + 1))
        with pytest.raises(RuntimeError):
            ds.safe_set_local_fp32_param(param, torch.zeros(param.ds_tensor.numel() + 1))
    with pytest.raises(RuntimeError):
        ds.safe_set_full_grad(engine.module.up.weight, torch.zeros(33, 16))


def gradients_written() -> None:
    """What is written between backward and step is what the step uses."""
    engine = initialize(models.uneven(), settings(), reference.sgd)
    before = full_params(engine.module)
    engine.backward(engine(*models.batch(0, dist.get_rank())))
    params = dict(engine.module.named_parameters())
    wanted = {}
    for index, (name, param) in enumerate(params.items()):
        value = torch.linspace(-1, 1, param.ds_numel).view(param.ds_shape) * (index + 1)
        if index % 2:
            ds.safe_set_full_grad(param, value)
        else:
            ds.safe_set_local_grad(param, local_of(param, value))
        assert torch.equal(ds.safe_get_full_grad(param), value)
        wanted[name] = value

    def double(grad: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
        return grad * 2

    ds.safe_update_full_grad_vectorized(params.values(), double)
    engine.step()
    after = full_params(engine.module)
    for name, grad in wanted.items():
        torch.testing.assert_close(after[name], before[name] - 0.1 * 2 * grad, rtol=1e-5, atol=1e-6)


def states_written() -> None:
    engine = initialize(models.uneven(), settings(), reference.adam)
    engine.backward(engine(*models.batch(0, dist.get_rank())))
    engine.step()
    for param in engine.module.parameters():
        value = torch.rand(param.ds_shape, generator=torch.Generator().manual_seed(1))
        ds.safe_set_full_optimizer_state(param, value, "exp_avg")
        assert torch.equal(ds.safe_get_full_optimizer_state(param, "exp_avg"), value)
        ds.safe_set_local_optimizer_state(param, local_of(param, value) * 3, "exp_avg")
        assert torch.equal(ds.safe_get_full_optimizer_state(param, "exp_avg"), value * 3)


@pytest.mark.parametrize(("world", "offload", "hpz"), [(1, False, 1), (3, False, 1), (4, True, 2)])
def test_reads(world: int, offload: bool, hpz: int) -> None:
    run_ranks(reads, world, offload, hpz)


@pytest.mark.parametrize(("world", "dtype", "hpz"), [(3, "fp32", 1), (4, "fp32", 2), (4, "bf16", 2)])
def test_writes(world: int, dtype: str, hpz: int) -> None:
    run_ranks(writes, world, dtype, hpz)


def test_written_gradients_are_stepped() -> None:
    run_ranks(gradients_written, 3)


def test_written_states() -> None:
    run_ranks(states_written, 3)
