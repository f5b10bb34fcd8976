# SPDX-License-Identifier: Apache-2.0
"""What the demo shows and what it checks: tables, a plot, and the list of promises that were not kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

PLAIN, ZERO3, HPZ = "plain torch", "ZeRO-3", "ZeRO-3 + hpZ"
TOLERANCE = 2e-5
"""Largest relative difference of a loss from plain torch's: fp32, the sums of a batch taken in another order."""


@dataclass
class Run:
    """The lines that one launch reported, in order of steps."""

    title: str
    key: str
    lines: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {line["step"]: line["loss"] for line in self.lines}

    @property
    def seconds(self) -> float:
        """Median time of a step, the first left out."""
        return median([line["seconds"] for line in self.lines[1:]])

    def per_step(self, counter: str) -> float:
        """Median growth of a counter over a step; 0 for plain torch, which has none."""
        values = [line.get(counter, 0) for line in self.lines]
        return median([after - before for before, after in zip(values, values[1:], strict=False)])


def resumed(title: str) -> str:
    """The title of the run that continues `title`."""
    return f"{title}, resumed"


def difference(run: Run, reference: Run) -> float:
    """Largest relative difference of the losses of the steps that both have."""
    mine, theirs = run.losses, reference.losses
    return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in mine if step in theirs)


def print_tables(console: Console, runs: dict[str, Run], checkpoint: int) -> None:
    """Losses side by side, then what each run cost."""
    plain, last = runs[PLAIN], max(runs[PLAIN].losses)
    table = Table(title="loss per step", title_justify="left", caption_justify="left")
    table.add_column("step", justify="right")
    table.add_column("")
    table.add_column(PLAIN, justify="right")
    sharded = [ZERO3, resumed(ZERO3), HPZ, resumed(HPZ)]
    for title in sharded:
        table.add_column(title.replace(", ", "\n"), justify="right")
    notes = {1: "right after from_pretrained", checkpoint: "checkpoint", checkpoint + 1: "right after resuming"}
    for step in sorted({1, 2, 3, checkpoint, checkpoint + 1, checkpoint + 2, last}):
        cells = [runs[title].losses.get(step) for title in (PLAIN, *sharded)]
        style = "bold" if step in (1, checkpoint + 1) else None
        table.add_row(
            str(step), notes.get(step, ""), *("" if loss is None else f"{loss:.6f}" for loss in cells), style=style
        )
    console.print()
    console.print(table)
    costs = Table(title="per optimizer step (median)", title_justify="left")
    costs.add_column("run")
    for name in ("gathers inside\na group", "gathers across\ngroups", "MB across", "seconds", "difference\nfrom plain"):
        costs.add_column(name, justify="right")
    for title in (PLAIN, *sharded):
        run = runs[title]
        costs.add_row(
            title,
            f"{run.per_step('gathers_inside'):.0f}" if title != PLAIN else "",
            f"{run.per_step('gathers_across'):.0f}" if title != PLAIN else "",
            f"{run.per_step('gather_bytes_across') / 1e6:.2f}" if title != PLAIN else "",
            f"{run.seconds:.2f}",
            f"{difference(run, plain):.1e}" if title != PLAIN else "",
        )
    console.print()
    console.print(costs)


def failures(runs: dict[str, Run], checkpoint: int, accumulation: int, exact: bool, hpz: bool) -> list[str]:
    """The promises that were not kept, in words.

    Args:
        exact: whether this device computes the same bits twice. hpz: whether gathers can stay inside a group.
    """
    wrong = []
    plain = runs[PLAIN].losses
    last = max(plain)
    for title, run in runs.items():
        first = checkpoint + 1 if title.endswith("resumed") else 1
        if sorted(run.losses) != list(range(first, last + 1)):
            wrong.append(f"{title}: steps {sorted(run.losses)} instead of {first} to {last}")
            continue
        for step, loss in run.losses.items():
            if not abs(loss - plain[step]) <= TOLERANCE * abs(plain[step]):
                wrong.append(f"{title}: loss {loss:.6f} at step {step}, plain torch {plain[step]:.6f}")
                break
    if not plain[last] < plain[1]:
        wrong.append(f"the loss did not fall: {plain[1]:.6f} at step 1, {plain[last]:.6f} at step {last}")
    if exact and not wrong:
        pairs = [(HPZ, ZERO3), (resumed(ZERO3), ZERO3), (resumed(HPZ), HPZ)]
        for one, other in pairs:
            if any(loss != runs[other].losses[step] for step, loss in runs[one].losses.items()):
                wrong.append(f"{one} and {other} differ in the last bits, and should not")
    if hpz:
        without, having = runs[ZERO3].per_step("gathers_across"), runs[HPZ].per_step("gathers_across")
        if not having * accumulation <= without:
            wrong.append(f"hpZ: {having:.0f} gathers a step cross groups, {without:.0f} without it")
        if not runs[HPZ].per_step("gathers_inside") > 0:
            wrong.append("hpZ: no gather stayed inside a group")
    return wrong


def plot(path: Path, runs: dict[str, Run], checkpoint: int, where: str) -> None:
    """Draw the loss curves, their differences from plain torch, and the gathers of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey, blue, orange = "#b8bcc4", "#1f6fb4", "#e07b1a"
    figure = pyplot.figure(figsize=(11, 7.6), layout="constrained", dpi=130)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.5, 1))
    loss, diff, bars = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
    for axes in (loss, diff, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eceef1")
        axes.set_axisbelow(True)

    plain = runs[PLAIN].losses
    loss.plot(list(plain), list(plain.values()), color=grey, linewidth=9, solid_capstyle="round", label=PLAIN)
    styles = ((ZERO3, blue, "o", 0.0), (HPZ, orange, "s", 0.0))
    for title, color, marker, _ in styles:
        line, again = runs[title].losses, runs[resumed(title)].losses
        loss.plot(list(line), list(line.values()), color=color, linewidth=1.6 if title == ZERO3 else 1.2,
                  linestyle="-" if title == ZERO3 else (0, (4, 3)), label=title)  # fmt: skip
        loss.plot(list(again), list(again.values()), marker, color=color, markersize=9 if title == ZERO3 else 5,
                  markerfacecolor="none" if title == ZERO3 else color, label=resumed(title))  # fmt: skip
    loss.axvline(checkpoint + 0.5, color="#7d838c", linewidth=1, linestyle=":")
    top = max(plain.values())
    loss.annotate("right after from_pretrained", (1, plain[1]), (2.1, top), va="center", color="#4a4f57",
                  arrowprops={"arrowstyle": "->", "color": "#7d838c"})  # fmt: skip
    loss.annotate("resumed in fresh processes", (checkpoint + 0.6, top), va="center", color="#4a4f57")
    loss.set(xlabel="optimizer step", ylabel="loss", title=f"Fine-tuning with a stock Trainer script: {where}")
    loss.set_xticks(list(plain))
    loss.legend(frameon=False, ncols=3, loc="lower left")

    for title, color, marker, shift in ((ZERO3, blue, "o", -0.12), (HPZ, orange, "s", 0.12)):
        for name in (title, resumed(title)):
            values = runs[name].losses
            shown = [max(abs(v - plain[s]) / plain[s], 1e-9) for s, v in values.items()]
            diff.plot([s + shift for s in values], shown, marker, markersize=5, color=color,
                      markerfacecolor=color if name == title else "none", label=name)  # fmt: skip
    diff.axhline(TOLERANCE, color="#b3261e", linewidth=1, linestyle="--")
    diff.annotate("allowed", (1, TOLERANCE), (0, 4), textcoords="offset points", color="#b3261e")
    diff.set_yscale("log")
    diff.set_ylim(5e-10, 1e-3)
    diff.set(xlabel="optimizer step", title="Relative difference from plain torch")

    names = [ZERO3, HPZ]
    across = [runs[name].per_step("gathers_across") for name in names]
    inside = [runs[name].per_step("gathers_inside") for name in names]
    bars.barh(names, across, color="#5b6472", label="across groups", height=0.5)
    bars.barh(names, inside, left=across, color="#9ccf9f", label="inside a group", height=0.5)
    for row, (a, b) in enumerate(zip(across, inside, strict=True)):
        for start, value, color in ((0, a, "white"), (a, b, "#1d3a20")):
            if value:
                bars.text(start + value / 2, row, f"{value:.0f}", ha="center", va="center", color=color)
    bars.invert_yaxis()
    bars.grid(axis="y", visible=False)
    longest = max(a + b for a, b in zip(across, inside, strict=True))
    bars.set(title="Gathers per optimizer step", xlim=(0, 1.08 * longest))
    bars.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    figure.savefig(path)
    pyplot.close(figure)
