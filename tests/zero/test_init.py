# SPDX-License-Identifier: Apache-2.0
"""Promise: `zero.Init` shards modules as they are constructed, with rank 0's weights, and puts everything back.

Nested and repeated contexts work, under hpZ too (V1, cases 22 and 47); factories give the target dtype, integers stay
what they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import NotSupportedError
from deepspeed.runtime.zero import init_context, partition_parameters
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.faults import watch
from tests.harness.pool import run_ranks

Init = deepspeed.zero.Init
BF16 = {"bf16": {"enabled": True}}


def all_sharded(module: nn.Module) -> bool:
    return all(is_zero_param(p) for p in module.parameters())


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), float(dist.get_rank())))
        assert tuple(self.weight.shape) == (3, 5), "complete inside its own constructor"
        self.register_buffer("steps", torch.arange(3))


class GrandChild(Child):
    def __init__(self) -> None:
        super().__init__()
        assert not is_zero_param(self.weight), "the most derived constructor is not done yet"
        self.more = nn.Parameter(torch.ones(2))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = GrandChild()
        assert is_zero_param(self.child.weight) and self.child.weight.numel() == 0
        with deepspeed.zero.GatheredParameters(self.child.weight, modifier_rank=0):
            self.child.weight.data.add_(2)
        self.own = nn.Parameter(torch.zeros(7))


def construction() -> None:
    torch.manual_seed(dist.get_rank())
    constructors = {cls: cls.__init__ for cls in (nn.Linear, nn.Module, Child)}
    apply, torch_apply = nn.Module.apply, torch.empty
    with Init(config_dict_or_path=settings()):
        parent = Parent()

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 4)
                self.own = nn.Parameter(torch.randn(5))

        inside = Inside()
    assert all_sharded(parent) and all_sharded(inside)
    assert nn.Module.apply is apply and torch.empty is torch_apply
    assert all(cls.__init__ is original for cls, original in constructors.items()), "constructors are put back"
    assert "__init_subclass__" not in vars(nn.Module)
    outside = nn.Linear(2, 2)
    assert not is_zero_param(outside.weight)
    later = Inside()
    assert not is_zero_param(later.own)
    full = full_params(parent)
    assert torch.equal(full["child.weight"], torch.full((3, 5), 2.0)), "rank 0's weights"
    own = full_params(inside)["own"]
    gathered = [torch.empty(5) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    assert all(torch.equal(own, other) for other in gathered)


def memory_later() -> None:
    """`skip_init` and whatever else is built without memory: sharded, module by module, as it gets some."""
    to_empty, rank = nn.Module.to_empty, dist.get_rank()
    with Init(config_dict_or_path=settings()):
        with watch(init_context, "shard_parameter", note=lambda args, _: tuple(args[0].shape)) as seen:
            module = nn.Sequential(nn.utils.skip_init(nn.Linear, 5, 7), nn.Linear(7, 3))
            assert seen.log == [(7, 5), (7,), (3, 7), (3,)]
            with torch.device("meta"):
                later = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)))
            assert len(seen.log) == 4 and all(p.is_meta for p in later.parameters())
            later[1].to_empty(device="cpu", recurse=False)
            assert len(seen.log) == 4
            later.to_empty(device="cpu")
    assert nn.Module.to_empty is to_empty
    module.append(later)
    assert all_sharded(module)
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        for p in module.parameters():
            p.data.fill_(0.5 + rank)
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in full_params(module).values())


def existing_module() -> None:
    wanted = {name: p.detach().clone() for name, p in models.uneven().named_parameters()}
    module = models.uneven()
    Init(module=module, config_dict_or_path=settings())
    assert all_sharded(module)
    assert_tensors(full_params(module), wanted, 0, 0)
    module = models.uneven()
    Init(module=module, config_dict_or_path=settings(**BF16))
    assert all(p.dtype == torch.bfloat16 and p.ds_tensor.dtype == torch.bfloat16 for p in module.parameters())
    module = models.uneven()
    with Init(module=module, enabled=False):
        inside = nn.Linear(3, 3)
    assert not any(is_zero_param(p) for p in [*module.parameters(), *inside.parameters()])


def dtypes_and_factories() -> None:
    before = torch.get_default_dtype()
    with Init(config_dict_or_path=settings(**BF16)):
        layer = nn.Linear(4, 4)
        made = [torch.empty(2), torch.zeros(2), torch.ones(2), torch.full((2,), 0.5), torch.randn(2), torch.eye(2)]
        made += [torch.tensor([0.5, 1.5]), torch.Tensor(3)]
        counted = torch.arange(300)
        assert counted.dtype == torch.int64
        assert torch.equal(counted.to(torch.float32), torch.arange(300, dtype=torch.float32)), "no rounding on the way"
        assert torch.tensor([1, 2]).dtype == torch.int64 and torch.zeros(2, dtype=torch.float64).dtype == torch.float64
        assert torch.tensor(True).dtype == torch.bool
    assert layer.weight.dtype == torch.bfloat16 and layer.weight.ds_tensor.dtype == torch.bfloat16
    assert all(tensor.dtype == torch.bfloat16 for tensor in made)
    assert torch.get_default_dtype() == before and torch.zeros(1).dtype == torch.float32
    with Init(dtype=torch.float16):
        assert nn.Linear(2, 2).weight.dtype == torch.float16
    with Init(config_dict_or_path=settings(fp16={"enabled": True})):
        assert nn.Linear(2, 2).weight.dtype == torch.float16
    with Init(config_dict_or_path=settings(**BF16), dtype=torch.float32):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    assert torch.get_default_dtype() == before


class Positions(nn.Module):
    """Tables of rotary positions, as models compute them, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("explicit", torch.arange(0, 300, 1, dtype=torch.float32))
        self.register_buffer("computed", 1.0 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))
        self.register_buffer("default", torch.arange(0.0, 4.0), persistent=False)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * x).sum()


def tables_of_positions(kind: str, dtype: torch.dtype, swapped: bool) -> None:
    wrapper = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    wanted = Positions()
    if swapped:  # as transformers does around from_pretrained

        def keep_arange(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            return fn if fn is partition_parameters._orig_torch_arange else wrapper(fn, *args, **kwargs)

        partition_parameters.zero_wrapper_for_fp_tensor_constructor = keep_arange
    try:
        with Init(config_dict_or_path=settings(**{kind: {"enabled": True}})):
            model = Positions()
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = wrapper
    engine = initialize(model, settings(**{kind: {"enabled": True}}))
    for module in (model, engine.module):
        for name in ("explicit", "computed"):
            assert_tensors({name: getattr(module, name)}, {name: getattr(wanted, name)})
            assert getattr(module, name).dtype == torch.float32, f"{name}: an explicit dtype is nobody's to change"
        assert module.default.dtype == dtype and module.weight.dtype == dtype


def apply_gathers() -> None:
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2, "gathered"
            module.weight.data.fill_(dist.get_rank() + 3.0)

    with Init(config_dict_or_path=settings(hpz=2)):
        module = models.uneven()
        module.apply(draw)
    full = full_params(module)
    assert torch.all(full["up.weight"] == 3.0) and torch.all(full["head.weight"] == 3.0)
    engine = initialize(module, settings(hpz=2))
    plain = models.uneven()
    plain.load_state_dict(full)
    data = models.batch(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(engine(*data), plain(*data))


def exceptions() -> None:
    constructor, apply, dtype = nn.Linear.__init__, nn.Module.apply, torch.get_default_dtype()

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with Init(config_dict_or_path=settings(**BF16)):
            with Init(config_dict_or_path=settings(**BF16)):
                Fails()
    assert nn.Linear.__init__ is constructor and nn.Module.apply is apply and torch.get_default_dtype() == dtype
    assert not is_zero_param(nn.Linear(2, 2).weight)
    with Init(config_dict_or_path=settings()):
        with pytest.raises(ZeroDivisionError):
            Fails()
        assert is_zero_param(nn.Linear(2, 2).weight), "a failed constructor does not end the context"
    for keywords in ({"zero_quantized_weights": True}, {"remote_device": "nvme"}):
        with pytest.raises(NotSupportedError):
            Init(**keywords)


def nested_and_repeated(hpz: int) -> list[list[float]]:
    """V1: a second context, a nested one, a model built of both, a second engine; interleaved training."""
    config = settings(hpz=hpz)
    with Init(config_dict_or_path=config):
        with Init(config_dict_or_path=config):
            first = models.uneven()
        second = models.blocks()
    with Init(config_dict_or_path=config):
        first.head = models.seeded(lambda: nn.Linear(16, models.VOCAB))
    with Init(config_dict_or_path=config):
        engines = [initialize(first, config, reference.sgd), initialize(second, config, reference.sgd)]
        assert not is_zero_param(torch.nn.Parameter(torch.ones(1)))
    assert all(all_sharded(engine.module) for engine in engines)
    losses: list[list[float]] = [[], []]
    for step in range(3):
        for engine, seen in zip(engines, losses, strict=True):
            with torch.no_grad():
                engines[0](*models.batch(step, 5))
            seen += train(engine, models.batch, [step])[0]
    return losses


def build_first() -> nn.Module:
    module = models.uneven()
    module.head = models.seeded(lambda: nn.Linear(16, models.VOCAB))
    return module


@pytest.mark.parametrize(
    "work",
    [construction, memory_later, existing_module, dtypes_and_factories, exceptions],
    ids=lambda work: work.__name__,
)
def test_semantics(work: Any) -> None:
    run_ranks(work, 2)


@pytest.mark.parametrize("swapped", [False, True], ids=["alone", "client's wrapper"])
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_tables_of_positions_keep_their_dtype(kind: str, dtype: torch.dtype, swapped: bool) -> None:
    run_ranks(tables_of_positions, 2, kind, dtype, swapped)


def test_the_wrapper_of_constructors_keeps_an_explicit_dtype() -> None:
    wrap = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    arange = wrap(partition_parameters._orig_torch_arange, torch.bfloat16, torch.device("cpu"))
    assert arange(0.0, 4.0).dtype == torch.bfloat16 and arange(300).dtype == torch.int64
    assert arange(300, dtype=torch.float32).dtype == torch.float32
    assert wrap(torch.zeros, torch.float16, target_device=torch.device("meta"))(3).device.type == "meta"
    for name in ("arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros"):
        assert getattr(partition_parameters, f"_orig_torch_{name}") is getattr(torch, name)


def test_apply_gathers_and_keeps_rank_0() -> None:
    run_ranks(apply_gathers, 4)


def test_several_contexts_and_engines() -> None:
    wanted = [
        reference.train(build, models.batch, 3, 4, optimizer_fn=reference.sgd) for build in (build_first, models.blocks)
    ]
    plain, hpz = run_ranks(nested_and_repeated, 4, 1), run_ranks(nested_and_repeated, 4, 2)
    assert plain == hpz
    for rank, model in itertools.product(range(4), range(2)):
        assert plain[rank][model] == pytest.approx([step[rank] for step in wanted[model].losses], rel=1e-6)


def recast() -> list[float]:
    """A context in fp32 whose secondaries are filled, then an engine in bf16: no shard of the old dtype is used."""
    with Init(config_dict_or_path=settings(hpz=2)):
        module = models.uneven()
    with deepspeed.zero.GatheredParameters(module.parameters(), modifier_rank=0):
        for p in module.parameters():
            p.data.mul_(0.5)
    engine = initialize(module, settings(hpz=2, **BF16), reference.sgd)
    assert all(p.dtype == p.ds_tensor.dtype == torch.bfloat16 for p in module.parameters())
    with torch.no_grad():
        return [engine(*models.batch(0, dist.get_rank())).item()]


def test_an_engine_of_another_dtype() -> None:
    plain = models.uneven()
    for p in plain.parameters():
        p.data.mul_(0.5)
    plain.to(torch.bfloat16)
    for rank, (loss,) in enumerate(run_ranks(recast, 4)):
        assert loss == pytest.approx(plain(*models.batch(0, rank)).item(), rel=1e-6)


def no_group_for_many() -> str:
    with pytest.raises(RuntimeError) as caught:
        Init(data_parallel_group=None)
    return str(caught.value)


def test_many_processes_without_a_group_are_refused() -> None:
    """WORLD_SIZE says two, the group has one rank: each would train alone."""
    (text,) = run_ranks(no_group_for_many, 1, env={"WORLD_SIZE": "2"})
    assert "WORLD_SIZE" in text
