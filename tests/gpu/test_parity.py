# SPDX-License-Identifier: Apache-2.0
"""Promise: on a GPU, too, training equals plain torch in one process, whatever the settings of gathering.

fp32 without TF32: losses within 1e-5. Both sides run the same kernels; what differs is the order of one sum over ranks
(2^-24 per sum), which ten Adam steps carry on. bf16 (bf16 weights, fp32 masters): the first loss, before any step, has
the same bits; later ones within 1e-2. Each step rounds a gradient once more (2^-9, in the reduction), which moves a
master by at most that share of the learning rate, and now and then flips the rounding of a weight (2^-9 of it); the
losses of these models are sums of about a hundred such weights' effects, of random sign.
"""

from __future__ import annotations

import itertools

import pytest

from tests.dist.support import LIMITS, assert_identical
from tests.gpu import place
from tests.gpu.train import Case, Compared, compare_cases, run_cases, worst

CLIP = 0.3  # below every norm that these models see, so that it always acts
KINDS = [
    Case(model="blocks_non_reentrant", clip=CLIP, accum=4),
    Case(model="blocks_reentrant"),
    Case(model="tied", clip=CLIP),
    Case(model="frozen"),
    Case(model="frozen_non_reentrant", clip=CLIP),
    Case(model="conditional"),
    Case(model="conditional", batch="batch_by_rank"),
    Case(model="blocks", limits="default"),
    Case(model="blocks", limits="no reuse", clip=CLIP),
    Case(fused=False, clip=CLIP),
]


def _judge(cases: list[Case], by_rank: list[list[Compared]], loss: float, norm: float, first: float) -> None:
    problems = []
    for rank, found in enumerate(by_rank):
        for case, one in zip(cases, found, strict=True):
            off, off_norm = worst(one.run.losses, one.losses), worst(one.run.norms, one.norms)
            off_first = worst(one.run.losses[:1], one.losses[:1])
            if not (off <= loss and off_norm <= norm and off_first <= first):  # NaN fails
                problems.append(
                    f"rank {rank} {case}: loss off by {off:.1e} (first {off_first:.1e}), norm by {off_norm:.1e}; worst "
                    f"weight {one.worst_name} by {one.worst_param:.1e}"
                )
    assert not problems, "\n".join(problems)


def _grid(dtype: str) -> list[Case]:
    return [Case(dtype=dtype, clip=clip, accum=accum) for clip, accum in itertools.product((0.0, CLIP), (1, 4))]


@pytest.mark.parametrize("world", place.worlds(1, 2, 4))
def test_fp32_equals_plain_torch(world: int) -> None:
    cases = _grid("fp32") + KINDS
    if world == 1:
        cases = [case for case in cases if case.batch == "batch"]
    _judge(cases, place.launch(compare_cases, world, cases), loss=1e-5, norm=1e-4, first=1e-6)


@pytest.mark.parametrize("world", place.worlds(1, 2, 4))
def test_bf16_equals_plain_torch_within_its_rounding(world: int) -> None:
    kinds = [Case(model, dtype="bf16", clip=CLIP, accum=2) for model in ("blocks_non_reentrant", "tied", "frozen")]
    cases = _grid("bf16") + kinds
    _judge(cases, place.launch(compare_cases, world, cases), loss=1e-2, norm=5e-2, first=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@place.needs(2)
def test_settings_of_gathering_change_no_bit(dtype: str) -> None:
    """With two ranks a sum has one order, so grouping, prefetch, persistence and overlap must not show at all."""
    cases = [
        Case(model="blocks_non_reentrant", dtype=dtype, accum=2, clip=CLIP, limits=limits, zero=zero)
        for limits, zero in [*((name, ()) for name in LIMITS), ("default", (("overlap_comm", False),))]
    ]
    for rank, runs in enumerate(place.launch(run_cases, 2, cases, True)):
        for case, run in zip(cases[1:], runs[1:], strict=True):
            try:
                assert_identical(runs[0], run)
            except AssertionError as error:
                raise AssertionError(f"rank {rank}: {cases[0]} and {case} differ: {error}") from None
