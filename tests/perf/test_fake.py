# SPDX-License-Identifier: Apache-2.0
"""One rank of many under the fake group: memory falls as ranks grow, and hosts pay little more than the model."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import fake, models
from benchmarks.fake import Probe


def probe(variant: str, ranks: int, **options: Any) -> dict[str, Any]:
    found = fake.spawn(Probe(variant, ranks, model="tiny", micro=2, length=32, steps=1, **options), 120.0)
    assert "failed" not in found, found
    return found


@pytest.fixture(scope="module")
def eight() -> dict[str, Any]:
    return probe("ours", 8, dtype="fp32")


@pytest.mark.slow
def test_state_of_a_rank_is_its_share(eight: dict[str, Any]) -> None:
    """fp32: weights, two moments, gradient, 4 bytes each, of 1/8 of the model; and the small parameters gathered."""
    share = 16 * models.SHAPES["tiny"].numel / 8
    gathered = 4 * models.SHAPES["tiny"].numel  # at most: the tiny model's matrices are all below the threshold
    assert share <= eight["state"] <= share + gathered + 64 * 1024


@pytest.mark.slow
def test_state_falls_with_ranks_and_collectives_do_not_grow(eight: dict[str, Any]) -> None:
    many = probe("ours", 512, dtype="fp32")
    assert many["state"] < eight["state"]
    assert many["calls_total"] == eight["calls_total"]
    assert many["python_calls"] <= eight["python_calls"] * 1.1


@pytest.mark.slow
def test_hpz_runs_with_many_groups() -> None:
    found = probe("ours", 64, hpz=8, accumulation=2)
    assert found["calls"]["reduce_scatter"] > 0


@pytest.mark.slow
def test_fewer_python_calls_than_fsdp2(eight: dict[str, Any]) -> None:
    assert eight["python_calls"] < probe("fsdp2", 8, dtype="fp32")["python_calls"] / 2


def test_bad_numbers_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--ranks", "1"], ["--ranks", "12", "--hpz", "8"], ["--variants", "theirs"]):
        with pytest.raises(SystemExit):
            fake.parse(arguments)
    assert "a multiple of --hpz 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_probe_says_why() -> None:
    assert "no such shape" in fake.spawn(Probe("ours", 8, model="no such shape"), 60.0)["failed"]
