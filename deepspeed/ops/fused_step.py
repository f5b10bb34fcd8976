# SPDX-License-Identifier: Apache-2.0
"""One pass of Adam or AdamW over a flat shard: gradient in, master weights, moments and 16-bit shard out.

The gradient is read in its own dtype and divided by a scalar on the device (loss scale times clip factor); a device
flag skips the step; so nothing here waits for the device. On CUDA one Triton kernel does it all, 28 bytes of traffic a
parameter with bf16 gradients and shards (torch's fused kernel plus the casts around it: 44). ``reference`` is the same
arithmetic in torch operations, for devices without the kernel and for tests.

Master weights come in two layouts:

- ``master``: a 1-D fp32 tensor.
- *split*, bf16 only: the shard holds the upper half of each fp32 master, rounded, and ``low`` (int16) the difference.
  ``join`` gives the fp32 values back, bit for bit, so training is the same with two bytes a parameter less. Halves
  round away from zero: rounded to even, the difference of a tie would not fit sixteen bits.

Source of the arithmetic: Loshchilov and Hutter, arXiv:1711.05101, in the order of operations of ``torch.optim.AdamW``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from deepspeed.errors import UsageError

__all__ = ["AdamStep", "Shard", "apply", "join", "kernel_is_available", "reference", "split"]

SLICE = 1 << 24
"""Elements that ``reference``, ``join`` and ``split`` treat at a time: bounds their temporary memory."""


@dataclass(frozen=True)
class AdamStep:
    """Hyper-parameters of one step. ``decoupled``: AdamW, else weight decay is added to the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


@dataclass(frozen=True)
class Shard:
    """What one step reads and writes: 1-D tensors of one length on one device.

    Attributes:
        grad: any floating dtype, read only.
        exp_avg, exp_avg_sq: fp32 moments.
        shard: the weights in their own dtype, or None where ``master`` is all there is.
        master: fp32, or None in the split layout; ``low``: int16 in the split layout, else None.
        step: 0-d float, already counting the step to be taken.
    """

    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    shard: torch.Tensor | None
    master: torch.Tensor | None
    low: torch.Tensor | None
    step: torch.Tensor

    def __post_init__(self) -> None:
        if (self.master is None) == (self.low is None):
            raise UsageError("fused step: either fp32 masters or their low halves, not both")
        if self.low is not None and (self.shard is None or self.shard.dtype is not torch.bfloat16):
            raise UsageError("fused step: low halves go with a bf16 shard")

    def cut(self, start: int, end: int) -> Shard:
        """Views of the elements from ``start`` to ``end``."""
        return Shard(
            self.grad[start:end],
            self.exp_avg[start:end],
            self.exp_avg_sq[start:end],
            None if self.shard is None else self.shard[start:end],
            None if self.master is None else self.master[start:end],
            None if self.low is None else self.low[start:end],
            self.step,
        )


@functools.cache
def kernel_is_available(device_type: str) -> bool:
    """Whether the one-pass kernel runs on this kind of device (CUDA with Triton)."""
    if device_type != "cuda":
        return False
    try:
        from . import fused_step_triton  # noqa: F401
    except ImportError:
        return False
    return True


def apply(
    work: Shard,
    scale: torch.Tensor,
    skip: torch.Tensor,
    options: AdamStep,
    corrections: torch.Tensor | None = None,
) -> None:
    """Step ``work`` in place; queued on the current stream.

    Args:
        scale: 0-d float32, what the gradient is divided by.
        skip: 0-d float32; unless zero, nothing is changed.
        corrections: ``bias_corrections`` where the caller has them already.
    """
    if corrections is None:
        corrections = bias_corrections(work.step, options)
    if kernel_is_available(work.grad.device.type):
        from . import fused_step_triton

        fused_step_triton.launch(work, scale, skip, corrections, options)
    else:
        reference(work, scale, skip, options)


def bias_corrections(step: torch.Tensor, options: AdamStep) -> torch.Tensor:
    """``1 - beta ** step`` for both betas: 2 doubles on the device of ``step``."""
    return 1.0 - _betas(options.beta1, options.beta2, step.device) ** step


@functools.lru_cache(maxsize=64)
def _betas(beta1: float, beta2: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([beta1, beta2], dtype=torch.float64, device=device)


def reference(work: Shard, scale: torch.Tensor, skip: torch.Tensor, options: AdamStep) -> None:
    """``apply`` in torch operations. Where the flag may skip, this waits for the device to know it."""
    if float(skip):
        return
    corrections = bias_corrections(work.step, options).to(torch.float32)
    for start in range(0, work.grad.numel(), SLICE):
        _reference(work.cut(start, min(start + SLICE, work.grad.numel())), scale, corrections, options)


def _reference(work: Shard, scale: torch.Tensor, corrections: torch.Tensor, options: AdamStep) -> None:
    grad = work.grad.to(torch.float32) / scale
    if work.low is not None:
        assert work.shard is not None
        weights = join(work.shard, work.low)
    else:
        assert work.master is not None
        weights = work.master
    if options.decoupled:
        weights.mul_(1.0 - options.lr * options.weight_decay)
    else:
        grad = grad + options.weight_decay * weights
    work.exp_avg.mul_(options.beta1).add_(grad, alpha=1.0 - options.beta1)
    work.exp_avg_sq.mul_(options.beta2).addcmul_(grad, grad, value=1.0 - options.beta2)
    denominator = (work.exp_avg_sq.sqrt() / corrections[1].sqrt()).add_(options.eps)
    weights.sub_(options.lr / corrections[0] * work.exp_avg / denominator)
    if work.low is not None:
        assert work.shard is not None
        split(weights, work.shard, work.low)
    elif work.shard is not None:
        work.shard.copy_(weights)


# -- split masters -------------------------------------------------------------------------------------------------


def join(shard: torch.Tensor, low: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The fp32 master weights of a split layout (bf16 ``shard``, int16 ``low``), bit for bit."""
    out = torch.empty(shard.shape, dtype=torch.float32, device=shard.device) if out is None else out
    for start in range(0, shard.numel(), SLICE):
        end = min(start + SLICE, shard.numel())
        high = shard[start:end].view(torch.int16).to(torch.int32)
        out[start:end].copy_(high.bitwise_left_shift_(16).add_(low[start:end]).view(torch.float32))
    return out


def split(master: torch.Tensor, shard: torch.Tensor, low: torch.Tensor) -> None:
    """Write fp32 ``master`` as bf16 ``shard``, rounded half away from zero, and int16 ``low``. NaN stays NaN."""
    for start in range(0, master.numel(), SLICE):
        end = min(start + SLICE, master.numel())
        values = master[start:end]
        bits = values.view(torch.int32)
        high = (bits + 0x8000).bitwise_right_shift_(16)
        rest = bits - high.bitwise_left_shift(16)
        nan = values.isnan()
        shard[start:end].view(torch.int16).copy_(high.masked_fill_(nan, 0x7FC0))
        low[start:end].copy_(rest.masked_fill_(nan, 0))
