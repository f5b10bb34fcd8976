# SPDX-License-Identifier: Apache-2.0
"""An engine that is destroyed, or dropped, frees its memory; five in one process leave nothing alive."""

from __future__ import annotations

import pytest

from tests.faults import lifetimes
from tests.faults.ranks import values


@pytest.mark.parametrize("kind", lifetimes.KINDS)
def test_five_engines_in_one_process_leave_nothing_alive(kind: str) -> None:
    for result in values(lifetimes.five_builds, 2, kind, True):
        assert result["alive"] == [[]] * 5
        assert result["threads"] == [0] * 5
        assert result["elements"] == [0] * 5


def test_an_engine_that_is_dropped_without_destroy_goes_too() -> None:
    for result in values(lifetimes.five_builds, 2, "plain", False):
        assert result["alive"] == [[]] * 5


def test_gathers_ahead_of_a_pass_that_ended_early_do_not_outlive_it() -> None:
    """Messages that are let go of would leave the group useless for whoever comes after."""
    for flying, losses in values(lifetimes.dropped_after_a_short_pass, 2):
        assert flying == [] and all(loss > 0 for loss in losses)


def test_a_destroyed_engine_keeps_weights_and_frees_the_rest() -> None:
    for result in values(lifetimes.destroyed_while_held, 4):
        assert result["weights"] and result["state"]
        assert result["masters"] == 0 and result["secondaries"] == [] and result["live"] == 0 and result["hooks"] == 0


def test_the_module_of_a_destroyed_engine_gets_a_new_one() -> None:
    [first, second] = values(lifetimes.rebuilt, 2)
    assert first["same"] and second["same"]
