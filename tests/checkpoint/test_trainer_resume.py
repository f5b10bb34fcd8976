# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer resumed in fresh processes: deepspeedai/DeepSpeed#7606 as users met it, four ranks, P = 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.harness.skips import needs

pytest.importorskip("transformers", reason=needs("transformers"))
from tests.harness.pool import run_fresh
from tests.integration import tiny
from tests.integration.test_trainer import Run, train

WORLD = 4


def summary(run: Run) -> dict[str, Any]:
    result = train(run)
    return {key: result[key] for key in ("losses", "norms", "last_eval")}


def fresh(run: Run) -> dict[str, Any]:
    results = run_fresh(summary, WORLD, run, timeout=240, group_timeout=120)
    for result in results:
        assert result.error_type is None and result.returncode == 0, result.error_text or result.log
    assert all(result.value == results[0].value for result in results)
    value: dict[str, Any] = results[0].value
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (1, 2)], ids=["hpz", "plain-then-hpz"])
def test_first_loss_after_resume(tmp_path: Path, saved: int, loaded: int) -> None:
    """Every loss and norm after the resume, the first above all, is that of the run that was not interrupted."""
    run_ranks(tiny.save_model, 1, str(tmp_path / "model"), "llama", init_group=False)
    first = Run(str(tmp_path / "model"), str(tmp_path / "out"), saved, best=True, steps=6)
    whole = fresh(first)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    assert list(checkpoint.glob("global_step*"))
    again = Run(str(tmp_path / "model"), str(tmp_path / "out"), loaded, best=True, steps=6, resume=str(checkpoint))
    resumed = fresh(again)
    assert resumed["losses"][4:] == whole["losses"][4:]
    assert resumed["norms"][4:] == whole["norms"][4:]
