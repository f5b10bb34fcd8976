# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from what ``benchmarks.compare`` wrote: ``python -m benchmarks.report_md runs/*/compare.json``.

With ``--into docs/performance.md --place NAME`` the tables replace what stands between ``<!-- NAME -->`` and
``<!-- /NAME -->`` in that file. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BARS: dict[str, tuple[float, float, float]] = {
    "2r-1x1024": (0.75, 0.35, 1.0),
    "2r-4x2048": (0.97, 0.85, 1.0),
    "2r-4x2048-ckpt": (0.97, 0.85, 1.0),
    "2r-4of1x1024": (0.65, 0.36, 1.0),
    "4r-1x1024": (0.78, 0.34, 1.0),
    "4r-hpz2": (0.78, 0.34, 1.0),
    "4r-hpz2-4of1x1024": (0.78, 0.34, 1.0),
    "cpu-30m": (0.9, 0.9, float("inf")),
    "cpu-30m-bf16": (0.9, 0.9, float("inf")),
}
"""Goals per work: step time by FSDP2's, step time by upstream's, peak memory by FSDP2's."""

COLUMNS = ("work", "variant", "step, ms", "±", "host, ms", "tokens/s", "peak GiB", "reserved GiB", "collectives",
           "Python calls", "ours / it: step", "memory")  # fmt: skip


def about(found: dict[str, Any]) -> str:
    """One line on where and with what a file was measured."""
    gpus = f"{found['gpus']}x {found['gpu']}, NCCL {found['nccl']}" if found.get("gpu") else found["device"].upper()
    limits = "".join(f", {key}={value}" for key, value in found.get("nccl_limits", {}).items())
    return (
        f"{found['date']}, {gpus}{limits}, torch {found['torch']}, Python {found['python']}; medians of "
        f"{found['rounds']} rounds of {found['steps']} steps, interleaved."
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _memory(row: dict[str, Any]) -> float:
    return float(row["allocated"] or row.get("cpu_peak", 0))


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The cells of one work, a row per variant, in the order of ``COLUMNS``."""
    found = []
    ours = result["rows"].get("ours")
    for name, row in result["rows"].items():
        compared = ours is not None and name not in ("ours", "single")
        memory = _memory(row)
        found.append([
            result["work"]["name"], name, f"{row['step_ms']:.1f}", f"{row['spread_ms']:.1f}", f"{row['host_ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}", f"{memory / 2**30:.2f}",
            f"{row['reserved'] / 2**30:.2f}" if row["reserved"] else "",
            str(row.get("calls_total", "")), f"{row['python_calls']:,}" if "python_calls" in row else "",
            f"{ours['step_ms'] / row['step_ms']:.3f}" if compared else "",
            f"{_memory(ours) / memory:.2f}" if compared and memory else "",
        ])  # fmt: skip
    for name in result["failed"]:
        found.append([result["work"]["name"], name, "failed", *[""] * (len(COLUMNS) - 3)])
    return found


def table(results: list[dict[str, Any]]) -> str:
    """All works as one Markdown table, and a line for each disagreement of losses."""
    right = [not name.startswith(("work", "variant")) for name in COLUMNS]
    lines = [_line(COLUMNS), _line("---:" if r else "---" for r in right)]
    for result in results:
        lines += [_line(cells) for cells in rows(result)]
    problems = [f"Losses disagree: {result['work']['name']}: {p}" for result in results for p in result["disagree"]]
    return "\n".join([*lines, *(["", *problems] if problems else [])])


def hiding(results: list[dict[str, Any]]) -> str:
    """What the traces show of each work (``benchmarks.overlap``), as a Markdown table; empty where none were taken."""
    lines = []
    for result in results:
        for name, row in result["rows"].items():
            seen = row.get("trace")
            if seen:
                figures = [f"{seen[key]:.1f}" for key in ("window", "compute", "comm", "exposed", "idle")]
                lines.append(_line([result["work"]["name"], name, *figures, f"{seen['hidden']:.0%}"]))
    if not lines:
        return ""
    head = [
        "| work | variant | step, ms | computing | communicating | exposed | idle | hidden |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*head, *lines])


def verdicts(results: list[dict[str, Any]]) -> str:
    """Which goals hold, as a Markdown table; empty where no work has one."""
    lines = []
    for result in results:
        goals = BARS.get(result["work"]["name"])
        ours = result["rows"].get("ours")
        if goals is None or ours is None:
            continue
        cells = []
        for goal, peer, key in zip(goals, ("fsdp2", "upstream", "fsdp2"), ("step", "step", "memory"), strict=True):
            row = result["rows"].get(peer)
            if row is None or goal == float("inf"):
                cells.append("")
                continue
            found = ours["step_ms"] / row["step_ms"] if key == "step" else _memory(ours) / _memory(row)
            cells.append(f"{found:.3f} (at most {goal:g}): {'holds' if found <= goal else '**does not hold**'}")
        lines.append(_line([result["work"]["name"], *cells]))
    if not lines:
        return ""
    head = ["| work | step / FSDP2 | step / upstream | memory / FSDP2 |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *lines])


def section(file: dict[str, Any]) -> str:
    """Everything about one file of ``compare``."""
    results = file["results"]
    parts = [about(file["about"]), table(results), hiding(results), verdicts(results)]
    return "\n\n".join(part for part in parts if part)


def replace(text: str, place: str, body: str) -> str:
    """``text`` with ``body`` between the two marks of ``place``.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    begin, end = f"<!-- {place} -->", f"<!-- /{place} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write them into a document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_md", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON written by benchmarks.compare")
    parser.add_argument("--into", type=Path, help="document to change")
    parser.add_argument("--place", help="name of the marks in the document")
    options = parser.parse_args(arguments)
    if (options.into is None) != (options.place is None):
        parser.error("--into and --place belong together")
    body = "\n\n".join(section(json.loads(path.read_text())) for path in options.files)
    if options.into is None:
        print(body)
    else:
        options.into.write_text(replace(options.into.read_text(), options.place, body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
