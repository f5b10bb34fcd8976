# SPDX-License-Identifier: Apache-2.0
"""Promise: in bf16 and fp16 training equals a reference with low-precision parameters and fp32 masters, up to rounding.

The reference rounds where the engine rounds: parameters and gradients in the low precision, the average, the clip and
the step in fp32. fp16 scales the loss; a step whose gradients overflow is skipped by all ranks and changes nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from tests.dist.support import full_grads, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks

BF16 = {"bf16": {"enabled": True}}
EXACT = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
STEPS = 10


def losses_of(configs: list[dict[str, Any]], accum: int) -> list[list[float]]:
    found = []
    for config in configs:
        engine = initialize(models.uneven(), settings(accum=accum, clip=0.5, **config))
        losses, _ = train(engine, models.batch, range(STEPS), accum)
        found.append(losses)
        for p in engine.module.parameters():
            assert p.ds_tensor.dtype == torch.bfloat16
        for master, shard in zip(
            engine.optimizer.fp32_partitioned_groups_flat, engine.optimizer.fp16_partitioned_groups_flat, strict=True
        ):
            assert master.dtype == torch.float32
            assert torch.equal(shard.float(), master.bfloat16().float()), "a shard is not its rounded master"
        engine.destroy()
    return found


@pytest.mark.parametrize("accum", [1, 4])
def test_bf16(accum: int) -> None:
    configs = [{**BF16, **EXACT}, BF16, {**BF16, "communication_data_type": "fp32"}, {**BF16, **EXACT, "hpz": 2}]
    wanted = reference.train(models.uneven, models.batch, STEPS, 2, accum, 0.5, reference.adam, torch.bfloat16)
    for rank, found in enumerate(run_ranks(losses_of, 2, configs, accum)):
        for config, losses in zip(configs, found, strict=True):
            theirs = [step[rank] for step in wanted.losses]
            assert losses[0] == pytest.approx(theirs[0], rel=1e-6), config
            assert losses == pytest.approx(theirs, rel=1e-2), config
        assert found[0] == found[3], "hpZ changed a bit"
        assert found[0] == pytest.approx([step[rank] for step in wanted.losses], rel=4e-3)


def first_gradients(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of one backward, and those of plain torch with the same rounding."""
    engine = initialize(models.uneven(), settings(**config))
    dtype = next(engine.module.parameters()).dtype
    scale = engine.optimizer.cur_scale
    loss = engine(*models.batch(0, dist.get_rank()))
    engine.backward(loss)
    plain = models.uneven().to(dtype)
    (plain(*models.batch(0, dist.get_rank())).float() * scale).backward()
    wanted = {}
    for name, param in plain.named_parameters():
        grad = param.grad.float()
        dist.all_reduce(grad)
        wanted[name] = grad / dist.get_world_size() / scale
    return full_grads(engine.module), wanted


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_are_averaged_and_unscaled(precision: str) -> None:
    config: dict[str, Any] = dict(EXACT)
    if precision == "bf16":
        config.update(BF16)
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 128}
    for got, wanted in run_ranks(first_gradients, 2, config):
        for name, grad in wanted.items():
            assert got[name].dtype == torch.float32
            torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-7)


FP16 = {
    "enabled": True,
    "initial_scale_power": 22,
    "loss_scale_window": 3,
    "hysteresis": 1,
    "min_loss_scale": 1,
}


def fp16_run(zero: dict[str, Any]) -> list[tuple[float, float, bool, int, int, float]]:
    engine = initialize(models.uneven(), settings(fp16=FP16, clip=0.5, zero=zero, **EXACT))
    rows = []
    for step in range(STEPS):
        scale = engine.optimizer.cur_scale
        before = full_params(engine.module)
        loss = engine(*models.batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        norm = float(engine.get_global_grad_norm())
        skipped = engine.optimizer.overflow
        assert engine.was_step_applied() is not skipped
        if skipped:
            after = full_params(engine.module)
            assert all(torch.equal(before[name], after[name]) for name in before), "a skipped step changed weights"
        rows.append((loss.item(), scale, skipped, engine.skipped_steps, engine.global_steps, norm))
    engine.destroy()
    return rows


def fp16_reference(world: int) -> list[list[tuple[float, float, bool]]]:
    model = models.uneven().half()
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = reference.adam(masters.values())
    scaler = DynamicLossScaler(2.0**22, 3, 1, 1, False)
    rows: list[list[tuple[float, float, bool]]] = [[] for _ in range(world)]
    for step in range(STEPS):
        total = {name: torch.zeros_like(p) for name, p in masters.items()}
        losses = []
        for rank in range(world):
            model.zero_grad()
            loss = model(*models.batch(step, rank))
            (loss.float() * scaler.loss_scale).backward()
            losses.append(loss.item())
            for name, p in model.named_parameters():
                total[name] += p.grad.float() / world / scaler.loss_scale
        overflow = not all(bool(torch.isfinite(t).all()) for t in total.values())
        for rank in range(world):
            rows[rank].append((losses[rank], scaler.loss_scale, overflow))
        scaler.update_scale(overflow)
        if overflow:
            continue
        for name, master in masters.items():
            master.grad = total[name]
        torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return rows


def test_fp16_skips_overflowing_steps() -> None:
    wanted = fp16_reference(2)
    for rank, rows in enumerate(run_ranks(fp16_run, 2, {})):
        skips = 0
        for step, (loss, scale, skipped, counted, total, norm) in enumerate(rows):
            their_loss, their_scale, their_skip = wanted[rank][step]
            assert (scale, skipped) == (their_scale, their_skip), f"step {step}"
            assert loss == pytest.approx(their_loss, rel=3e-3), f"step {step}"
            skips += skipped
            assert counted == skips and total == step + 1
            assert (norm == float("inf")) == skipped
        assert 0 < skips < STEPS, "the case must skip some steps and apply others"


def test_fp16_with_offloaded_optimizer() -> None:
    plain, offloaded = (
        run_ranks(fp16_run, 2, {}),
        run_ranks(fp16_run, 2, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    )
    for a, b in zip(plain, offloaded, strict=True):
        assert [row[:5] for row in a] == [row[:5] for row in b]


def autocast_run() -> tuple[list[float], torch.dtype]:
    engine = initialize(models.uneven(), settings(torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    seen: list[torch.dtype] = []
    engine.module.up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses, _ = train(engine, models.batch, range(STEPS), 1)
    assert next(engine.module.parameters()).dtype == torch.float32
    return losses, seen[0]


class Autocast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.uneven()

    def forward(self, *data: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*data)


def test_torch_autocast() -> None:
    wanted = reference.train(Autocast, models.batch, STEPS, 2)
    for rank, (losses, dtype) in enumerate(run_ranks(autocast_run, 2)):
        assert dtype == torch.bfloat16
        assert losses == pytest.approx([step[rank] for step in wanted.losses], rel=1e-3)


def infinite_gradient() -> dict[str, Any]:
    """bf16: an infinite gradient on one rank skips the step on all, and a schedule does not move."""
    config = settings(
        **BF16,
        scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1, "warmup_num_steps": 10}},
    )
    engine = initialize(models.uneven(), config)
    rates = []
    for step in range(4):
        loss = engine(*models.batch(step, dist.get_rank()))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        rates.append(engine.get_lr()[0])
    return {
        "rates": rates,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "iteration": engine.lr_scheduler.last_batch_iteration,
        "finite": all(bool(torch.isfinite(p).all()) for p in full_params(engine.module).values()),
    }


def test_a_non_finite_gradient_anywhere_skips_everywhere() -> None:
    for seen in run_ranks(infinite_gradient, 2):
        assert seen["skipped"] == 1 and seen["steps"] == 4 and seen["finite"]
        assert seen["iteration"] == 2
        assert seen["rates"][0] == seen["rates"][1] < seen["rates"][2] < seen["rates"][3]
