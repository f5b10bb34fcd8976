# SPDX-License-Identifier: Apache-2.0
"""What plain torch makes of a shape: every rank's forwards and backwards one after the other, gradients averaged."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.dist.shapes import Shape
from tests.harness import reference


@dataclasses.dataclass
class Outcome:
    """Losses by step, and the averaged gradients of the last step; weights at the end."""

    losses: list[list[float]]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def by_plain_torch(shape: Shape, world: int, steps: int) -> list[Outcome]:
    """What every rank should see."""
    model = shape.build()
    model.train()
    live = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = reference.sgd(live.values())
    losses: list[list[list[float]]] = [[] for _ in range(world)]
    grads: dict[str, Tensor] = {}
    buffers = [{key: value.clone() for key, value in model.named_buffers()} for _ in range(world)]
    for step in range(steps):
        total = {name: torch.zeros_like(param) for name, param in live.items()}
        for rank in range(world):
            for key, value in model.named_buffers():
                value.copy_(buffers[rank][key])
            model.zero_grad(set_to_none=True)
            seen = shape.step(
                model, lambda loss, retain_graph=False: loss.backward(retain_graph=retain_graph), step, rank
            )
            losses[rank].append([float(loss.detach()) for loss in seen])
            for name, param in live.items():
                if param.grad is not None:
                    total[name] += param.grad.to_dense() / world
            buffers[rank] = {key: value.clone() for key, value in model.named_buffers()}
        for name, param in live.items():
            param.grad = total[name].clone()
        grads = total
        optimizer.step()
    params = {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}
    return [Outcome(losses[rank], grads, params) for rank in range(world)]
