# SPDX-License-Identifier: Apache-2.0
"""500 steps on 4 ranks with hpZ, random delays, 20 deaths: the weights end as if nothing had happened, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults import soak
from tests.faults.ranks import run, values

WORLD = 4


def _deaths(steps: int, count: int, seed: int) -> list[list[Any]]:
    """Who dies in which step, and at which collective of it or how long after its begin (during a save, say)."""
    drawn = random.Random(seed)
    at = sorted(drawn.sample(range(1, steps - 10), count))
    kinds = [
        ("time", 0.05 * drawn.random()) if i % 3 == 2 else ("collective", drawn.randrange(12)) for i in range(count)
    ]
    return [[drawn.randrange(WORLD), number, *kind] for number, kind in zip(at, kinds, strict=True)]


def _soak(folder: Path, steps: int, every: int, deaths: int, seed: int) -> str:
    """Train to the end through ``deaths`` deaths, each time from the last checkpoint; returns the weights' hash."""
    for attempt, death in enumerate([*_deaths(steps, deaths, seed), None]):
        ended = run(soak.train, WORLD, str(folder), steps, every, attempt, death, group_timeout=20, limit=240)
        if death is not None:
            assert ended[death[0]].code == -9, ended[death[0]]
            for rank in ended:
                assert rank.rank == death[0] or (rank.code == 1 and rank.error), rank
    assert [rank.code for rank in ended] == [0] * WORLD, [rank.trace for rank in ended]
    assert all(rank.value["steps"] == steps and rank.value["start"] > 0 for rank in ended)
    [weights] = {rank.value["weights"] for rank in ended}
    return str(weights)


def _undisturbed(folder: Path, steps: int, every: int) -> str:
    results = values(soak.train, WORLD, str(folder), steps, every, 0, None, group_timeout=20, limit=240)
    return str(results[0]["weights"])


def test_a_short_run_through_two_deaths(tmp_path: Path) -> None:
    assert _soak(tmp_path / "soak", 24, 4, 2, seed=3) == _undisturbed(tmp_path / "plain", 24, 100)


@pytest.mark.slow
def test_500_steps_and_20_deaths(tmp_path: Path) -> None:
    assert _soak(tmp_path / "soak", 500, 20, 20, seed=1) == _undisturbed(tmp_path / "plain", 500, 1000)
