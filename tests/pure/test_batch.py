# SPDX-License-Identifier: Apache-2.0
"""Promise: train = micro x accumulation x world, always exact; what cannot be is refused with all numbers named."""

from __future__ import annotations

import itertools

import pytest

from deepspeed.errors import BatchConfigError
from deepspeed.runtime.batch import solve_batch


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "world", "expected"),
    [
        (32, None, None, 4, (32, 8, 1)),
        (None, 3, None, 4, (12, 3, 1)),
        (None, 3, 5, 4, (60, 3, 5)),
        (32, 2, None, 4, (32, 2, 4)),
        (32, None, 2, 4, (32, 4, 2)),
        (32, 2, 4, 4, (32, 2, 4)),
        (7, None, None, 7, (7, 1, 1)),
    ],
)
def test_any_two_give_the_third(train, micro, accumulation, world, expected):
    assert solve_batch(train, micro, accumulation, world) == expected


def test_every_small_triple_agrees_with_enumeration():
    values = (None, *range(1, 7))
    for train, micro, accumulation, world in itertools.product((None, *range(1, 25)), values, values, (1, 2, 3)):
        # What the keys that are missing may be: one accumulation step unless both others are there.
        micros = [micro] if micro else range(1, 25)
        steps = [accumulation] if accumulation else (range(1, 25) if train and micro else [1])
        fits = [(m * a * world, m, a) for m in micros for a in steps if train in (None, m * a * world)]
        if train is None and micro is None:
            fits = []
        try:
            solved = solve_batch(train, micro, accumulation, world)
        except BatchConfigError:
            assert not fits, (train, micro, accumulation, world)
        else:
            assert fits == [solved], (train, micro, accumulation, world)


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "world", "words"),
    [
        (None, None, None, 4, ["train_batch_size", "train_micro_batch_size_per_gpu"]),
        (None, None, 2, 4, ["train_batch_size", "train_micro_batch_size_per_gpu"]),
        (33, 2, 4, 4, ["33", "micro_batch_size_per_gpu 2", "accumulation_steps 4", "world size 4", "32"]),
        (30, 4, None, 4, ["30", "16", "or 32"]),
        (3, None, None, 4, ["train_batch_size: 3", "4"]),
        (0, 1, None, 1, ["train_batch_size", "0"]),
        (None, -2, None, 1, ["train_micro_batch_size_per_gpu", "-2"]),
        (4, None, 0, 1, ["gradient_accumulation_steps", "0"]),
        (4, None, 1, 0, ["world size"]),
    ],
)
def test_contradictions_name_the_numbers(train, micro, accumulation, world, words):
    with pytest.raises(BatchConfigError) as caught:
        solve_batch(train, micro, accumulation, world)
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)
