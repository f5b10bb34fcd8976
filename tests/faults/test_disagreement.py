# SPDX-License-Identifier: Apache-2.0
"""D2, D3, D4, D8: ranks that disagree raise on all ranks; nothing wrong ever reaches the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import scenarios
from tests.faults.ranks import run, values
from tests.harness import models


@pytest.mark.parametrize(("world", "zero"), [(2, {}), (4, {"zero_hpz_partition_size": 2})])
def test_d2_equal_layers_in_another_order(world: int, zero: dict[str, Any]) -> None:
    """The gathers fit each other, so the wire notices nothing; the vote does, and what was gathered is forgotten."""
    odd = world - 1
    results = values(scenarios.swap, world, zero, odd)
    [expected, *_] = values(scenarios.swap_reference, world)
    for result in results:
        kind, text = result["error"]
        assert kind == "CollectiveMismatch", text
        assert "step 2" in text and f"ranks [{odd}]" in text
        assert "the gather of first on rank 0" in text and f"the gather of second on rank {odd}" in text
        assert result["unchanged"] and result["left"] == []
        assert result["end"] == expected


def test_d2_a_window_that_was_refused_is_not_the_start_of_the_next() -> None:
    [expected, _] = values(scenarios.swap_in_a_window, 2, None)
    for result in values(scenarios.swap_in_a_window, 2, 1):
        assert result["caught"] == [1]
        assert result["steps"] == expected["steps"] == 3
        assert result["end"] == expected["end"]


def test_d2_a_late_verdict_drops_what_was_accumulated_since() -> None:
    for first, second in values(scenarios.distrusted, 2):
        assert first == second > 0


@pytest.mark.parametrize("odd", [0, 1])
def test_d3_a_collective_that_one_rank_does_not_issue(odd: int, tmp_path: Path) -> None:
    ended = run(scenarios.deviate, 2, "skip", odd, scenarios.NOTHING_AHEAD, group_timeout=3, limit=40, folder=tmp_path)
    for rank in ended:
        assert rank.error in ("CollectiveMismatch", "CollectiveTimeout"), rank
    for rank in range(2):
        after = tmp_path / f"after{rank}"
        assert not after.exists() or after.read_text() == (tmp_path / f"before{rank}").read_text()


@pytest.mark.parametrize("odd", [0, 1])
def test_d3_collectives_of_other_sizes_end_as_an_error(odd: int, tmp_path: Path) -> None:
    """gloo aborts a process that receives more than it has room for: no such message may be received."""
    ended = run(scenarios.cut, 2, odd, group_timeout=3, limit=40, folder=tmp_path)
    for rank in ended:
        assert rank.error in ("CollectiveMismatch", "CollectiveTimeout"), rank
        assert (tmp_path / f"after{rank.rank}").read_text() == (tmp_path / f"before{rank.rank}").read_text()


@pytest.mark.parametrize("how", ["skip", "swap"])
def test_d2_d3_other_modules_while_the_gathers_agree(how: str) -> None:
    """Gathers ahead follow the recorded order on every rank: then the step is sound, and must be the right one."""
    model = scenarios.pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(2):
        for rank in range(2):
            setattr(model, how, number == 1 and rank == 1)
            (model(*models.batch(number, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in values(scenarios.deviate, 2, how, 1, {}):
        for name, value in model.named_parameters():
            assert torch.allclose(torch.tensor(result[name]), value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("change", ["size", "dtype"])
def test_d4_shards_of_another_size_or_dtype(change: str, tmp_path: Path) -> None:
    """Error on all ranks; no abort of gloo, no hang, no success, and no step."""
    ended = run(scenarios.wrong_size, 2, 1, change, group_timeout=3, limit=40, folder=tmp_path)
    for rank in ended:
        assert rank.error == "CollectiveTimeout", rank
    for rank in range(2):
        after = tmp_path / f"after{rank}"
        assert not after.exists() or after.read_text() == (tmp_path / f"before{rank}").read_text()


def test_d8_ranks_that_differ_fail_at_initialize_with_the_first_difference() -> None:
    results = values(scenarios.differ, 2, 1)
    for kind, named in scenarios.DIFFERENCES.items():
        for rank, result in enumerate(results):
            error, text = result[kind]
            if kind == "bad config" and rank == 1:
                assert error == "ConfigError" and text.startswith(named), text
            else:
                assert error == "UsageError" and named in text, (kind, error, text)
                assert text.startswith("deepspeed.initialize: ") and "rank 1" in text, text
        if kind != "bad config":
            assert results[0][kind] == results[1][kind]


def test_d8_ranks_that_differ_fail_at_zero_init() -> None:
    for error, text in values(scenarios.differ_in_init, 2, 1):
        assert error == "UsageError" and "'dtype: torch.float32'" in text and "'dtype: torch.bfloat16'" in text


def test_d8_agreement_costs_one_small_exchange() -> None:
    [sizes, _] = values(scenarios.agreement_cost, 2)
    assert len(sizes) == 1 and sizes[0] <= 8
