# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md names every error of the package, and quotes nothing that does not exist."""

from __future__ import annotations

import ast
import re

import pytest

from deepspeed import errors
from tests.faults.messages import ROOT, Message, messages

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
QUOTES = [quote for row in ROWS for quote in re.findall(r"`([^`]+)`", row)]
BY_CLASS = ("HostListError", "EnvFileError", "LauncherError")
"""Classes that the page describes as a whole."""


def _pattern(quote: str) -> re.Pattern[str]:
    """A quotation as a pattern: its … stands for anything in one line."""
    return re.compile(".*?".join(re.escape(part) for part in quote.strip("…").split("…")))


PATTERNS = [_pattern(quote) for quote in QUOTES if len(quote.strip("… :")) >= 6]


def _constants() -> str:
    """Every text of the package, with … for what f-strings fill in."""
    found = []
    for path in (ROOT / "deepspeed").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_class_is_named(name: str) -> None:
    alias_of = getattr(errors, name).__name__
    assert name in PAGE or alias_of in PAGE or name in ("ConfigConflictError", "NotSupportedError", "CheckpointError")


def _covered(message: Message) -> bool:
    return message.error in BY_CLASS or any(pattern.search(message.text) for pattern in PATTERNS)


def test_every_message_is_on_the_page() -> None:
    missing = [m for m in messages() if not _covered(m)]
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(
        f"{m.where} {m.error}: {m.text}" for m in missing
    )


def test_every_quotation_exists() -> None:
    texts = _constants()
    unknown = [quote for quote in QUOTES if not _pattern(quote).search(texts)]
    assert not unknown, f"quoted, but nowhere in the package: {unknown}"
