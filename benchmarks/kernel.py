# SPDX-License-Identifier: Apache-2.0
"""The fused step alone: checked against torch, then timed beside torch's fused kernel: ``python -m benchmarks.kernel``.

Bytes per element that a way must move, with bf16 gradient and shard: one pass 28 (masters fp32) or 26 (split); torch's
fused kernel with the casts before and after it 44.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.ops import fused_step
from deepspeed.ops.fused_step import AdamStep, Shard

OPTIONS = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, True)
BYTES = {"one pass": 28, "one pass, split": 26, "torch, slices": 44}


def make(numel: int, device: torch.device, split: bool, seed: int = 0) -> Shard:
    """A shard with random contents."""
    generator = torch.Generator(device).manual_seed(seed)
    master = torch.randn(numel, device=device, generator=generator)
    grad = torch.randn(numel, device=device, generator=generator).to(torch.bfloat16)
    first = torch.randn(numel, device=device, generator=generator) * 0.1
    second = torch.rand(numel, device=device, generator=generator) * 0.1
    shard = torch.empty(numel, device=device, dtype=torch.bfloat16)
    low = None
    if split:
        low = torch.empty(numel, device=device, dtype=torch.int16)
        fused_step.split(master, shard, low)
    else:
        shard.copy_(master)
    step = torch.tensor(3.0, device=device)
    return Shard(grad, first, second, shard, None if split else master, low, step)


def torch_slices(work: Shard, scale: torch.Tensor, skip: torch.Tensor, piece: int = 1 << 26) -> None:
    """The same step with torch's fused kernel, as the core does where there is no Triton."""
    assert work.master is not None and work.shard is not None
    for start in range(0, work.grad.numel(), piece):
        part = work.cut(start, min(start + piece, work.grad.numel()))
        assert part.master is not None
        torch._fused_adamw_(
            [part.master], [part.grad.float()], [part.exp_avg], [part.exp_avg_sq], [], [part.step],
            lr=OPTIONS.lr, beta1=OPTIONS.beta1, beta2=OPTIONS.beta2, weight_decay=OPTIONS.weight_decay,
            eps=OPTIONS.eps, amsgrad=False, maximize=False, grad_scale=scale, found_inf=skip,
        )  # fmt: skip
    work.shard.copy_(work.master)


def check(device: torch.device, numel: int = 1_000_003) -> dict[str, float]:
    """Largest differences from torch's fused kernel after one step on random data; raises beyond rounding."""
    scale, skip = torch.tensor(2.5, device=device), torch.zeros((), device=device)
    expected = make(numel, device, False)
    torch_slices(expected, scale, skip)
    found = {}
    for split in (False, True):
        work = make(numel, device, split)
        fused_step.apply(work, scale, skip, OPTIONS)
        assert work.shard is not None
        master = work.master if work.low is None else fused_step.join(work.shard, work.low)
        assert master is not None and expected.master is not None
        torch.testing.assert_close(master, expected.master, rtol=2e-6, atol=5e-7)
        torch.testing.assert_close(work.exp_avg, expected.exp_avg, rtol=2e-6, atol=5e-7)
        torch.testing.assert_close(work.exp_avg_sq, expected.exp_avg_sq, rtol=2e-6, atol=5e-8)
        torch.testing.assert_close(work.shard, master.to(torch.bfloat16), rtol=2**-7, atol=0)
        found["split" if split else "fp32"] = float((master - expected.master).abs().max())
        before = master.clone()
        fused_step.apply(work, scale, torch.ones((), device=device), OPTIONS)
        after = work.master if work.low is None else fused_step.join(work.shard, work.low)
        assert after is not None and torch.equal(before, after), "a skipped step changed weights"
    return found


def timed(run: Callable[[], None], device: torch.device, repeat: int) -> float:
    """Median seconds of ``run``."""
    run()
    seconds = []
    for _ in range(repeat):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description=__doc__.split("\n")[0])
    parser.add_argument("--numel", type=int, default=0, help="elements (default: 426 M on CUDA, 4 M else)")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numel = options.numel or (426_000_000 if device.type == "cuda" else 4_000_000)
    kernel = fused_step.kernel_is_available(device.type)
    result: dict[str, Any] = {"numel": numel, "device": device.type, "kernel": kernel, "torch": torch.__version__}
    result["difference"] = check(device)
    print(f"kernel: {kernel}; largest difference from torch {result['difference']}", flush=True)
    scale, skip = torch.tensor(1.5, device=device), torch.zeros((), device=device)
    rows = result["rows"] = {}
    for name in BYTES:
        work = make(numel, device, split="split" in name)
        if "torch" in name:
            seconds = timed(lambda work=work: torch_slices(work, scale, skip), device, options.repeat)
        else:
            seconds = timed(lambda work=work: fused_step.apply(work, scale, skip, OPTIONS), device, options.repeat)
        rows[name] = {"ms": seconds * 1e3, "GB/s": numel * BYTES[name] / seconds / 1e9}
        print(f"{name:<18} {seconds * 1e3:8.3f} ms  {rows[name]['GB/s']:8.0f} GB/s", flush=True)
        del work
    if kernel:
        result["host_us"] = _host(device, scale, skip)
        print(f"host time of one launch: {result['host_us']:.0f} us")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernel.json").write_text(json.dumps(result, indent=1))
    return 0


def _host(device: torch.device, scale: torch.Tensor, skip: torch.Tensor) -> float:
    """Microseconds of the host for one step of a small shard."""
    work = make(4096, device, split=True)
    for _ in range(10):
        fused_step.apply(work, scale, skip, OPTIONS)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        fused_step.apply(work, scale, skip, OPTIONS)
    return (time.perf_counter() - start) * 1e4


if __name__ == "__main__":
    sys.exit(main())
