# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the numeric fault tests do: poisoned steps, delays, limits, stale copies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.zero.core import fetch, wire
from deepspeed.utils.logging import logger
from tests.faults.scenarios import build, config, fingerprint, full_weights, idle, rank, step, weights
from tests.harness import models
from tests.harness.faults import delay, watch


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Warnings of the package while the block lasts."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Poison(torch.autograd.Function):
    """Identity; one element of its gradient is replaced."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, poison: float) -> Tensor:
        ctx.poison = poison
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        grad.view(-1)[0] = ctx.poison
        return grad, None


class Poisoned(nn.Module):
    """Two layers; the gradient of ``second`` and what is before it can be poisoned, that of ``third`` is sound."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.third = nn.Linear(3, 3)
        self.poison = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(inputs)))
        if self.poison:
            hidden = Poison.apply(hidden, self.poison)
        return self.third(hidden).float().square().mean()


def poisoned() -> Any:
    return models.seeded(Poisoned)


def batch(number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(31 * number + rank())
    return torch.randn(4, 5, generator=generator).to(dtype)


def _train(engine: Any, number: int, poison: float) -> None:
    engine.module.poison = poison
    engine.backward(engine(batch(number, next(iter(engine.optimizer.sharded.params.values())).dtype)))
    engine.step()


def non_finite(precision: str, poison: float, odd: int, zero: dict[str, Any]) -> Any:
    """Two sound steps, a poisoned one on rank ``odd``, a sound one."""
    settings = config(precision, **zero)
    if precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 4
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}}
    engine = build(poisoned(), settings)
    for number in range(2):
        _train(engine, number, 0.0)
    before, rate, scale = fingerprint(engine), engine.get_lr(), engine.optimizer.cur_scale
    with logged() as lines:
        _train(engine, 2, poison if rank() == odd else 0.0)
    result = {
        "unchanged": fingerprint(engine) == before,
        "lines": lines,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "applied": engine.was_step_applied(),
        "overflow": engine.optimizer.overflow,
        "norm": float(engine.get_global_grad_norm()),
        "same rate": engine.get_lr() == rate,
        "scale": engine.optimizer.cur_scale / scale,
    }
    _train(engine, 3, 0.0)
    return {**result, "goes on": fingerprint(engine) != before and engine.was_step_applied()}


def always(precision: str, steps: int, limit: int) -> Any:
    """Every step is poisoned on rank 1; returns warnings, and the error that ended it."""
    settings = config(precision, top_max_skipped_steps=limit)
    if precision == "fp16":
        settings["fp16"].update(initial_scale_power=3, hysteresis=1)
    engine = build(poisoned(), settings)
    before = fingerprint(engine)
    error = ["none", ""]
    with logged() as lines:
        try:
            for number in range(steps):
                _train(engine, number, float("nan") if rank() == 1 else 0.0)
        except RuntimeError as caught:
            error = [type(caught).__name__, str(caught)]
    return {"lines": lines, "error": error, "skipped": engine.skipped_steps, "unchanged": fingerprint(engine) == before}


def huge(precision: str) -> Any:
    """Finite gradients whose squares overflow."""
    engine = build(poisoned(), config(precision, top_gradient_clipping=1.0))
    before = fingerprint(engine)
    _train(engine, 0, 1e30)
    finite = all(torch.isfinite(flat).all() for flat in engine.optimizer.fp32_partitioned_groups_flat)
    norm = float(engine.get_global_grad_norm())
    return {"finite": bool(finite), "norm": norm, "moved": fingerprint(engine) != before, "skips": engine.skipped_steps}


def delayed(seconds: float, prefetch: int, zero: dict[str, Any]) -> Any:
    """Losses, norms and weights of four steps, with delays before gathers, reductions and votes of rank 1."""
    with contextlib.ExitStack() as stack:
        if seconds and rank() == 1:
            for name, at in (("gather", 5), ("reduce_scatter", 3), ("exchange", 3)):
                stack.enter_context(watch(wire, name, delay(seconds, at)))
            stack.enter_context(watch(fetch, "finish_gather", delay(seconds / 4, 11)))
        engine = build(models.blocks(), config(stage3_prefetch_bucket_size=prefetch, **zero))
        seen = []
        for number in range(4):
            loss = step(engine, number)
            seen.append([loss, float(engine.get_global_grad_norm())])
        return {"seen": seen, "weights": full_weights(engine)}


def memory(max_live: int) -> Any:
    """Peak of gathered elements over three steps and an evaluation, the largest unit, and what is left after."""
    engine = build(
        models.blocks(),
        config(stage3_max_live_parameters=max_live, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0),
    )
    ledger = engine.optimizer.sharded.fetcher.ledger
    left = []
    for number in range(3):
        step(engine, number)
        left.append(idle(engine))
    with torch.no_grad():
        engine.eval()
        engine(*models.batch(9, rank()))
    left.append(idle(engine))
    return {"peak": ledger.peak, "largest": max(u.numel for u in engine.optimizer.sharded.units), "left": left}


WRITES = ("step", "load_state_dict", "modifier", "set_full", "set_local", "reload", "partition")


def fresh_secondaries(folder: str) -> Any:
    """After every kind of write, a gather from the secondaries must give the primaries' bits."""
    engine = build(models.frozen(), config(zero_hpz_partition_size=2, stage3_max_reuse_distance=0))
    step(engine, 0)
    result = {}
    for write in (*WRITES, "load_checkpoint"):
        _write(engine, write, folder)
        truth = _primaries(engine)
        step_loss = float(engine(*models.batch(3, rank())).detach())
        engine.communication_stats(reset=True)
        engine.eval()
        with torch.no_grad():
            again = float(engine(*models.batch(3, rank())))
        engine.train()
        inside = engine.communication_stats(reset=True)["gathers_inside"]
        result[write] = {
            "equal": _gathered_in_forward(engine) == truth,
            "loss": step_loss == again,
            "inside": inside,
        }
    return result


def _write(engine: Any, write: str, folder: str) -> None:
    param = dict(engine.module.named_parameters())["layers.1.up.weight"]
    frozen = dict(engine.module.named_parameters())["layers.0.up.weight"]
    if write == "step":
        step(engine, 1)
    elif write == "load_state_dict":
        state = {name: torch.full(tuple(p.ds_shape), 0.01) for name, p in engine.module.named_parameters()}
        params = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if rank() == 0:
                engine.module.load_state_dict(state)
    elif write == "modifier":
        with deepspeed.zero.GatheredParameters([param, frozen], modifier_rank=1), torch.no_grad():
            param.add_(0.5 + rank())
            frozen.add_(0.25 + rank())
    elif write == "set_full":
        deepspeed.utils.safe_set_full_fp32_param(param, torch.full((7, 15), 0.125))
    elif write == "set_local":
        local = deepspeed.utils.safe_get_local_fp32_param(param)
        deepspeed.utils.safe_set_local_fp32_param(param, torch.full_like(local, 0.0625))
    elif write == "reload":
        engine.offload_states()
        engine.reload_states()
    elif write == "partition":
        param.all_gather()
        with torch.no_grad():
            param.data.mul_(2.0)
        param.partition(has_been_updated=True)
    else:
        engine.save_checkpoint(folder, tag="here")
        step(engine, 2)
        engine.load_checkpoint(folder, tag="here")


def _primaries(engine: Any) -> list[Any]:
    """Full weights put together from the primary shards of all ranks, without any gather of the core."""
    result = []
    for p in engine.optimizer.sharded.params.values():
        pieces = [torch.empty_like(p.shard) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(pieces, p.shard.contiguous())
        result.append(torch.cat(pieces)[: p.numel].tolist())
    return result


def _gathered_in_forward(engine: Any) -> list[Any]:
    """The weights that a forward shows to its modules."""
    seen: dict[str, Any] = {}
    names = {id(p): name for name, p in engine.module.named_parameters()}

    def look(module: nn.Module, _: Any) -> None:
        for p in module.parameters(recurse=False):
            seen[names[id(p)]] = p.data.reshape(-1).tolist()

    handles = [module.register_forward_pre_hook(look) for module in engine.module.modules()]
    engine.eval()
    with torch.no_grad():
        engine(*models.batch(3, rank()))
    engine.train()
    for handle in handles:
        handle.remove()
    return [seen[name] for name in engine.optimizer.sharded.params]


def stale_secondary() -> Any:
    """A secondary that holds other bytes than its (older) version says is never read."""
    engine = build(models.blocks(), config(zero_hpz_partition_size=2))
    step(engine, 0)
    for p in engine.optimizer.sharded.params.values():
        assert p.secondary is not None and p.secondary_version < p.version, "the step made every secondary old"
        p.secondary.fill_(float("nan"))
    return float(engine(*models.batch(1, rank())).detach())


def hpz_sizes(size: int) -> Any:
    """Losses of three steps with hpZ groups of ``size`` (1: without), on shapes that divide by nothing."""
    try:
        engine = build(models.uneven(), config(zero_hpz_partition_size=size))
    except deepspeed.errors.ConfigError as error:
        return str(error)
    return [step(engine, number) for number in range(3)]


class Odd(nn.Module):
    """Uneven, one-element and zero-element, tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 9)
        self.mix = nn.Linear(9, 9)
        self.head = nn.Linear(9, models.VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.mix.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embed(tokens))) * self.scale + self.nothing.sum()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, -2).float(), targets.flatten())


def odd_model() -> nn.Module:
    return models.seeded(Odd)


def parity(steps: int, accumulation: int, clip: float) -> Any:
    engine = build(odd_model(), config(top_gradient_accumulation_steps=accumulation, top_gradient_clipping=clip))
    losses, norms = [], []
    for number in range(steps):
        total = 0.0
        for micro in range(accumulation):
            loss = engine(*models.batch(number, rank(), micro))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        losses.append(total)
        norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "weights": weights(engine)}
