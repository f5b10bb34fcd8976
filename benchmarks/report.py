# SPDX-License-Identifier: Apache-2.0
"""From measurements to rows, ratios, a table and a plot. Pure but for the plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

PEERS = ("fsdp2", "fsdp2-fp32reduce", "upstream")
TOLERANCE = {"bf16": 5e-3, "fp32": 2e-5}
"""Largest relative difference of losses between variants over the first steps."""


def summarise(rounds: list[list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """One variant's figures from rounds of per-rank results: times in ms, memory in bytes.

    A step takes as long as its slowest rank; ``step`` is the median over all steps of all rounds, ``spread`` half the
    distance between the quartiles.
    """
    steps = [max(values) for ranks in rounds for values in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    host = [max(values) for ranks in rounds for values in zip(*(rank["host_s"] for rank in ranks), strict=True)]
    cpu = [max(values) for ranks in rounds for values in zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    free = [max(rank["free_s"] for rank in ranks) for ranks in rounds]
    median = statistics.median(steps)
    low, high = median, median
    if len(steps) > 3:
        quartiles = statistics.quantiles(steps, n=4)
        low, high = quartiles[0], quartiles[2]
    return {
        "step_ms": median * 1e3,
        "spread_ms": (high - low) / 2 * 1e3,
        "min_ms": min(steps) * 1e3,
        "free_ms": statistics.median(free) * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        "cpu_ms": statistics.median(cpu) * 1e3,
        "tokens_per_s": tokens / min(median, statistics.median(free)),
        "allocated": max(rank["allocated"] for ranks in rounds for rank in ranks),
        "reserved": max(rank["reserved"] for ranks in rounds for rank in ranks),
        "steps": [round(s * 1e3, 3) for s in steps],
    }


def mean_losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Mean loss per step over ranks and micro-batches."""
    per_step = zip(*(rank["losses"] for rank in ranks), strict=True)
    return [statistics.fmean(x for losses in step for x in losses) for step in per_step]


def mean_trace(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """``trace``: figures of ``overlap.trace``, means over ranks, and rank 0's kernels; ``comm_ms`` of each rank."""
    traces = [rank["trace"] for rank in ranks]
    figures = {key: statistics.fmean(t[key] for t in traces) for key, v in traces[0].items() if isinstance(v, float)}
    return {"trace": {**traces[0], **figures}, "comm_ms": [t["comm"] for t in traces]}


def disagreement(losses: dict[str, list[float]], dtype: str, steps: int = 5) -> list[str]:
    """What is wrong with the losses of the variants: one line for each that leaves the rest. ``single`` trains on one
    rank's data and is left out."""
    compared = {name: values[:steps] for name, values in losses.items() if name != "single"}
    problems = []
    for step in range(min((len(values) for values in compared.values()), default=0)):
        at = {name: values[step] for name, values in compared.items()}
        middle = statistics.median(at.values())
        for name, value in at.items():
            if not abs(value - middle) <= TOLERANCE[dtype] * abs(middle):
                problems.append(f"{name}: loss {value:.6f} at step {step + 1}, the others {middle:.6f}")
    return problems


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours divided by each peer: step time, unwaited step time, host time and peak memory."""
    ours = rows.get("ours")
    found: dict[str, dict[str, float]] = {}
    for peer in PEERS:
        if ours is None or peer not in rows:
            continue
        found[peer] = {
            key: ours[key] / rows[peer][key]
            for key in ("step_ms", "free_ms", "host_ms", "allocated", "reserved", "cpu_peak")
            if ours.get(key) and rows[peer].get(key)
        }
    return found


def table(results: list[dict[str, Any]]) -> str:
    """All works as one text table."""
    head = (
        f"{'work':<22} {'variant':<17} {'step ms':>9} {'+-':>6} {'free ms':>8} {'host ms':>8} {'tok/s':>8} "
        f"{'alloc':>6} {'reserv':>6} {'init s':>6} {'coll':>5} {'recv MB':>8} {'pycalls':>8} {'ours/it':>8}"
    )
    lines = [head, "-" * len(head)]
    for result in results:
        for name, row in result["rows"].items():
            ratio = result["ratios"].get(name, {}).get("step_ms")
            memory = row["allocated"] or row.get("cpu_peak", 0)
            lines.append(
                f"{result['work']['name']:<22} {name:<17} {row['step_ms']:>9.1f} {row['spread_ms']:>6.1f} "
                f"{row['free_ms']:>8.1f} {row['host_ms']:>8.1f} {row['tokens_per_s']:>8.0f} "
                f"{memory / 2**30:>6.2f} {row['reserved'] / 2**30:>6.2f} {row.get('init_s', 0):>6.1f} "
                f"{row.get('calls_total', 0):>5} {row.get('received_total', 0) / 1e6:>8.1f} "
                f"{row.get('python_calls', 0):>8} {f'{ratio:.3f}' if ratio else '':>8}"
            )
        for name, error in result["failed"].items():
            lines.append(f"{result['work']['name']:<22} {name:<17} FAILED: {error[:120]}")
        for problem in result["disagree"]:
            lines.append(f"{result['work']['name']:<22} LOSSES DISAGREE: {problem}")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> bool:
    """Bars of step time and peak memory per work; False where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    results = [result for result in results if result["rows"]]
    if not results:
        return False
    figure, axes = pyplot.subplots(2, 1, figsize=(max(7.0, 2.2 * len(results)), 8))
    names = list(dict.fromkeys(name for result in results for name in result["rows"]))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places, times, memory, spread = [], [], [], []
        for position, result in enumerate(results):
            row = result["rows"].get(name)
            if row is not None:
                places.append(position + index * width)
                times.append(row["step_ms"])
                spread.append(row["spread_ms"])
                memory.append((row["allocated"] or row.get("cpu_peak", 0)) / 2**30)
        axes[0].bar(places, times, width, yerr=spread, label=name)
        axes[1].bar(places, memory, width)
    for axis, label in zip(axes, ("step time, ms", "peak memory a rank, GiB"), strict=True):
        axis.set_ylabel(label)
        axis.set_xticks([i + 0.4 - width / 2 for i in range(len(results))])
        axis.set_xticklabels([result["work"]["name"] for result in results], rotation=15)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
