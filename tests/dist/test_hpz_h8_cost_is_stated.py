# SPDX-License-Identifier: Apache-2.0
"""Promise H8: at start one line gives the secondary's bytes per rank, the parameters it covers and the share of gathers
expected inside the node; counters and the comms logger show what happened (cases 76, 82, V5, DS#7019).
"""

from __future__ import annotations

import re
from typing import Any

import torch

import deepspeed
from tests.dist.support import Heard, initialize, settings, train
from tests.harness import models
from tests.harness.pool import run_ranks


def lines(hpz: int, under_init: bool = False) -> tuple[list[str], int, int, int]:
    """Log lines that speak of hpZ, and the bytes that the secondaries of this rank took in the end."""
    config = settings(hpz=hpz)
    if under_init:  # V5: a context that was told nothing
        with deepspeed.zero.Init(dtype=torch.float32):
            model = models.uneven()
    else:
        model = models.uneven()
    with Heard() as heard:
        engine = initialize(model, config)
    train(engine, models.batch, range(1))
    train(engine, models.batch, range(1))
    units = engine.optimizer_model.units
    taken = sum(t.nbytes for unit in units for t in unit.secondaries)
    covered = sum(p._sharded.secondary is not None for p in engine.module.parameters())
    inside = engine.communication_stats()["gathers_inside"]
    engine.destroy()
    return [text for text in heard.texts if "hpZ" in text], taken, covered, inside


def test_one_line_with_bytes_and_share() -> None:
    for rank, (texts, taken, covered, inside) in enumerate(run_ranks(lines, 4, 2)):
        if rank == 0:
            assert len(texts) == 1, texts
            bytes_said = int(re.search(r"([\d,]+) bytes", texts[0]).group(1).replace(",", ""))  # type: ignore[union-attr]
            assert bytes_said == taken > 0
            assert "50%" in texts[0]
        assert covered == len(list(models.uneven().parameters())) and inside > 0


def test_a_context_without_configuration_is_covered_too() -> None:
    """V5: `zero.Init()` that was told nothing, then an engine with hpZ."""
    for _, taken, covered, inside in run_ranks(lines, 4, 2, True):
        assert taken > 0 and covered == len(list(models.uneven().parameters())) and inside > 0


def test_one_node_is_said_to_save_nothing() -> None:
    for rank, (texts, taken, _, _) in enumerate(run_ranks(lines, 4, 4)):
        assert taken == 0
        if rank == 0:
            assert len(texts) == 1 and "equals the world size" in texts[0]


def test_without_hpz_nothing_is_said() -> None:
    for texts, taken, _, inside in run_ranks(lines, 2, 1):
        assert texts == [] and taken == 0 and inside == 0


def logged() -> tuple[dict[str, Any], dict[str, int]]:
    from deepspeed import comm

    engine = initialize(
        models.blocks(), settings(hpz=2, accum=2, comms_logger={"enabled": True, "prof_all": True, "verbose": False})
    )
    train(engine, models.batch, range(2), 2)
    stats = engine.communication_stats()
    text = comm.log_summary()
    comm.comms_logger.LOGGER.enabled = False
    return {"summary": text}, stats


def test_counters_by_group() -> None:
    for _, stats in run_ranks(logged, 4):
        assert stats["gathers_across"] > 0 and stats["gathers_inside"] > 0
        assert stats["gather_bytes_across"] > 0 and stats["gather_bytes_inside"] > 0
        assert stats["reductions"] > 0 and stats["reduce_bytes"] > 0
