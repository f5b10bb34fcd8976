# SPDX-License-Identifier: Apache-2.0
"""Promise: whoever runs the suite reads at its end what was skipped, why, and what would run it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.harness.skips import needs, table
from tests.meta.sources import ROOT


def _skips(tree: ast.AST) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """Calls of pytest that skip, and what they give as the reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            reason = next((keyword.value for keyword in node.keywords if keyword.arg == "reason"), None)
            if (owner, name) == ("pytest", "skip"):
                yield node, node.args[0] if node.args else reason
            elif (owner, name) in (("pytest", "importorskip"), ("pytest.mark", "skip"), ("pytest.mark", "skipif")):
                yield node, reason


def test_every_skip_says_what_would_run_it() -> None:
    found, silent = 0, []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for call, reason in _skips(ast.parse(path.read_text())):
            found += 1
            made = isinstance(reason, ast.Call) and ast.unparse(reason.func).split(".")[-1] == "needs"
            if not made and not (isinstance(reason, ast.Name) and reason.id in ("why", "WHY_NOT")):
                silent.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found > 10
    assert silent == [], "give tests.harness.skips.needs(...) as the reason"


def test_the_table_counts_by_folder_and_reason() -> None:
    gpu, ssh = needs("a GPU", "buy one"), needs("ssh", "make tools")
    rows = table([("tests/b/x.py", ssh), ("tests/a/x.py", gpu), ("tests/b/y.py", ssh), ("tests/b/y.py", "because")])
    assert rows[0].split("  ")[0] == "tests"
    assert [[cell.strip() for cell in row.split("  ") if cell] for row in rows[1:]] == [
        ["1", "tests/a", "needs a GPU", "buy one"],
        ["1", "tests/b", "because"],
        ["2", "tests/b", "needs ssh", "make tools"],
    ]
