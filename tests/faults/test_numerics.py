# SPDX-License-Identifier: Apache-2.0
"""N1 to N8: non-finite steps, parity, freshness, determinism and memory, each with its promised outcome."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import CollectiveTimeout
from deepspeed.runtime.zero.core.param import ShardGroups
from deepspeed.runtime.zero.core.scaling import OnHost, vote
from deepspeed.runtime.zero.core.wire import Channel
from tests.faults import numerics, scenarios
from tests.faults.ranks import values
from tests.harness import models, reference


@pytest.mark.parametrize("kind", ["NaN", "Inf"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_n1_a_non_finite_gradient_on_one_rank(precision: str, kind: str) -> None:
    poison = math.nan if kind == "NaN" else math.inf
    for rank, result in enumerate(values(numerics.non_finite, 2, precision, poison, 1, {})):
        assert result["unchanged"] and result["skipped"] == 1 and result["steps"] == 3
        assert not result["applied"] and result["overflow"] and result["norm"] == math.inf
        assert result["same rate"] and result["goes on"]
        assert result["scale"] in ((0.5, 1.0) if precision == "fp16" else (1.0,))
        lines = [line for line in result["lines"] if "skipped" in line]
        assert len(lines) == (1 if rank == 0 else 0), result["lines"]
        if rank == 0:  # the first parameter in model order whose gradient is not finite; third is sound
            assert lines[0].startswith("step 3 skipped: ") and "gradient of first.weight" in lines[0]
            assert f"{kind} in the gradient" in lines[0] and "shard of rank " in lines[0]


def test_n1_checks_name_the_rank_where_the_gradient_became_non_finite() -> None:
    [result, *_] = values(numerics.non_finite, 3, "bf16", math.inf, 2, {"enable_sanity_checks": True})
    [line] = [line for line in result["lines"] if "skipped" in line]
    assert "Inf in the gradient of second.weight on rank 2" in line and "on rank 0" not in line


def test_n2_every_step_is_skipped() -> None:
    results = values(numerics.always, 2, "bf16", 101, 0)
    for rank, result in enumerate(results):
        assert result["error"][0] == "none" and result["skipped"] == 101 and result["unchanged"]
        lines = [line for line in result["lines"] if "skipped" in line]
        assert [line.split(" skipped")[0] for line in lines] == (["step 1", "step 10", "step 100"] if rank == 0 else [])
    assert "100 in a row" in results[0]["lines"][-1]


def test_n2_fp16_ends_at_the_smallest_loss_scale() -> None:
    for result in values(numerics.always, 2, "fp16", 50, 0):
        assert result["error"][0] == "UsageError" and "min_loss_scale" in result["error"][1]
        assert result["skipped"] == 4 and result["unchanged"]


def test_n2_a_limit_of_skipped_steps_in_a_row_raises() -> None:
    for result in values(numerics.always, 2, "fp32", 50, 5):
        kind, text = result["error"]
        assert kind == "NonFiniteGradients" and text.startswith("max_skipped_steps: 5 steps in a row"), text
        assert "NaN in the gradient of first.weight" in text
        assert result["skipped"] == 5 and result["unchanged"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_n3_finite_gradients_whose_norm_overflows(precision: str) -> None:
    for result in values(numerics.huge, 2, precision):
        assert result["finite"]
        assert (result["skips"] == 1 and not result["moved"]) or math.isfinite(result["norm"])


@pytest.mark.parametrize(("world", "accumulation", "clip"), [(1, 2, 0.0), (2, 1, 0.5), (3, 4, 0.0), (4, 2, 0.5)])
def test_n4_parity_with_plain_torch(world: int, accumulation: int, clip: float) -> None:
    expected = reference.train(numerics.odd_model, models.batch, 10, world, accumulation, clip)
    for rank, result in enumerate(values(numerics.parity, world, 10, accumulation, clip)):
        assert result["losses"] == pytest.approx([losses[rank] for losses in expected.losses], rel=1e-5)
        assert result["norms"] == pytest.approx(expected.norms, rel=1e-4)
        for name, value in result["weights"].items():
            got = torch.tensor(value).reshape(expected.params[name].shape)
            assert torch.allclose(got, expected.params[name], rtol=1e-4, atol=2e-6), name


def test_n5_every_write_is_seen_by_every_gather(tmp_path: Path) -> None:
    for result in values(numerics.fresh_secondaries, 4, str(tmp_path)):
        for write, outcome in result.items():
            assert outcome["equal"] and outcome["loss"], write
            assert outcome["inside"] > 0, f"{write}: the second forward should come from the secondaries"


def test_n5_a_stale_secondary_is_refused() -> None:
    assert all(math.isfinite(loss) for loss in values(numerics.stale_secondary, 4))


def test_n6_sizes_of_hpz_groups() -> None:
    plain = values(numerics.hpz_sizes, 4, 1)
    for size in (2, 4):
        assert values(numerics.hpz_sizes, 4, size) == plain
    for text in values(numerics.hpz_sizes, 4, 3):
        assert "zero_hpz_partition_size" in text and "3" in text and "world size 4" in text


@pytest.mark.parametrize("zero", [{}, {"zero_hpz_partition_size": 2}])
def test_n7_delays_and_prefetch_change_no_bit(zero: dict[str, Any]) -> None:
    expected = values(numerics.delayed, 4, 0.0, 50_000_000, zero)
    assert values(numerics.delayed, 4, 0.05, 50_000_000, zero) == expected
    assert values(numerics.delayed, 4, 0.0, 0, zero) == expected


def test_n8_live_parameters_stay_within_the_budget() -> None:
    unbounded = values(numerics.memory, 2, 10**9)[0]
    for result in values(numerics.memory, 2, 500):
        assert result["left"] == [[], [], [], []]
        assert result["peak"] <= 500 + result["largest"]
        assert result["peak"] <= unbounded["peak"]


def test_verdict_names_the_parameter_after_the_gradients_are_gone() -> None:
    """On CUDA the verdict is asked for a step later; by then the gradients are overwritten."""
    groups = ShardGroups(Channel(None, 1, 0, (0,)))
    slices = [torch.ones(3), torch.tensor([1.0, -math.inf]), torch.tensor([math.nan])]
    verdict = vote(slices, ["a", "b", "c"], (), groups, torch.device("cpu"), 1.0, 0.0, True, 7)
    for piece in slices:
        piece.zero_()
    assert not verdict.check()
    [found] = verdict.non_finite()
    assert (found.rank, found.param, found.kind) == (0, "b", "Inf")


class Queued:
    """A device that gets to the event after some looks at it."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 5])
def test_a_flag_is_read_once_the_device_got_there(looks: int) -> None:
    flag = OnHost(torch.tensor(3.0))
    flag.arrived = Queued(looks)
    assert flag.read(10.0) == 3.0 and flag.arrived.looks == -1


def test_a_device_that_waits_for_a_lost_rank_is_not_waited_for_without_end() -> None:
    """On NCCL the host runs ahead of a collective that hangs; where it waits for the device, it says what is wrong."""
    channel = Channel(None, 1, 0, (0,))
    verdict = vote([torch.ones(3)], ["a"], (), ShardGroups(channel), torch.device("cpu"), 1.0, 0.0, True, 7)
    verdict.skip_on_host.arrived = Queued(math.inf)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CollectiveTimeout, match="a collective of step 7 failed"):
        patch.setattr(Channel, "timeout", 0.05)
        verdict.check()


def test_a_vote_costs_one_small_exchange() -> None:
    """Norm, fingerprint, first non-finite parameter, and a bit for each parameter: here one number holds them all."""
    assert values(scenarios.vote_cost, 2) == [[4, 4, 4]] * 2
