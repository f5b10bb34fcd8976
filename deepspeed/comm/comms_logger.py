# SPDX-License-Identifier: Apache-2.0
"""Counts of what crosses the wire: calls, bytes and seconds by operation and by group.

    if comms_logger.LOGGER.enabled:
        comms_logger.record("gather", "hpz", nbytes)

What must hold: nothing here communicates, and a disabled logger does no work. The group's name tells traffic inside a
node ("hpz") from traffic that crosses nodes ("world").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.utils.logging import log_dist


@dataclass
class Total:
    """What one (operation, group) pair has moved on this rank. `seconds` covers blocking calls only."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, calls: int, nbytes: int, seconds: float) -> None:
        self.calls += calls
        self.nbytes += nbytes
        self.seconds += seconds


def _field(section: Any, name: str, default: Any) -> Any:
    if isinstance(section, Mapping):
        return section.get(name, default)
    return getattr(section, name, default)


class CommsLogger:
    """One per process (`LOGGER`): the wire is shared by every engine in it."""

    def __init__(self) -> None:
        self.enabled = False
        self.verbose = False
        self.debug = False
        self.prof_all = True
        self.prof_ops: frozenset[str] = frozenset()
        self.totals: dict[tuple[str, str], Total] = {}

    def configure(
        self,
        section: Any = None,
        *,
        enabled: bool | None = None,
        verbose: bool | None = None,
        debug: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: Iterable[str] | None = None,
    ) -> None:
        """Take the fields of a `comms_logger` section (object or mapping), then the keywords that are not None."""
        if section is not None:
            self.verbose = bool(_field(section, "verbose", self.verbose))
            self.debug = bool(_field(section, "debug", self.debug))
            self.prof_all = bool(_field(section, "prof_all", self.prof_all))
            self.prof_ops = frozenset(_field(section, "prof_ops", None) or ())
            self.enabled = bool(_field(section, "enabled", self.enabled))
        if verbose is not None:
            self.verbose = verbose
        if debug is not None:
            self.debug = debug
        if prof_all is not None:
            self.prof_all = prof_all
        if prof_ops is not None:
            self.prof_ops = frozenset(prof_ops)
        if enabled is not None:
            self.enabled = enabled

    def record(self, op: str, group_name: str, nbytes: int, count: int = 1, seconds: float = 0.0) -> None:
        """Add `count` calls of `op` that moved `nbytes` in all; ignored while disabled or if `op` is not profiled."""
        if not self.enabled or not (self.prof_all or op in self.prof_ops):
            return
        self.totals.setdefault((op, group_name), Total()).add(count, nbytes, seconds)
        if self.verbose:
            log_dist(f"comm op: {op} | group: {group_name} | calls: {count} | bytes: {nbytes} | {seconds * 1e3:.3f} ms")

    def reset(self) -> None:
        self.totals.clear()

    def by_group(self) -> dict[str, Total]:
        """Totals over all operations, by group name."""
        groups: dict[str, Total] = {}
        for (_, group), total in self.totals.items():
            groups.setdefault(group, Total()).add(total.calls, total.nbytes, total.seconds)
        return groups

    def summary(self) -> str:
        """A table of this rank's traffic: one line an (operation, group), then one line a group."""
        lines = [f"{'operation':<28}{'group':<24}{'calls':>10}{'MiB':>14}{'ms':>12}{'GiB/s':>10}"]
        for (op, group), total in sorted(self.totals.items()):
            lines.append(_row(op, group, total))
        lines.extend(_row("all", group, total) for group, total in sorted(self.by_group().items()))
        return "\n".join(lines)


def _row(op: str, group: str, total: Total) -> str:
    rate = f"{total.nbytes / total.seconds / 2**30:.2f}" if total.seconds else "-"
    return f"{op:<28}{group:<24}{total.calls:>10}{total.nbytes / 2**20:>14.3f}{total.seconds * 1e3:>12.2f}{rate:>10}"


LOGGER = CommsLogger()
record = LOGGER.record
