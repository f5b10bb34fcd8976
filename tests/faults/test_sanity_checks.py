# SPDX-License-Identifier: Apache-2.0
"""``enable_sanity_checks``: each check raises what it promises; switched off there is nothing to call."""

from __future__ import annotations

from tests.faults import checked
from tests.faults.ranks import values


def test_training_is_the_same_with_checks() -> None:
    for world, zero in ((2, {}), (4, {"zero_hpz_partition_size": 2})):
        assert values(checked.losses, world, True, zero) == values(checked.losses, world, False, zero)


def test_off_costs_no_exchange_and_keeps_no_object() -> None:
    assert values(checked.cost, 2, False) == [{"exchanges": 1, "object": False}] * 2
    [on, _] = values(checked.cost, 2, True)
    assert on["object"] and on["exchanges"] > 10


def test_another_order_is_named_before_the_gather() -> None:
    for result in values(checked.swap, 2):
        kind, text = result["error"]
        assert kind == "CollectiveMismatch" and "Nothing was sent" in text
        assert "the gather of first" in text and "the gather of second" in text and "rank 1" in text
        assert result["left"] == []


def test_a_secondary_that_differs_from_the_primary_is_noticed() -> None:
    for kind, text in values(checked.damaged_secondary, 4):
        assert kind == "CollectiveMismatch" and "layers.1.up.weight" in text
        assert "rank 2 gathered" in text or "rank 3 gathered" in text, text


def test_edits_in_a_read_only_block_raise() -> None:
    for on, off in values(checked.read_only, 2):
        assert on[0] == "UsageError" and "head.weight" in on[1] and "modifier_rank" in on[1]
        assert off[0] == "none"


def test_parameters_without_a_gradient_are_named() -> None:
    [lines, others] = values(checked.missing, 2)
    [line] = [line for line in lines if "no rank has a gradient" in line]
    assert "experts.2.weight" in line and "experts.3.bias" in line
    assert "experts.0" not in line and "experts.1" not in line  # each was used by one rank
    assert others == []
