# SPDX-License-Identifier: Apache-2.0
"""Promise: the one-pass kernel is torch's fused AdamW on the same data, and split masters are fp32 masters, exactly."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from deepspeed.ops import fused_step
from deepspeed.ops.fused_step import AdamStep, Shard
from tests.gpu import place

SIZES = [1, 127, 1025, (1 << 12 if place.ON_CPU else 1 << 22) + 3]
SCALE = 4.0


def _values(seed: int, numel: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(place.device())


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=place.device())


def _work(numel: int, split: bool, grad_dtype: torch.dtype, dtype: torch.dtype = torch.bfloat16) -> Shard:
    master = _values(1, numel)
    shard, low = torch.empty_like(master, dtype=dtype), None
    if split:
        low = torch.empty_like(master, dtype=torch.int16)
        fused_step.split(master, shard, low)
    else:
        shard.copy_(master)
    zeros = torch.zeros_like(master)
    grad = torch.zeros_like(master, dtype=grad_dtype)
    return Shard(grad, zeros, zeros.clone(), shard, None if split else master, low, _scalar(0.0))


def _master(work: Shard) -> torch.Tensor:
    if work.master is not None:
        return work.master
    assert work.shard is not None and work.low is not None
    return fused_step.join(work.shard, work.low)


def _ours(work: Shard, grads: list[torch.Tensor], options: AdamStep, skip: float = 0.0) -> None:
    for grad in grads:
        work.grad.copy_(grad)
        work.step.add_(1.0 - skip)
        fused_step.apply(work, _scalar(SCALE), _scalar(skip), options)


def _torchs(
    grads: list[torch.Tensor], options: AdamStep, numel: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    param = torch.nn.Parameter(_values(1, numel).to(dtype))
    cls = torch.optim.AdamW if options.decoupled else torch.optim.Adam
    betas = (options.beta1, options.beta2)
    optimizer = cls([param], options.lr, betas, options.eps, options.weight_decay, fused=True)
    for grad in grads:
        param.grad = grad.to(dtype) / SCALE
        optimizer.step()
    return param.detach()


def _compare() -> list[str]:
    problems = []
    decoupled = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, True)
    joined = AdamStep(1e-2, 0.8, 0.95, 1e-6, 0.1, False)
    for numel, dtype, options in itertools.product(
        SIZES, (torch.float32, torch.bfloat16, torch.float16), (decoupled, joined)
    ):
        what = f"{numel} elements, gradients in {dtype}, decoupled {options.decoupled}"
        grads = [_values(seed, numel, 0.1).to(dtype) for seed in (2, 3, 4)]
        wanted, exact = _torchs(grads, options, numel), _torchs(grads, options, numel, torch.float64)
        whole, halves = _work(numel, False, dtype), _work(numel, True, dtype)
        _ours(whole, grads, options)
        _ours(halves, grads, options)
        # where gradient and weight decay cancel, the order of operations decides the last bits and Adam's quotient
        # magnifies them, in torch's kernel as in ours: neither may be further from the exact result than the other,
        # beyond a rounding of the weight in each step
        off, torchs = ((each - exact).abs().max().item() for each in (_master(whole).double(), wanted.double()))
        rounding = len(grads) * torch.finfo(torch.float32).eps * exact.abs().max().item()
        if not off <= max(2 * torchs, rounding):
            problems.append(f"{what}: masters off by {off:.1e}, torch's kernel by {torchs:.1e}")
        for name, a, b in (
            ("masters", _master(whole), _master(halves)),
            ("exp_avg", whole.exp_avg, halves.exp_avg),
            ("exp_avg_sq", whole.exp_avg_sq, halves.exp_avg_sq),
        ):
            if not torch.equal(a, b):
                problems.append(f"{what}: split and fp32 masters differ in {name}")
        assert whole.shard is not None
        if not torch.equal(whole.shard, _master(whole).to(torch.bfloat16)):
            problems.append(f"{what}: the shard is not the rounded master")
        before = [t.clone() for t in (_master(halves), halves.exp_avg, halves.exp_avg_sq, halves.step)]
        _ours(halves, [torch.full_like(grads[0], float("nan"))], options, skip=1.0)
        after = (_master(halves), halves.exp_avg, halves.exp_avg_sq, halves.step)
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            problems.append(f"{what}: a skipped step changed something")
    return problems


@place.needs(1)
def test_equals_torchs_fused_adamw_and_split_masters_are_exact() -> None:
    [problems] = place.launch(_compare, 1)
    assert not problems, "\n".join(problems)


def _uses_kernel() -> bool:
    return fused_step.kernel_is_available("cuda")


@place.cuda_only
@place.needs(1)
def test_the_kernel_is_what_runs() -> None:
    assert place.launch(_uses_kernel, 1) == [True], "Triton is missing, so the tests above saw the fallback"


def _speed() -> dict[str, Any]:
    numel = 1 << 27
    options = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True)
    found = {}
    for split in (False, True):
        work = _work(numel, split, torch.bfloat16)
        found["split" if split else "fp32 masters"] = _milliseconds(
            lambda work=work: fused_step.apply(work, _scalar(1.0), _scalar(0.0), options)
        )
        del work
    param = torch.nn.Parameter(_values(1, numel))
    optimizer = torch.optim.AdamW([param], 1e-3, fused=True)
    grad, shard = torch.zeros(numel, dtype=torch.bfloat16, device=place.device()), torch.empty_like(param).bfloat16()

    def step() -> None:
        param.grad = grad.float()
        optimizer.step()
        shard.copy_(param.detach())

    found["torch fused and casts"] = _milliseconds(step)
    return found


def _milliseconds(call: Any, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


@place.cuda_only
@place.needs(1)
def test_it_is_faster_than_torchs_kernel_with_the_casts() -> None:
    [found] = place.launch(_speed, 1)
    place.note("step of 134 M parameters: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))
    assert max(found["split"], found["fp32 masters"]) < found["torch fused and casts"]
