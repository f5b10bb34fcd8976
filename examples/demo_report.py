# SPDX-License-Identifier: Apache-2.0
"""What the demo shows and what it checks: tables, a plot, and the list of promises that were not kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
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
    sharded = [ZERO3, resumed(ZERO3), HPZ, resumed(HPZ)]
    table = Table(title="loss", title_justify="left", row_styles=["", "on grey11"])
    table.add_column("step", justify="right")
    for title in (PLAIN, *sharded):
        table.add_column(title.replace(", ", "\n"), justify="right", min_width=9)
    table.add_column("", no_wrap=True)
    notes = {1: "after from_pretrained", checkpoint: "checkpoint", checkpoint + 1: "after resuming"}
    for step in sorted({1, 2, 3, checkpoint, checkpoint + 1, checkpoint + 2, last}):
        cells = [runs[title].losses.get(step) for title in (PLAIN, *sharded)]
        style = "bold" if step in (1, checkpoint + 1) else None
        table.add_row(
            str(step), *("" if loss is None else f"{loss:.6f}" for loss in cells), notes.get(step, ""), style=style
        )
    console.print()
    console.print(table)
    costs = Table(title="per optimizer step (median)", title_justify="left")
    costs.add_column("", no_wrap=True)
    for name in ("gathers\ninside", "gathers\nacross", "MB\nacross", "seconds", "difference\nfrom plain"):
        costs.add_column(name, justify="right")
    for title in (PLAIN, *sharded):
        run = runs[title]
        counters = ("gathers_inside", "gathers_across")
        costs.add_row(
            title,
            *("" if title == PLAIN else f"{run.per_step(counter):.0f}" for counter in counters),
            "" if title == PLAIN else f"{run.per_step('gather_bytes_across') / 1e6:.2f}",
            f"{run.seconds:.2f}",
            "" if title == PLAIN else f"{difference(run, plain):.1e}",
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
    begin, end = mean(plain[step] for step in (1, 2, 3)), mean(plain[step] for step in (last - 2, last - 1, last))
    if not end < begin:
        wrong.append(f"the loss did not fall: {begin:.4f} in the first three steps, {end:.4f} in the last three")
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


GREY, BLUE, ORANGE, DARK, GREEN, RED = "#c3c7ce", "#1f6fb4", "#e07b1a", "#5b6472", "#9ccf9f", "#b3261e"


def plot(path: Path, runs: dict[str, Run], checkpoint: int, where: str) -> None:
    """Draw the loss curves, their differences from plain torch, and the gathers of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10.5, 7.6), layout="constrained", dpi=120)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.6, 1))
    loss, diff, bars = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
    for axes in (loss, diff, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    _plot_losses(loss, runs, checkpoint)
    loss.set_title(f"Fine-tuning with a stock Trainer script: {where}", fontsize=12)
    _plot_differences(diff, runs)
    _plot_gathers(bars, runs)
    figure.savefig(path)
    pyplot.close(figure)


def _plot_losses(axes: Any, runs: dict[str, Run], checkpoint: int) -> None:
    plain = runs[PLAIN].losses
    axes.grid(axis="y", color="#eceef1")
    axes.plot(list(plain), list(plain.values()), color=GREY, linewidth=9, solid_capstyle="round", label=PLAIN)
    for title, color, line, marker in (
        (ZERO3, BLUE, {"linewidth": 2}, {"marker": "o", "markersize": 9, "markerfacecolor": "none"}),
        (HPZ, ORANGE, {"linewidth": 2, "linestyle": (0, (2, 2))}, {"marker": "s", "markersize": 4}),
    ):
        first, again = runs[title].losses, runs[resumed(title)].losses
        axes.plot(list(first), list(first.values()), color=color, label=title, **line)
        axes.plot(list(again), list(again.values()), color=color, linestyle="none", label=resumed(title), **marker)
    low, high = min(plain.values()), max(plain.values())
    top = high + 0.16 * (high - low)
    axes.set_ylim(low - 0.06 * (high - low), top + 0.06 * (high - low))
    axes.axvline(checkpoint + 0.5, color=DARK, linewidth=1, linestyle=":")
    arrow = {"arrowstyle": "->", "color": DARK}
    axes.annotate("right after from_pretrained", (1, plain[1]), (2, top), va="center", color=DARK, arrowprops=arrow)
    axes.annotate("resumed in fresh processes", (checkpoint + 0.7, top), va="center", color=DARK)
    axes.set(xlabel="optimizer step", ylabel="loss", xticks=list(plain))
    axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _plot_differences(axes: Any, runs: dict[str, Run]) -> None:
    plain = runs[PLAIN].losses
    axes.grid(axis="y", color="#eceef1")
    for title, color, marker, shift in ((ZERO3, BLUE, "o", -0.15), (HPZ, ORANGE, "s", 0.15)):
        for name in (title, resumed(title)):
            found = [abs(loss - plain[step]) / plain[step] for step, loss in runs[name].losses.items()]
            axes.plot([s + shift for s in runs[name].losses], found, marker, markersize=4, color=color, clip_on=False)
    axes.axhline(TOLERANCE, color=RED, linewidth=1, linestyle="--")
    axes.annotate("allowed", (1, TOLERANCE), (0, 3), textcoords="offset points", color=RED, fontsize=9)
    axes.set_yscale("symlog", linthresh=1e-8)
    ticks = [0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4]
    axes.set(ylim=(0, 1e-4), yticks=ticks, yticklabels=["equal", *(f"{tick:.0e}" for tick in ticks[1:])])
    axes.minorticks_off()
    axes.set(xlabel="optimizer step", xticks=list(plain)[::3])
    axes.set_title("relative difference of the loss from plain torch", fontsize=10)


def _plot_gathers(axes: Any, runs: dict[str, Run]) -> None:
    names = [ZERO3, HPZ]
    across = [runs[name].per_step("gathers_across") for name in names]
    inside = [runs[name].per_step("gathers_inside") for name in names]
    axes.barh(names, across, color=DARK, label="across groups", height=0.5)
    axes.barh(names, inside, left=across, color=GREEN, label="inside a group", height=0.5)
    for row, (first, second) in enumerate(zip(across, inside, strict=True)):
        for start, value, color in ((0, first, "white"), (first, second, "#1d3a20")):
            if value:
                axes.text(start + value / 2, row, f"{value:.0f}", ha="center", va="center", color=color)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title("gathers per optimizer step", fontsize=10)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
