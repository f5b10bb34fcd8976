# SPDX-License-Identifier: Apache-2.0
"""Promise: in fp32 the loss of every one of ten steps equals plain torch's, whatever the settings of gathering.

World 1 to 4, uneven shapes, clipping on and off, accumulation 1 and 4 (by counter and by boundary).
"""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from tests.dist.support import (
    LIMITS,
    Case,
    assert_close,
    assert_identical,
    assert_matches,
    initialize,
    run_cases,
    settings,
)
from tests.harness import models, reference
from tests.harness.pool import run_ranks

CLIP = 0.3  # below every norm that these models see, so that it always acts


def _check(cases: list[Case], world: int) -> list[list]:
    by_rank = run_ranks(run_cases, world, cases)
    by_case = [list(runs) for runs in zip(*by_rank, strict=True)]
    for case, runs in zip(cases, by_case, strict=True):
        assert_matches(case, runs)
    return by_case


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_clip_and_accumulation(world: int) -> None:
    cases = [
        Case(world=world, clip=clip, accum=accum, boundary=boundary)
        for clip, (accum, boundary) in itertools.product((0.0, CLIP), ((1, False), (4, False), (4, True)))
    ]
    _check(cases, world)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_limits_of_gathering_change_nothing(world: int) -> None:
    """Every setting of what stays gathered gives the same bits."""
    cases = [Case(model="blocks", world=world, limits=name, clip=CLIP) for name in LIMITS]
    by_case = _check(cases, world)
    for runs in by_case[1:]:
        for first, other in zip(by_case[0], runs, strict=True):
            assert first.losses == other.losses


@pytest.mark.parametrize("partition", [2, 4])
def test_hpz_changes_no_bit(partition: int) -> None:
    cases = [
        Case(model=model, world=4, hpz=hpz, limits=limits, clip=CLIP, accum=accum, steps=6)
        for model, limits, accum in (("uneven", "no persistence", 1), ("blocks", "default", 2), ("blocks", "tight", 2))
        for hpz in (1, partition)
    ]
    by_case = _check(cases, 4)
    for plain, hpz in zip(by_case[::2], by_case[1::2], strict=True):
        for a, b in zip(plain, hpz, strict=True):
            assert_identical(a, b)
            assert b.stats["gathers_inside"] > 0


def test_plain_backward_and_other_optimizers() -> None:
    """`loss.backward()` instead of `engine.backward(loss)`; optimizers without fused kernels."""
    cases = [
        Case(world=2, plain_backward=True),
        Case(world=2, plain_backward=True, accum=2, clip=CLIP),
        Case(world=2, optimizer="sgd", clip=CLIP),
        Case(world=2, optimizer="adamw", zero=(("sub_group_size", 0),)),
        Case(world=2, optimizer="adamw", zero=(("sub_group_size", 300), ("overlap_comm", False))),
    ]
    _check(cases, 2)


def losses_beside_logits(accum: int) -> list[float]:
    """Norms of two steps by `loss.backward()`, of a model that returns the logits too; the last step by halves."""
    engine = initialize(models.seeded(models.Both), settings(accum=accum), reference.sgd)
    norms = []
    for step in range(3):
        for micro in range(accum):
            loss = engine(*models.batch(step, dist.get_rank(), micro))["loss"]
            if step == 2 and micro:
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return norms


@pytest.mark.parametrize("accum", [1, 3])
def test_plain_backward_of_one_output_that_others_lead_to(accum: int) -> None:
    wanted = reference.train(models.blocks, models.batch, 3, 2, accum, optimizer_fn=reference.sgd)
    for norms in run_ranks(losses_beside_logits, 2, accum):
        assert_close(norms, wanted.norms, 1e-5)


def test_offload_to_host_changes_nothing() -> None:
    """`offload_param` and `offload_optimizer` on the CPU, with and without hpZ, train alike (cases 6 and 7)."""
    offload = (("offload_param", {"device": "cpu"}), ("offload_optimizer", {"device": "cpu"}))
    cases = [Case(world=4, hpz=hpz, zero=zero, clip=CLIP, steps=4) for hpz in (1, 2) for zero in ((), offload)]
    by_case = _check(cases, 4)
    for runs in by_case[1:]:
        for first, other in zip(by_case[0], runs, strict=True):
            assert first.losses == other.losses
            assert all(norm > 0 for norm in other.norms)
