# SPDX-License-Identifier: Apache-2.0
"""The fused step equals torch's AdamW and Adam; split masters are exact; the kernel equals its reference."""

from __future__ import annotations

import os

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.ops import fused_step
from deepspeed.ops.fused_step import AdamStep, Shard

NUMEL = 5003
CUDA = torch.device("cuda")
CPU = torch.device("cpu")


def _values(seed: int, numel: int = NUMEL, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def _shard(grad: torch.Tensor, split: bool, dtype: torch.dtype = torch.bfloat16, master: torch.Tensor | None = None):
    master = _values(1) if master is None else master
    master = master.to(grad.device)
    shard = torch.empty_like(master, dtype=dtype)
    low = None
    if split:
        low = torch.empty_like(master, dtype=torch.int16)
        fused_step.split(master, shard, low)
    else:
        shard.copy_(master)
    zeros = torch.zeros_like(master)
    step = torch.zeros((), device=grad.device)
    return Shard(grad, zeros, zeros.clone(), shard, None if split else master.clone(), low, step)


def _master(work: Shard) -> torch.Tensor:
    if work.master is not None:
        return work.master
    assert work.shard is not None and work.low is not None
    return fused_step.join(work.shard, work.low)


def _scalar(value: float, device: torch.device = CPU) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _torch_steps(options: AdamStep, grads: list[torch.Tensor], scale: float, start: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(start.clone())
    cls = torch.optim.AdamW if options.decoupled else torch.optim.Adam
    optimizer = cls(
        [param], options.lr, (options.beta1, options.beta2), options.eps, options.weight_decay, foreach=False
    )
    for grad in grads:
        param.grad = grad.float() / scale
        optimizer.step()
    return param


def _run(options: AdamStep, split: bool, device: torch.device, step) -> tuple[Shard, torch.Tensor]:
    grads = [_values(seed, scale=0.1).to(torch.bfloat16) for seed in (2, 3, 4)]
    work = _shard(grads[0].to(device, copy=True), split)
    for grad in grads:
        work.grad.copy_(grad)
        work.step.add_(1)
        step(work, _scalar(4.0, device), _scalar(0.0, device), options)
    return work, _torch_steps(options, grads, 4.0, _values(1)).detach()


OPTIONS = [AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, True), AdamStep(1e-2, 0.8, 0.95, 1e-6, 0.1, False)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("split", [False, True])
def test_three_steps_equal_torch(options: AdamStep, split: bool) -> None:
    work, expected = _run(options, split, CPU, fused_step.apply)
    torch.testing.assert_close(_master(work), expected, rtol=2e-6, atol=2e-7)
    assert work.shard is not None
    torch.testing.assert_close(work.shard.float(), expected, rtol=2**-8, atol=1e-6)


def test_both_layouts_train_alike_bit_for_bit() -> None:
    plain, _ = _run(OPTIONS[0], False, CPU, fused_step.apply)
    halves, _ = _run(OPTIONS[0], True, CPU, fused_step.apply)
    assert torch.equal(_master(plain), _master(halves))


def test_a_skipped_step_changes_nothing() -> None:
    work = _shard(_values(2).to(torch.bfloat16), split=True)
    before = [t.clone() for t in (_master(work), work.exp_avg, work.exp_avg_sq)]
    fused_step.apply(work, _scalar(1.0), _scalar(1.0), OPTIONS[0])
    assert all(torch.equal(a, b) for a, b in zip(before, (_master(work), work.exp_avg, work.exp_avg_sq), strict=True))


def test_split_masters_are_exact_for_every_pattern_of_bits() -> None:
    high = torch.arange(-(1 << 15), 1 << 15, 7, dtype=torch.int32).bitwise_left_shift(16)
    ends = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    master = (high[:, None] + ends).flatten().view(torch.float32)
    shard, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    fused_step.split(master, shard, low)
    nan = master.isnan()
    joined = fused_step.join(shard, low)
    assert torch.equal(joined[~nan].view(torch.int32), master[~nan].view(torch.int32))
    assert bool(joined[nan].isnan().all()) and bool(shard[nan].isnan().all())
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(shard[~ties & ~nan], master[~ties & ~nan].to(torch.bfloat16))


def test_long_shards_are_treated_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _run(OPTIONS[0], True, CPU, fused_step.apply)
    monkeypatch.setattr(fused_step, "SLICE", 100)
    cut, _ = _run(OPTIONS[0], True, CPU, fused_step.apply)
    assert torch.equal(_master(whole), _master(cut)) and torch.equal(whole.exp_avg_sq, cut.exp_avg_sq)


@pytest.mark.parametrize("both", [True, False])
def test_layouts_exclude_each_other(both: bool) -> None:
    t = torch.zeros(4)
    low = torch.zeros(4, dtype=torch.int16) if both else None
    with pytest.raises(UsageError, match="either fp32 masters or their low halves"):
        Shard(t, t, t, t, t if both else None, low, t[0])


def test_low_halves_need_bf16() -> None:
    t = torch.zeros(4)
    with pytest.raises(UsageError, match="bf16"):
        Shard(t, t, t, t.half(), None, torch.zeros(4, dtype=torch.int16), t[0])


# -- the kernel itself: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = CPU if INTERPRETED else CUDA


def _kernel(work: Shard, scale: torch.Tensor, skip: torch.Tensor, options: AdamStep) -> None:
    from deepspeed.ops import fused_step_triton

    fused_step_triton.launch(work, scale, skip, fused_step.bias_corrections(work.step, options), options)


# The interpreter runs the kernel on a CPU; otherwise these are tests for a GPU.
needs_kernel = pytest.mark.filterwarnings("ignore") if INTERPRETED else pytest.mark.gpu


@needs_kernel
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("split", [False, True])
def test_the_kernel_equals_torch(options: AdamStep, split: bool) -> None:
    work, expected = _run(options, split, KERNEL_DEVICE, _kernel)
    torch.testing.assert_close(_master(work).cpu(), expected, rtol=2e-6, atol=5e-7)
    mirror, _ = _run(options, split, CPU, fused_step.reference)
    torch.testing.assert_close(work.exp_avg.cpu(), mirror.exp_avg, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(work.exp_avg_sq.cpu(), mirror.exp_avg_sq, rtol=2e-6, atol=1e-9)
    if not split:
        assert work.shard is not None and work.master is not None
        rounded = work.master.to(torch.bfloat16)
        if INTERPRETED:  # the interpreter cuts where the compiled kernel rounds
            torch.testing.assert_close(work.shard, rounded, rtol=2**-7, atol=0)
        else:
            assert torch.equal(work.shard, rounded)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_takes_other_gradients_and_shards(dtype: torch.dtype) -> None:
    grad = _values(2, scale=0.1).to(dtype)
    kernel, mirror = (_shard(grad.to(device), False, torch.float16) for device in (KERNEL_DEVICE, CPU))
    for work, step in ((kernel, _kernel), (mirror, fused_step.reference)):
        work.step.add_(1)
        step(work, _scalar(2.0, work.grad.device), _scalar(0.0, work.grad.device), OPTIONS[0])
    torch.testing.assert_close(_master(kernel).cpu(), _master(mirror), rtol=2e-6, atol=2e-7)


@needs_kernel
def test_the_kernel_heeds_the_flag_and_keeps_nan() -> None:
    grad = _values(2).to(torch.bfloat16)
    grad[7] = float("nan")
    work = _shard(grad.to(KERNEL_DEVICE), split=True)
    before = _master(work).clone()
    work.step.add_(1)
    _kernel(work, _scalar(1.0, KERNEL_DEVICE), _scalar(1.0, KERNEL_DEVICE), OPTIONS[0])
    assert torch.equal(_master(work), before)
    _kernel(work, _scalar(1.0, KERNEL_DEVICE), _scalar(0.0, KERNEL_DEVICE), OPTIONS[0])
    assert _master(work).isnan().nonzero().flatten().tolist() == [7]
