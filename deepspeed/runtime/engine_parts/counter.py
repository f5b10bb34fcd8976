# SPDX-License-Identifier: Apache-2.0
"""Micro-batches, optimizer steps and samples; where an accumulation window ends."""

from __future__ import annotations

from deepspeed.runtime.batch import solve_batch


class StepCounter:
    """Counts of one engine.

    Attributes:
        micro_steps: finished micro-batches; ``global_steps``: optimizer steps, skipped ones included;
            ``global_samples``: samples over all ranks.
        boundary: what the user said of the current micro-batch, or None to count.
    """

    def __init__(self, accumulation: int, micro_batch: int, world: int) -> None:
        self.accumulation, self.micro_batch, self.world = accumulation, micro_batch, world
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.boundary: bool | None = None

    @property
    def train_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.world

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        if self.boundary is not None:
            return self.boundary
        return (self.micro_steps + 1) % self.accumulation == 0

    def finish_micro_step(self, stepped: bool) -> None:
        """A ``step()`` call ended; ``stepped`` if the optimizer's turn came."""
        if stepped:
            self.global_steps += 1
            self.global_samples += self.train_batch
        self.micro_steps += 1

    def begin_window(self) -> None:
        """The gradients of the running window were dropped: the next micro-batch is the first of one."""
        self.micro_steps -= self.micro_steps % self.accumulation

    def set_train_batch(self, train_batch: int) -> None:
        """Change the global batch by changing the accumulation steps.

        Raises:
            BatchConfigError: it is no multiple of micro batch times world size.
        """
        self.accumulation = solve_batch(train_batch, self.micro_batch, None, self.world).gradient_accumulation_steps
