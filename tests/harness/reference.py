# SPDX-License-Identifier: Apache-2.0
"""What training should give: plain torch, one process, every rank's micro-batches one after the other.

The gradient of a step is the mean over ranks of the mean over micro-batches, which for batches of equal size is the
gradient of the concatenated global batch. There is no sharding, no bucket, no stream and no hook in this file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batches = Callable[[int, int, int], tuple[Any, ...]]
OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Trained:
    """`losses[step][rank]` is the mean over micro-batches; `norms[step]` is before clipping; `params` are full tensors
    in the model's dtype; `masters` are fp32; `grads` are those of the last step, averaged, before clipping."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def adam(params: Iterable[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr)


def adamw(params: Iterable[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)


def sgd(params: Iterable[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def train(
    build_model: Callable[[], nn.Module],
    batches: Batches,
    steps: int,
    world: int,
    accum: int = 1,
    clip: float = 0.0,
    optimizer_fn: OptimizerFn = adam,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
) -> Trained:
    """Train as `world` data-parallel ranks would; `batches(step, rank, micro)` are the arguments of the model's
    forward.

    In bf16 or fp16 the model computes in `dtype`, while gradients are averaged in fp32 and applied to fp32 masters.
    `reduce_dtype` rounds each rank's gradient to that dtype first, as a low-precision reduction does.
    """
    model = build_model().to(dtype)
    model.train()
    live = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: nn.Parameter(param.detach().float().clone()) for name, param in live.items()}
    optimizer = optimizer_fn(list(masters.values()))
    result = Trained()
    for step in range(steps):
        totals = {name: torch.zeros_like(master) for name, master in masters.items()}
        losses = []
        for rank in range(world):
            model.zero_grad(set_to_none=True)
            micro_losses = []
            for micro in range(accum):
                loss = model(*batches(step, rank, micro))
                (loss / accum).backward()
                micro_losses.append(loss.detach().float())
            losses.append(torch.stack(micro_losses).mean().item())
            for name, param in live.items():
                if param.grad is not None:
                    grad = param.grad if reduce_dtype is None else param.grad.to(reduce_dtype)
                    totals[name] += grad.float() / world
        result.losses.append(losses)
        for name, master in masters.items():
            master.grad = totals[name]
        result.grads = {name: total.clone() for name, total in totals.items()}
        limit = clip if clip > 0 else float("inf")
        result.norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), limit).item())
        optimizer.step()
        with torch.no_grad():
            for name, param in live.items():
                param.copy_(masters[name])
    result.params = {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}
    result.masters = {name: master.detach().clone() for name, master in masters.items()}
    result.state = {name: copy.deepcopy(optimizer.state[master]) for name, master in masters.items()}
    return result


def mean_losses(trained: Trained) -> list[float]:
    """The loss of each step, averaged over ranks."""
    return [sum(losses) / len(losses) for losses in trained.losses]
