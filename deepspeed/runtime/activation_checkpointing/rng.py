# SPDX-License-Identifier: Apache-2.0
"""Named random states of the accelerator, in the manner of Megatron-LM.

What must hold: `fork(name)` runs its body on the named state and leaves the surrounding state untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError

MODEL_PARALLEL_RNG = "model-parallel-rng"
_SEED_OFFSET = 2718
"""Megatron-LM's distance between the default seed and that of the named state."""


class CudaRNGStatesTracker:
    """Keeps random states under names. The name of the class is the one callers know; any accelerator works."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget every state."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the table; the states themselves are shared."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace the table."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from a seed.

        Raises:
            UsageError: the name or the seed is taken already.
        """
        if name in self._states:
            raise UsageError(f"random state {name!r} exists already; call reset() first")
        if seed in self._seeds:
            raise UsageError(f"seed {seed} is used by another random state already; choose another")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self._states[name] = accelerator.get_rng_state()
        self._seeds.add(seed)
        accelerator.set_rng_state(outside)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Run the body on the named state.

        Raises:
            UsageError: there is no state of this name.
        """
        if name not in self._states:
            raise UsageError(f"random state {name!r} does not exist; call model_parallel_cuda_manual_seed() first")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outside)

    @contextlib.contextmanager
    def replay(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Run the body on an earlier table, then go back to the present one."""
        present, self._states = self._states, dict(states)
        try:
            yield
        finally:
            self._states = present


def seed_all(tracker: CudaRNGStatesTracker, seed: int, model_parallel_rank: int) -> None:
    """Seed the default state equally on all model-parallel ranks, and the named one differently."""
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + _SEED_OFFSET + model_parallel_rank)
