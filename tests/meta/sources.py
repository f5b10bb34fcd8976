# SPDX-License-Identifier: Apache-2.0
"""What the meta tests read: every Python source of the repository, by path and by module name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {"build", "dist"}  # at the top; hidden folders and caches are skipped anywhere


def files(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """The sources under the given folders of the repository (default: all of it), sorted."""
    found: list[Path] = []
    for folder in folders or (".",):
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            skipped = hidden or parts[0] in SKIPPED or parts[0].endswith(".egg-info")
            if path.suffix in suffixes and path.is_file() and not skipped:
                found.append(path)
    return sorted(found)


def module_name(path: Path) -> str:
    """`deepspeed/comm/__init__.py` -> `deepspeed.comm`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def package_sources() -> dict[str, str]:
    """Module name -> source text, for the package."""
    return {module_name(path): path.read_text() for path in files("deepspeed")}


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """ast.walk without what runs for type checkers only."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not _is_type_checking(child):
            yield from _walk(child)


def imports(name: str, source: str, known: set[str]) -> list[tuple[int, str]]:
    """(line, module) of every import statement at any depth. `from package import module` names the module."""
    found = []
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*name.split(".")[: -node.level], *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append((node.lineno, inner if inner in known else base))
    return found
