# SPDX-License-Identifier: Apache-2.0
"""Solve train_batch_size = micro_batch * accumulation_steps * world_size (pure).

What must hold: the returned triple satisfies the equation exactly, for the true data-parallel world size; a triple
that cannot is an error that names every key, every number and a value that would work.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed.errors import BatchConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """Samples per optimizer step over all ranks, samples per rank and micro-batch, micro-batches per step."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Complete the batch triple from the values that are given (None: not given).

    Any two give the third; only `train` or only `micro` implies one accumulation step.

    Raises:
        BatchConfigError: a value is below 1, both batch sizes are missing, a division leaves a rest, or the three
            given values contradict each other.
    """
    for key, value in ((TRAIN, train), (MICRO, micro), (ACCUMULATION, accumulation)):
        if value is not None and value < 1:
            raise BatchConfigError(f"{key}: must be a positive integer, got {value}")
    if world_size < 1:
        raise BatchConfigError(f"world size: must be at least 1, got {world_size}")

    if train is None:
        if micro is None:
            raise BatchConfigError(f"{TRAIN}: neither {TRAIN} nor {MICRO} is given; set at least one of them")
        accumulation = 1 if accumulation is None else accumulation
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)

    if micro is None:
        accumulation = 1 if accumulation is None else accumulation
        micro = _divide(train, accumulation * world_size, f"{ACCUMULATION} {accumulation} x world size {world_size}")
    elif accumulation is None:
        accumulation = _divide(train, micro * world_size, f"{MICRO} {micro} x world size {world_size}")
    elif train != micro * accumulation * world_size:
        right = micro * accumulation * world_size
        raise BatchConfigError(
            f"{TRAIN}: {train} != {MICRO} {micro} x {ACCUMULATION} {accumulation} x world size {world_size} = {right}; "
            f"set {TRAIN} to {right}, or leave one of the three keys out and it is computed"
        )
    return BatchSizes(train, micro, accumulation)


def _divide(train: int, divisor: int, what: str) -> int:
    quotient, rest = divmod(train, divisor)
    if rest or not quotient:
        below, above = quotient * divisor, (quotient + 1) * divisor
        fits = f"{above}" if not below else f"{below} or {above}"
        raise BatchConfigError(f"{TRAIN}: {train} is not divisible by {what} = {divisor}; use for instance {fits}")
    return quotient
