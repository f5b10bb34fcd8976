# SPDX-License-Identifier: Apache-2.0
"""The calls of ``scenarios.Calls`` in plain torch: one process, every rank's batch, gradients averaged."""

from __future__ import annotations

from typing import Any

import torch

from tests.harness import models


class PlainCalls:
    """What a rank's calls must give; ``loss`` values are rank 0's. Every backward is divided by the accumulation steps;
    every ``accumulation``-th call of ``step`` that is not refused steps."""

    def __init__(self, world: int, accumulation: int) -> None:
        self.world, self.accumulation, self.micro = world, accumulation, 0
        self.model = models.blocks()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.number = 0
        self.has_gradients = False

    def _backward(self, number: int, times: int = 1) -> None:
        for rank in range(self.world):
            (times * self.model(*models.batch(number, rank)) / (self.world * self.accumulation)).backward()
        self.has_gradients = True

    def _loss(self, number: int) -> float:
        with torch.no_grad():
            return float(self.model(*models.batch(number, 0)))

    def train(self) -> Any:
        self.number += 1
        self._backward(self.number)

    plain_backward = train

    def double(self) -> Any:
        self.number += 1
        self._backward(self.number, times=2)

    def look(self) -> Any:
        self.number += 1
        return self._loss(self.number)

    forward_only = look

    def two_forwards(self) -> Any:
        self.number += 2
        self._backward(self.number - 1)

    def step(self) -> Any:
        if (self.micro + 1) % self.accumulation:
            self.micro += 1
            return "stepped"
        if not self.has_gradients:
            return "refused: step() without gradients: call"
        self.micro += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.has_gradients = False
        return "stepped"

    def run(self, names: list[str]) -> dict[str, Any]:
        """Every call's outcome, and the weights at the end."""
        seen = [getattr(self, name)() for name in names]
        return {"seen": seen, "weights": {name: p.detach().tolist() for name, p in self.model.named_parameters()}}
