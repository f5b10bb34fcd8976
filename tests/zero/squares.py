# SPDX-License-Identifier: Apache-2.0
"""Three steps of SGD on the mean square of an output, sharded and in plain torch: one part of the data a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import deepspeed

STEPS, RATE = 3, 0.1


def train_sharded(model: nn.Module, config: dict[str, Any], parts: torch.Tensor) -> list[float]:
    """Runs on every rank: this rank's losses on its part, `parts[rank]`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for _ in range(STEPS):
        loss = engine(parts[engine.global_rank]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def train_plain(model: nn.Module, parts: torch.Tensor) -> list[list[float]]:
    """The losses of every part, by step, in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen = []
    for _ in range(STEPS):
        losses = [model(part).square().mean() for part in parts]
        seen.append([loss.item() for loss in losses])
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return seen
