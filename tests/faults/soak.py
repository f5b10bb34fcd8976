# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the soak do: train to the end from the last checkpoint, unless they are killed before."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.core import wire
from tests.faults.scenarios import build, config, full_weights, rank, step
from tests.harness import models

SEAMS = ("gather", "reduce_scatter", "exchange")


class Fate:
    """Delays one collective in fifty by up to 10 ms, and kills this process where it is told to."""

    def __init__(self, drawn: random.Random, death: list[Any] | None) -> None:
        self.drawn, self.death = drawn, death
        self.left = -1
        for name in SEAMS:
            setattr(wire, name, self._disturbed(getattr(wire, name)))

    def begin(self, number: int) -> None:
        """The step ``number`` begins."""
        if self.death is None or number != self.death[1]:
            return
        if self.death[2] == "collective":
            self.left = self.death[3]
        else:
            timer = threading.Timer(self.death[3], os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def _disturbed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left >= 0:
                self.left -= 1
                if self.left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            if self.drawn.random() < 0.02:
                time.sleep(0.01 * self.drawn.random())
            return original(*args, **kwargs)

        return call


def train(folder: str, steps: int, every: int, attempt: int, death: list[Any] | None) -> Any:
    """Train ``steps`` steps, saving every so many; resumes where a checkpoint is.

    Args:
        attempt: seeds the delays before collectives.
        death: (rank, step, "collective" or "time", number of the collective within the step or seconds), or None.
    """
    engine = build(models.blocks_non_reentrant(), config(zero_hpz_partition_size=2, top_gradient_clipping=0.5))
    if os.path.exists(os.path.join(folder, "latest")):
        engine.load_checkpoint(folder)
    start = engine.global_steps
    fate = Fate(random.Random(1000 * attempt + rank()), death if death and death[0] == rank() else None)
    for number in range(start, steps):
        fate.begin(number)
        step(engine, number)
        if (number + 1) % every == 0:
            engine.save_checkpoint(folder)
    return {"start": start, "weights": full_weights(engine), "steps": engine.global_steps}
