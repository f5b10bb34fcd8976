# SPDX-License-Identifier: Apache-2.0
"""Promise: `GatheredParameters` works in every pattern that clients use, and a write through it stays.

After `initialize` a write reaches the fp32 master, survives the next step and is checkpointed (V2, cases 21; upstream
reverts it).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks

GatheredParameters = deepspeed.zero.GatheredParameters


def shards(module: nn.Module) -> bool:
    return all(p.numel() == 0 for p in module.parameters())


def arguments(after_initialize: bool) -> None:
    """A parameter, lists with plain tensors and duplicates, generators, empty ones, disabled."""
    config = settings(hpz=2)
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = models.tied()
    if after_initialize:
        initialize(module, config)
    wanted = dict(models.tied().named_parameters())
    with GatheredParameters(module.embed.weight) as nothing:
        assert nothing is None and torch.equal(module.embed.weight.detach(), wanted["embed.weight"])
        assert shards(module.layers)
    assert shards(module)
    plain, buffer = nn.Parameter(torch.ones(3)), torch.zeros(2)
    with GatheredParameters([plain, module.norm.weight, buffer, module.norm.weight], modifier_rank=0):
        assert module.norm.weight.shape == module.norm.weight.ds_shape
        plain.data.add_(1)
    assert torch.equal(plain.detach(), torch.full((3,), 2.0)) and shards(module)
    with GatheredParameters([module.embed.weight, module.head.weight], modifier_rank=0):  # tied: one parameter
        module.head.weight.data.mul_(1)
    with GatheredParameters(module.parameters()), GatheredParameters([]), GatheredParameters([plain]):
        assert {name: p.shape for name, p in module.named_parameters()} == {n: p.shape for n, p in wanted.items()}
    with GatheredParameters(list(module.parameters()), enabled=False), GatheredParameters([], enabled=True):
        assert shards(module)
    with GatheredParameters(list(module.layers[0].parameters(recurse=False)), modifier_rank=0):
        pass
    with GatheredParameters(module.embed.weight, fwd_module=module):
        assert module.embed.weight.numel()
    with GatheredParameters(dict(module.named_parameters()).values()):
        assert not shards(module)
    with GatheredParameters(module.layers[0].parameters()), GatheredParameters(module.layers[1].parameters()):
        assert module.layers[0].up.weight.numel() and module.layers[1].up.weight.numel()
    assert shards(module)
    with pytest.raises(RuntimeError):
        with GatheredParameters(module.parameters(), modifier_rank=99):
            pass
    assert shards(module)


def kept_tensors() -> None:
    """Tensors that were made inside a block and are used after it: whole, as they were, whatever happens since."""
    engine = initialize(models.uneven(), settings(hpz=2), reference.sgd)
    for modifier in (None, 0):
        before = full_params(engine.module)
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier):
            state = engine.module.state_dict()
            views = {name: p.detach().view(-1) for name, p in engine.module.named_parameters()}
        assert shards(engine.module)
        for _ in range(2):
            assert_tensors(state, before, 0, 0)
            assert_tensors({name: view.view_as(before[name]) for name, view in views.items()}, before, 0, 0)
            train(engine, models.batch, range(2))
    with GatheredParameters(list(engine.module.up.parameters())):
        train(engine, models.batch, range(1))  # a pass of the engine goes on with what was lent
        kept = engine.module.up.weight.detach()
        now = kept.clone()
    train(engine, models.batch, range(2))
    assert torch.equal(kept, now)


def joined(checks: bool) -> None:
    """A block inside a block over the same parameters: code that gathers for itself, called by code that has."""
    engine = initialize(models.uneven(), settings(zero={"enable_sanity_checks": checks}), reference.sgd)
    up, down, rank = engine.module.up.weight, engine.module.down.weight, dist.get_rank()
    before = full_params(engine.module)
    both = [up, down]
    with GatheredParameters(both):
        with GatheredParameters([up]), GatheredParameters(iter([up])):
            assert torch.equal(up, before["up.weight"])
        assert torch.equal(up, before["up.weight"]) and torch.equal(down, before["down.weight"])
        with GatheredParameters([up, engine.module.embed.weight], modifier_rank=0):
            if rank == 0:
                up.data.mul_(2)
            engine.module.embed.weight.data.add_(rank)
        assert torch.equal(up, 2 * before["up.weight"]), "on every rank, and still shown"
        assert not engine.module.embed.weight.numel()
        with GatheredParameters([down], modifier_rank=dist.get_world_size() - 1):
            down.data = torch.full_like(down, float(rank))  # replaced, not edited in place
        with pytest.raises(ZeroDivisionError), GatheredParameters([up]):
            raise ZeroDivisionError
        assert torch.equal(up, 2 * before["up.weight"])
    assert shards(engine.module)
    wanted = {
        **before,
        "up.weight": 2 * before["up.weight"],
        "down.weight": torch.full_like(before["down.weight"], float(dist.get_world_size() - 1)),
    }
    assert_tensors(full_params(engine.module), wanted, 0, 0)
    with GatheredParameters(both, modifier_rank=0):
        with GatheredParameters([up]):
            up.data.zero_() if rank == 0 else None  # the outer block decides
        assert up.numel()
    wanted["up.weight"].zero_()
    assert_tensors(full_params(engine.module), wanted, 0, 0)
    first, second = GatheredParameters(both), GatheredParameters(both, modifier_rank=0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # not nested: the last one lets go
    down.data.fill_(float(rank))
    second.__exit__(None, None, None)
    wanted["down.weight"].zero_()
    assert shards(engine.module)
    assert_tensors(full_params(engine.module), wanted, 0, 0)
    assert torch.equal(safe_get_full_fp32_param(down), wanted["down.weight"])
    train(engine, models.batch, range(1))


def unfit(how: str, odd: int, modifier: int) -> str:
    """One rank alone leaves something that cannot be sent: all raise, and the weights are as before."""
    engine = initialize(models.uneven(), settings())
    before = full_params(engine.module)
    with pytest.raises(UsageError) as caught:
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier):
            engine.module.down.weight.data.zero_()
            if dist.get_rank() == odd:
                data = engine.module.up.weight.data
                engine.module.up.weight.data = data[1:] if how == "shape" else data.double()
    assert shards(engine.module)
    assert_tensors(full_params(engine.module), before, 0, 0)
    train(engine, models.batch, range(1))
    return str(caught.value)


def checked_edit(odd: int) -> str:
    """One rank alone edits in a read-only block, under sanity checks."""
    engine = initialize(models.uneven(), settings(zero={"enable_sanity_checks": True}))
    with pytest.raises(UsageError) as caught:
        with GatheredParameters(list(engine.module.parameters())):
            if dist.get_rank() == odd:
                engine.module.down.weight.data.zero_()
    train(engine, models.batch, range(1))
    return str(caught.value)


def errors_inside() -> None:
    engine = initialize(models.uneven(), settings(hpz=2))
    before = full_params(engine.module)
    for modifier in (None, 0):
        with pytest.raises(ZeroDivisionError):
            with GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier):
                engine.module.up.weight.data.zero_()
                raise ZeroDivisionError
        assert shards(engine.module)
    assert_tensors(full_params(engine.module), before, 0, 0)
    with pytest.raises(RuntimeError, match="shape"):
        with GatheredParameters([engine.module.up.weight], modifier_rank=0):
            engine.module.up.weight.data = torch.zeros(2, 2)
    train(engine, models.batch, range(1))


def forwards_inside() -> list[float]:
    """Forwards, a whole training step and another read inside of it, as generation and evaluation code do."""
    engine = initialize(models.uneven(), settings(hpz=2), reference.sgd)
    plain = models.uneven()
    rank = dist.get_rank()
    with GatheredParameters(list(engine.module.parameters())):
        for step in range(3):
            with torch.no_grad():
                torch.testing.assert_close(engine(*models.batch(step, rank)), plain(*models.batch(step, rank)))
        assert not shards(engine.module)
    assert shards(engine.module)
    with GatheredParameters(list(engine.module.up.parameters())):
        losses, _ = train(engine, models.batch, range(2))
    return losses + train(engine, models.batch, range(2, 4))[0]


def write_survives(dtype: str, hpz: int, accum: int) -> None:
    """V2: with a learning rate of 0 the written weights are there after a step, in master and shard."""
    config = settings(hpz=hpz, accum=accum)
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine = initialize(models.uneven(), config, reference.adam)
    train(engine, models.batch, range(1), accum)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    params = dict(engine.module.named_parameters())
    before = {name: safe_get_full_fp32_param(p) for name, p in params.items()}
    with GatheredParameters(list(params.values()), modifier_rank=1):
        for param in params.values():
            if dist.get_rank() == 1:
                param.data.view(-1)[::2] = 0.25
    for _ in range(2):
        for name, param in params.items():
            master = safe_get_full_fp32_param(param).flatten()
            assert torch.all(master[::2] == 0.25), name
            assert torch.equal(master[1::2], before[name].flatten()[1::2]), "what was not written keeps its precision"
        for name, param in full_params(engine.module).items():
            assert torch.all(param.flatten()[::2] == 0.25), name
        train(engine, models.batch, range(1), accum)


def moving_average() -> None:
    """An EMA copy kept in full, swapped in for evaluation and out again (row 21)."""
    engine = initialize(models.uneven(), settings(hpz=2))
    average = full_params(engine.module)
    for step in range(3):
        train(engine, models.batch, [step])
        with GatheredParameters(list(engine.module.parameters())):
            for name, param in engine.module.named_parameters():
                average[name].lerp_(param.detach(), 0.5)
    kept = full_params(engine.module)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for name, param in engine.module.named_parameters():
            param.data.copy_(average[name])
    plain = models.uneven()
    plain.load_state_dict(average)
    with torch.no_grad():
        torch.testing.assert_close(engine(*models.batch(7, 0)), plain(*models.batch(7, 0)))
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for name, param in engine.module.named_parameters():
            param.data.copy_(kept[name])
    assert_tensors(full_params(engine.module), kept, 0, 0)


def saved_modules_pattern() -> None:
    """PEFT: deepcopy of a module inside a gather over its parameters' generator, rank 0 modifies."""
    with deepspeed.zero.Init(config_dict_or_path=settings()):
        module = models.uneven()
    with GatheredParameters(module.head.parameters(), modifier_rank=0):
        twin = copy.deepcopy(module.head)
    assert tuple(twin.weight.shape) == (models.VOCAB, 16) and not hasattr(twin.weight, "ds_id")
    module.head = twin  # a plain child in a sharded model: `initialize` shards it
    engine = initialize(module, settings(), reference.sgd)
    assert hasattr(engine.module.head.weight, "ds_id")
    losses, _ = train(engine, models.batch, range(2))
    wanted = reference.train(models.uneven, models.batch, 2, dist.get_world_size(), optimizer_fn=reference.sgd)
    torch.testing.assert_close(losses, [step[dist.get_rank()] for step in wanted.losses])


def resized_embedding(hpz: int) -> list[float]:
    """Case 3: a second `zero.Init` makes a larger embedding; old rows are copied under a gather."""
    config = settings(hpz=hpz)
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = models.uneven()
    with deepspeed.zero.Init(config_dict_or_path=config):
        larger = models.seeded(lambda: nn.Embedding(17, 16))
    with GatheredParameters([module.embed.weight, larger.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            larger.weight.data[: models.VOCAB] = module.embed.weight.data
    module.embed = larger
    engine = initialize(module, config, reference.sgd)
    with torch.no_grad():
        losses = [engine(*models.batch(9, dist.get_rank())).item()]
    return losses + train(engine, models.batch, range(3))[0]


def build_resized() -> Any:
    module = models.uneven()
    larger = models.seeded(lambda: nn.Embedding(17, 16))
    larger.weight.data[: models.VOCAB] = module.embed.weight.data
    module.embed = larger
    return module


class Regathered(torch.autograd.Function):
    """A linear layer that computes its logits again in the backward and gathers its weight there, as TRL's fused head.

    `scale` is a parameter that may stay gathered; it is read in a block as well.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, scale: Any) -> Any:
        ctx.save_for_backward(hidden, weight, scale)
        return hidden @ weight.t() * scale

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        hidden, weight, scale = ctx.saved_tensors
        with head_of(weight, scale):
            logits = (hidden @ weight.t()).detach()
            grad = grad.flatten(0, -2)
            weight_grad = (grad * scale).t() @ hidden.flatten(0, -2)
            return (
                ((grad * scale) @ weight).view_as(hidden),
                weight_grad,
                (grad * logits.flatten(0, -2)).sum().view(1, 1),
            )


def head_of(*params: Any) -> Any:
    return GatheredParameters([p for p in params if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE])


class GathersInForward(nn.Module):
    """Its forward takes the head's weight inside a block and never calls the head."""

    def __init__(self, way: str, loose: bool) -> None:
        super().__init__()
        self.body = models.Block(15, 7)
        self.embed = nn.Embedding(models.VOCAB, 15)
        self.head = nn.Linear(15, models.VOCAB, bias=False)
        self.gain = nn.Linear(1, 1, bias=False)
        self.shift = nn.Parameter(torch.zeros(1)) if loose else None  # then the root itself owns parameters
        self.way = way

    def forward(self, tokens: Any, targets: Any) -> Any:
        hidden = self.body(self.embed(tokens))
        weight, scale = self.head.weight, self.gain.weight
        if self.way == "recomputed":
            logits = torch.utils.checkpoint.checkpoint(self._linear, hidden, use_reentrant=False)
        elif self.way == "linear":
            logits = self._linear(hidden)
        else:
            with head_of(weight, scale):
                logits = Regathered.apply(hidden, weight, scale)
        if self.shift is not None:
            logits = logits + self.shift
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def _linear(self, hidden: Any) -> Any:
        with GatheredParameters([self.head.weight, self.gain.weight]):
            return nn.functional.linear(hidden, self.head.weight) * self.gain.weight


WAYS = [(way, loose) for way in ("linear", "recomputed", "function") for loose in (False, True)]


def gathers_in_forward(way: str, loose: bool) -> nn.Module:
    return models.seeded(lambda: GathersInForward(way, loose))


def blocks_in_passes(hpz: int, persistent: bool) -> dict[str, list[float]]:
    losses = {}
    for way, loose in WAYS:
        config = settings(hpz=hpz)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 20 if persistent else 0
        engine = initialize(gathers_in_forward(way, loose), config)
        seen = train(engine, models.batch, range(4))[0]
        with torch.no_grad():
            seen.append(engine(*models.batch(9, dist.get_rank())).item())
        fetcher = engine.optimizer_model.fetcher
        assert fetcher.ledger.live <= sum(unit.numel for unit in fetcher.persistent), "weights were not released"
        engine.destroy()
        losses[f"{way} {loose}"] = seen
    return losses


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("hpz", [1, 2])
def test_blocks_inside_forward_and_backward(hpz: int, persistent: bool) -> None:
    """What a pass uses inside a block it can use until its backward has ended."""
    wanted = {}
    for way, loose in WAYS:
        trained = reference.train(functools.partial(gathers_in_forward, way, loose), models.batch, 4, 4)
        wanted[f"{way} {loose}"] = trained
    for rank, got in enumerate(run_ranks(blocks_in_passes, 4, hpz, persistent)):
        for name, trained in wanted.items():
            assert got[name][:4] == pytest.approx([step[rank] for step in trained.losses], rel=1e-6), name
            plain = gathers_in_forward(*WAYS[list(wanted).index(name)])
            plain.load_state_dict(trained.params)
            assert got[name][4] == pytest.approx(plain(*models.batch(9, rank)).item(), rel=1e-5), name


@pytest.mark.parametrize("after_initialize", [False, True])
def test_arguments(after_initialize: bool) -> None:
    run_ranks(arguments, 4, after_initialize)


def test_what_is_kept_of_a_block_stays_whole() -> None:
    run_ranks(kept_tensors, 4)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_a_block_inside_a_block_joins_it(world: int, checks: bool) -> None:
    run_ranks(joined, world, checks)


@pytest.mark.parametrize("how", ["shape", "dtype"])
@pytest.mark.parametrize(("odd", "modifier"), [(0, 0), (1, 0), (0, 1)])
def test_what_one_rank_cannot_send_is_an_error_on_all(how: str, odd: int, modifier: int) -> None:
    for text in run_ranks(unfit, 2, how, odd, modifier):
        assert f"rank {odd} leaves up.weight with another {how} than" in text


@pytest.mark.parametrize("odd", [0, 1])
def test_an_edit_by_one_rank_is_an_error_on_all_under_sanity_checks(odd: int) -> None:
    for text in run_ranks(checked_edit, 2, odd):
        assert f"down.weight on rank {odd} edited inside a read-only block" in text


def test_errors_inside() -> None:
    run_ranks(errors_inside, 4)


def test_forwards_inside() -> None:
    wanted = reference.train(models.uneven, models.batch, 4, 4, optimizer_fn=reference.sgd)
    for rank, losses in enumerate(run_ranks(forwards_inside, 4)):
        assert losses == pytest.approx([step[rank] for step in wanted.losses], rel=1e-6)


def test_a_write_survives_steps() -> None:
    for dtype, hpz, accum in (("fp32", 1, 1), ("fp32", 2, 2), ("bf16", 1, 1), ("bf16", 2, 1)):
        run_ranks(write_survives, 4, dtype, hpz, accum)


def test_moving_average() -> None:
    run_ranks(moving_average, 4)


def test_saved_modules_pattern() -> None:
    run_ranks(saved_modules_pattern, 2)


def test_resized_embedding() -> None:
    wanted = reference.train(build_resized, models.batch, 3, 4, optimizer_fn=reference.sgd)
    plain, hpz = run_ranks(resized_embedding, 4, 1), run_ranks(resized_embedding, 4, 2)
    assert plain == hpz
    for rank, losses in enumerate(plain):
        assert losses[1:] == pytest.approx([step[rank] for step in wanted.losses], rel=1e-6)
        assert losses[0] == pytest.approx(build_resized()(*models.batch(9, rank)).item(), rel=1e-6)
