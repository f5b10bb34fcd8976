# SPDX-License-Identifier: Apache-2.0
"""Markdown from measurements: ratios, verdicts, failures and the marks in a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report_md


def row(step: float, memory: int) -> dict[str, Any]:
    return {
        "step_ms": step,
        "spread_ms": 1.0,
        "host_ms": step,
        "tokens_per_s": 1234.5,
        "allocated": memory,
        "reserved": 0,
    }


def file(**changes: Any) -> dict[str, Any]:
    about = {"date": "2000-01-02", "device": "cpu", "torch": "2.0", "python": "3.11", "rounds": 2, "steps": 3}
    result = {
        "work": {"name": "2r-4x2048"},
        "rows": {"ours": row(90.0, 1 << 30), "fsdp2": row(100.0, 1 << 29), "upstream": row(100.0, 1 << 31)},
        "failed": {},
        "disagree": [],
        **changes,
    }
    return {"about": about, "results": [result]}


def test_ratios_and_verdicts() -> None:
    """90 ms of 100 are within 0.97 of FSDP2 and not within 0.85 of upstream; twice FSDP2's memory is too much."""
    text = report_md.section(file())
    assert "2000-01-02, CPU, torch 2.0" in text
    line = next(line for line in text.splitlines() if "| fsdp2 |" in line)
    assert line.split("|")[-3:-1] == [" 0.900 ", " 2.00 "]
    verdict = text.splitlines()[-1]
    assert "0.900 (at most 0.97): holds" in verdict
    assert "0.900 (at most 0.85): **does not hold**" in verdict
    assert "2.000 (at most 1): **does not hold**" in verdict


def test_failures_and_diverging_losses_show() -> None:
    text = report_md.section(file(failed={"upstream": "boom"}, disagree=["fsdp2: loss 2"]))
    assert "| upstream | failed |" in text
    assert "Losses disagree: 2r-4x2048: fsdp2: loss 2" in text


def test_table_is_rectangular() -> None:
    lines = report_md.table(file(failed={"single": "x"})["results"]).splitlines()
    assert len({line.count("|") for line in lines}) == 1


def test_replaces_one_place_only(tmp_path: Path) -> None:
    source, document = tmp_path / "a.json", tmp_path / "a.md"
    source.write_text(json.dumps(file()))
    document.write_text("top\n<!-- a -->\nformer\n<!-- /a -->\nmiddle\n<!-- b -->\n<!-- /b -->\nend\n")
    assert report_md.main([str(source), "--into", str(document), "--place", "a"]) == 0
    once = document.read_text()
    assert "former" not in once and once.startswith("top\n<!-- a -->\n2000-01-02")
    assert once.endswith("middle\n<!-- b -->\n<!-- /b -->\nend\n")
    report_md.main([str(source), "--into", str(document), "--place", "a"])
    assert document.read_text() == once


def test_missing_marks_are_an_error() -> None:
    with pytest.raises(ValueError, match="<!-- c -->"):
        report_md.replace("nothing", "c", "text")
