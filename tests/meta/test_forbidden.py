# SPDX-License-Identifier: Apache-2.0
"""Calls that run code from data or text through a shell do not exist outside a reviewed list.

Forbidden: pickle.load(s) and Unpickler, torch.load without weights_only=True, eval, exec, os.system, os.popen,
shell=True, yaml.load, marshal and shelve. REVIEWED holds (file, what) pairs with the reason for each.
"""

from __future__ import annotations

import ast

import pytest

from tests.meta.sources import ROOT, files

REVIEWED = {
    # Both ends of the harness' pipe are processes of the same test run.
    ("tests/harness/wire.py", "pickle.loads"),
}

_NAMES = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "dill.load",
    "dill.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "eval",
    "exec",
}


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`p.loads` -> `pickle.loads` under `import pickle as p`; empty for anything that is not a dotted name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)])


def _aliases(tree: ast.AST) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def forbidden(source: str) -> list[tuple[int, str]]:
    """(line, name) of each forbidden use in a source text."""
    tree, found = ast.parse(source), []
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node, aliases).removeprefix("builtins.").replace("_pickle.", "pickle.")
            if name in _NAMES:
                found.append((node.lineno, name))
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if _dotted(base, aliases) == "pickle.Unpickler":
                    found.append((node.lineno, "pickle.Unpickler"))
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if "shell" in keywords and not (
                isinstance(keywords["shell"], ast.Constant) and keywords["shell"].value is False
            ):
                found.append((node.lineno, "shell=True"))
            if _dotted(node.func, aliases) in {"torch.load", "torch.serialization.load"} and not _is_true(
                keywords.get("weights_only")
            ):
                found.append((node.lineno, "torch.load"))
    return sorted(set(found))


def test_nothing_forbidden_outside_the_reviewed_list() -> None:
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        found += [
            f"{name}:{line}: {what}" for line, what in forbidden(path.read_text()) if (name, what) not in REVIEWED
        ]
    assert found == []


def test_every_reviewed_entry_is_still_needed() -> None:
    used = {(name, what) for name, _ in REVIEWED for _, what in forbidden((ROOT / name).read_text())}
    assert used >= REVIEWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from pickle import loads\nloads(b)",
        "from pickle import Unpickler\nclass U(Unpickler): pass",
        "import _pickle\n_pickle.loads(b)",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "from torch import load\nload(f)",
        "eval('1')",
        "run = exec",
        "import os\nos.system('ls')",
        "from os import popen as go\ngo('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "import yaml\nyaml.load(f)",
    ],
)
def test_each_kind_is_seen(source: str) -> None:
    assert forbidden(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import json\njson.load(f)",
        "model.eval()",
        "import yaml\nyaml.safe_load(f)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import pickle\npickle.dumps(x)",
    ],
)
def test_what_is_allowed(source: str) -> None:
    assert forbidden(source) == []
