# SPDX-License-Identifier: Apache-2.0
"""Why a test is skipped, and what would run it; the table of all of them at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["MULTIHOST_TOOLS", "needs", "table"]

MULTIHOST_TOOLS = "make multihost-tools (Debian, as root)"
_BETWEEN = "; to run it: "


def needs(what: str, remedy: str = "make test, which installs it") -> str:
    """The reason of a skip: what is missing here, and the command or the place that has it."""
    return f"needs {what}{_BETWEEN}{remedy}"


def table(skipped: Iterable[tuple[str, str]]) -> list[str]:
    """Lines for (path of the test's file, reason): how many tests of which folder, why, and what would run them."""
    counted = Counter(("/".join(path.split("/")[:2]), *reason.partition(_BETWEEN)[::2]) for path, reason in skipped)
    rows = [("tests", "in", "skipped because it", "to run them")]
    rows += [(str(count), *row) for row, count in sorted(counted.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
