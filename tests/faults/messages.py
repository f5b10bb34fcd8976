# SPDX-License-Identifier: Apache-2.0
"""Every message that the package raises, read from its sources: f-strings with ``…`` for what is filled in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = ("AssertionError", "AttributeError", "KeyError", "StopIteration", "SystemExit", "TypeError")
"""Raised for what only a fault of the package, or Python's own protocols, bring about."""


@dataclass(frozen=True)
class Message:
    """One place that raises."""

    where: str
    error: str
    text: str


def messages() -> list[Message]:
    """Every ``raise Class(text)`` of the package, and every such error that is made to be raised elsewhere."""
    return [m for path in sorted((ROOT / "deepspeed").rglob("*.py")) for m in _of(path)]


def _of(path: Path) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if not name.endswith(("Error", "Mismatch", "Timeout", "Corrupt", "Unsafe", "Gradients")) or name in INTERNAL:
            continue
        text = _text(node.args[0])
        if text.strip("… "):
            yield Message(f"{path.relative_to(ROOT)}:{node.lineno}", name, text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"
