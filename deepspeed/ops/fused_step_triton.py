# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind ``fused_step.apply``. Importing this module needs triton."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

if TYPE_CHECKING:
    from .fused_step import AdamStep, Shard

BLOCK = 2048
WARPS = 8
ALIGNED = 16
"""Elements; triton knows an integer argument as divisible by this, and then uses wide loads under the mask."""


@triton.jit
def _adam(
    grad_ptr,
    first_ptr,
    second_ptr,
    shard_ptr,
    master_ptr,
    scale_ptr,
    skip_ptr,
    corrections_ptr,
    lr,
    weight_decay,
    decay_rest,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    numel,
    DECOUPLED: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SHARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of elements. SPLIT: ``shard_ptr`` and ``master_ptr`` point to the int16 halves of the masters."""
    if tl.load(skip_ptr) != 0.0:
        return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < numel
    inverse = 1.0 / tl.load(scale_ptr)
    rate = lr / tl.load(corrections_ptr).to(tl.float32)
    root = tl.sqrt(tl.load(corrections_ptr + 1).to(tl.float32))

    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * inverse
    first = tl.load(first_ptr + offsets, mask=inside, other=0.0)
    second = tl.load(second_ptr + offsets, mask=inside, other=0.0)
    if SPLIT:
        high = tl.load(shard_ptr + offsets, mask=inside, other=0).to(tl.int32)
        low = tl.load(master_ptr + offsets, mask=inside, other=0).to(tl.int32)
        weight = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(master_ptr + offsets, mask=inside, other=0.0)

    if DECOUPLED:
        weight = weight * (1.0 - lr * weight_decay)
    else:
        grad = (grad + weight_decay * weight) + decay_rest * weight  # where they cancel, each bit of the decay counts
    first = beta1 * first + rest1 * grad
    second = beta2 * second + rest2 * grad * grad
    weight = weight - rate * first / (tl.sqrt(second) / root + eps)

    tl.store(first_ptr + offsets, first, mask=inside)
    tl.store(second_ptr + offsets, second, mask=inside)
    if SPLIT:
        bits = weight.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        bad = weight != weight
        high = tl.where(bad, 0x7FC0, high)
        low = tl.where(bad, 0, low)
        tl.store(shard_ptr + offsets, high.to(tl.int16), mask=inside)
        tl.store(master_ptr + offsets, low.to(tl.int16), mask=inside)
    else:
        tl.store(master_ptr + offsets, weight, mask=inside)
        if HAS_SHARD:
            tl.store(shard_ptr + offsets, weight.to(shard_ptr.dtype.element_ty), mask=inside)


def launch(work: Shard, scale: torch.Tensor, skip: torch.Tensor, corrections: torch.Tensor, options: AdamStep) -> None:
    """Queue one step of ``work`` on the current stream of its device.

    What is left of a multiple of ``ALIGNED`` goes by itself: the mask of the rest is then known to be whole for every
    16-byte access.
    """
    numel = work.grad.numel()
    even = numel - numel % ALIGNED
    if even:
        _launch(work if even == numel else work.cut(0, even), scale, skip, corrections, options)
    if even != numel:
        _launch(work.cut(even, numel), scale, skip, corrections, options)


def _launch(work: Shard, scale: torch.Tensor, skip: torch.Tensor, corrections: torch.Tensor, options: AdamStep) -> None:
    numel = work.grad.numel()
    master, shard = work.master, work.shard
    if work.low is not None and shard is not None:
        shard, master = shard.view(torch.int16), work.low
    decay = ctypes.c_float(options.weight_decay).value  # as the kernel gets it; torch's computes with doubles
    _adam[(triton.cdiv(numel, BLOCK),)](
        work.grad,
        work.exp_avg,
        work.exp_avg_sq,
        shard if shard is not None else master,
        master,
        scale,
        skip,
        corrections,
        float(options.lr),
        decay,
        options.weight_decay - decay,
        float(options.beta1),
        1.0 - options.beta1,
        float(options.beta2),
        1.0 - options.beta2,
        float(options.eps),
        numel,
        DECOUPLED=options.decoupled,
        SPLIT=work.low is not None,
        HAS_SHARD=shard is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
