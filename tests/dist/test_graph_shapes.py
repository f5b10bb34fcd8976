# SPDX-License-Identifier: Apache-2.0
"""Promise: whatever shape the graph of a step has, losses, gradients and weights equal plain torch's.

Every shape runs twice: on 2 ranks with the finest units and nothing kept gathered, and on 4 ranks with hpZ.
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.zero.core import partition
from tests.dist import plain, shapes
from tests.dist.support import LIMITS, assert_tensors, full_grads, full_params, initialize, settings
from tests.harness import reference
from tests.harness.pool import run_ranks

STEPS = 3
GROUPS = [list(shapes.SHAPES)[start::4] for start in range(4)]


def run_shapes(names: list[str], hpz: int, fine: bool) -> list[plain.Outcome]:
    found = []
    for name in names:
        shape = shapes.SHAPES[name]
        model = shape.build()
        if shape.prepare is not None:
            shape.prepare(model)
        config = settings(hpz=hpz, zero=LIMITS["nothing stays"] if fine else {})
        with mock.patch.object(partition, "MIN_UNIT_BOUND", 1 if fine else partition.MIN_UNIT_BOUND):
            engine = initialize(model, config, reference.sgd)
        losses, grads = [], {}
        for step in range(STEPS):
            try:
                seen = shape.step(engine, engine.backward, step, dist.get_rank())
            except Exception as error:
                raise AssertionError(f"shape {name!r}, step {step}: {type(error).__name__}: {error}") from error
            losses.append([float(loss.detach()) for loss in seen])
            grads = full_grads(engine.module)
            engine.step()
        found.append(plain.Outcome(losses, grads, full_params(engine.module)))
        engine.destroy()
    return found


@functools.cache
def wanted(name: str, world: int) -> list[plain.Outcome]:
    return plain.by_plain_torch(shapes.SHAPES[name], world, STEPS)


@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize(("world", "hpz", "fine"), [(2, 1, True), (4, 2, False)])
def test_shapes(world: int, hpz: int, fine: bool, group: int) -> None:
    names = GROUPS[group]
    failures = []
    for rank, outcomes in enumerate(run_ranks(run_shapes, world, names, hpz, fine, timeout=120)):
        for name, got in zip(names, outcomes, strict=True):
            expected = wanted(name, world)[rank]
            try:
                for mine, theirs in zip(got.losses, expected.losses, strict=True):
                    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-6, atol=1e-6)
                grads = {key: value for key, value in got.grads.items() if value is not None}
                assert_tensors(grads, expected.grads)
                assert_tensors(got.params, expected.params)
            except AssertionError as error:
                failures.append(f"{name}, rank {rank}: {error}")
    assert not failures, "\n".join(failures)
