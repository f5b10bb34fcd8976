# SPDX-License-Identifier: Apache-2.0
"""D1, D5, D6, D11: a rank that dies, stalls or leaves is named by every survivor, in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import scenarios
from tests.faults.ranks import Ended, run

TIMEOUT = 2.0
SLACK = 6.0
"""Seconds that a loaded machine may add to a bound."""


def survivors(ended: list[Ended], victim: int) -> list[Ended]:
    return [rank for rank in ended if rank.rank != victim]


@pytest.mark.parametrize(
    ("seam", "at", "said"),
    [
        ("gather", 4, "gathering "),
        ("reduce_scatter", 3, "gathering |reducing the gradients of "),
        ("exchange", 2, "the vote before the optimizer step|gathering |reducing "),
        ("broadcast", 3, "sharding a parameter of shape"),
    ],
)
def test_d1_survivors_of_a_dead_rank_raise_and_name_it(seam: str, at: int, said: str) -> None:
    ended = run(scenarios.die, 3, seam, at, 1, group_timeout=TIMEOUT)
    assert ended[1].code == -9
    for rank in survivors(ended, 1):
        assert rank.code == 1 and rank.error == "CollectiveTimeout", rank
        assert any(text in rank.text for text in said.split("|")), rank.text
        assert "step 1" in rank.text and f"rank {rank.rank}" in rank.text
        assert "Rank 1 gave no sign of life" in rank.text or "failed as well" in rank.text, rank.text
        assert rank.seconds - ended[1].seconds < TIMEOUT + 2 + SLACK
    assert any("Rank 1 gave no sign of life" in rank.text for rank in survivors(ended, 1))


def test_d1_with_hpz() -> None:
    ended = run(scenarios.die, 4, "gather", 8, 3, 3, {"zero_hpz_partition_size": 2}, group_timeout=TIMEOUT)
    assert ended[3].code == -9
    for rank in survivors(ended, 3):
        assert rank.code == 1 and rank.error == "CollectiveTimeout", rank
        assert rank.seconds - ended[3].seconds < TIMEOUT + 2 + SLACK
    assert any("Rank 3 gave no sign of life" in rank.text for rank in survivors(ended, 3))


def test_d1_a_rank_that_died_before_initialize() -> None:
    ended = run(scenarios.die_before_initialize, 2, 1, group_timeout=TIMEOUT)
    assert ended[0].error == "CollectiveTimeout"
    assert "comparing the ranks' models and configurations" in ended[0].text
    assert "Rank 1 did not come here" in ended[0].text


def test_d1_a_rank_that_dies_while_groups_are_made() -> None:
    ended = run(scenarios.die_in_group_making, 4, 2, group_timeout=TIMEOUT)
    assert ended[2].code == -9
    for rank in survivors(ended, 2):
        assert rank.error == "CollectiveTimeout", rank
        assert rank.seconds - ended[2].seconds < TIMEOUT + 2 + SLACK
    assert any("making process groups" in rank.text for rank in ended) or "Rank 2" in ended[3].text


def test_d1_a_rank_that_never_joins_the_process_group() -> None:
    [ended] = run(scenarios.join_alone, 1, limit=30)
    text, seconds = ended.value
    assert text.startswith("rank 0 of 2: joining the process group at file://") and "DEEPSPEED_TIMEOUT" in text
    assert seconds < 2 + SLACK


@pytest.mark.parametrize("where", ["forward", "between steps"])
def test_d5_a_stalled_rank_is_named(where: str, tmp_path: Path) -> None:
    ended = run(scenarios.stall, 3, 1, TIMEOUT + 3, where, group_timeout=TIMEOUT, folder=tmp_path)
    for rank in survivors(ended, 1):
        assert rank.error == "CollectiveTimeout", rank
        took = float((tmp_path / f"end{rank.rank}").read_text()) - float((tmp_path / f"start{rank.rank}").read_text())
        assert took < TIMEOUT + 2 + SLACK
    texts = [rank.text for rank in survivors(ended, 1)]
    assert any("Rank 1 is alive but behind: step 2" in text for text in texts), texts
    assert all("step 2" in text for text in texts)


def test_d5_a_rank_that_comes_late_to_initialize_is_named() -> None:
    ended = run(scenarios.stall_before_initialize, 2, 1, TIMEOUT + 2.5, group_timeout=TIMEOUT)
    assert ended[0].error == "CollectiveTimeout" and "Rank 1 did not come here" in ended[0].text


def test_d6_an_exception_in_users_code_leaves_nothing_gathered(tmp_path: Path) -> None:
    ended = run(scenarios.user_error, 3, 1, group_timeout=TIMEOUT, folder=tmp_path)
    assert ended[1].error == "ValueError" and "from the user's module" in ended[1].text
    assert (tmp_path / "left1").read_text() == "[]"
    for rank in survivors(ended, 1):
        assert rank.code == 1 and rank.error == "CollectiveTimeout", rank


@pytest.mark.parametrize("world", [1, 2])
def test_d11_a_group_that_is_destroyed_early(world: int) -> None:
    ended = run(scenarios.destroy_early, world, group_timeout=TIMEOUT, limit=30)
    assert [rank.code for rank in ended] == [0] * world, ended
    assert {rank.value for rank in ended} <= {"no error", "CollectiveTimeout", "RuntimeError", "ValueError"}


def test_d1_d11_interpreters_shut_down_without_an_abort() -> None:
    """Rank 1 dies; rank 0 handles that and destroys the group, rank 2 does not. No thread aborts the shutdown."""
    ended = run(scenarios.die_and_shut_down, 3, group_timeout=TIMEOUT, limit=40, whole=True)
    assert [rank.code for rank in ended] == [0, -9, 1], ended
    assert ended[2].error == "CollectiveTimeout"
    assert not any("terminate called" in rank.log or "Fatal Python error" in rank.log for rank in ended)
