# SPDX-License-Identifier: Apache-2.0
"""D7, D9, D10: caught errors, parameters that only some ranks use, calls in unusual orders."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.faults import scenarios
from tests.faults.plain import PlainCalls
from tests.faults.ranks import values
from tests.harness import models, reference


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_d7_training_goes_on_after_a_caught_error(where: str, accumulation: int) -> None:
    zero = {"zero_hpz_partition_size": 2} if accumulation == 2 else {}
    results = values(scenarios.reuse, 2, where, zero, accumulation)
    [expected, _] = values(scenarios.reuse, 2, "none", zero, accumulation)
    for result in results:
        assert result["caught"] == f"from the user's {where}"
        assert result["left"] == [] and result["same"]
        assert result["end"] == expected["end"]


@pytest.mark.parametrize("where", ["forward", "evaluation", "backward"])
def test_d7_training_goes_on_after_an_interrupt(where: str) -> None:
    """torch calls no hook of a module after a KeyboardInterrupt, and what was gathered is released all the same."""
    [expected, _] = values(scenarios.reuse, 2, "none", {}, 1)
    for result in values(scenarios.reuse, 2, where, {}, 1, "interrupt"):
        assert result["caught"].startswith("from the user's")
        assert result["left"] == [] and result["same"]
        assert result["end"] == expected["end"]


def test_d9_parameters_that_only_some_ranks_use() -> None:
    steps = 3
    expected = reference.train(models.conditional, models.batch_by_rank, steps, 3)
    results = values(scenarios.experts, 3, steps)
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx([losses[rank] for losses in expected.losses], rel=1e-5)
        for name, value in expected.params.items():
            assert torch.allclose(torch.tensor(result["weights"][name]), value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("seed", range(6))
def test_d10_calls_in_any_order_equal_plain_torch_or_are_refused(seed: int) -> None:
    drawn = random.Random(seed)
    names = [drawn.choice(scenarios.CALLS) for _ in range(14)]
    if seed == 0:
        names = ["step", "train", "step", "step", "double", "train", "step", "look", "step"]
    zero: dict[str, Any] = {"zero_hpz_partition_size": 2} if seed % 2 else {}
    accumulation = 1 + seed // 3
    results = values(scenarios.fuzz, 2, names, accumulation, zero)
    expected = PlainCalls(2, accumulation).run(names)
    for got, wanted in zip(results[0]["seen"], expected["seen"], strict=True):
        if isinstance(wanted, float):
            assert got == pytest.approx(wanted, rel=1e-5), names
        else:
            assert got == wanted, names
    for result in results:
        for name, value in expected["weights"].items():
            assert torch.allclose(torch.tensor(result["weights"][name]), torch.tensor(value), rtol=1e-4, atol=2e-6)
