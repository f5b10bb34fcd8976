# SPDX-License-Identifier: Apache-2.0
"""Every source says its licence and what it is for, stays readable, and knows nothing of the machine it was written
on."""

from __future__ import annotations

import ast
import re
import subprocess
from fnmatch import fnmatch

import pytest

from tests.harness.skips import needs
from tests.meta.sources import ROOT, files

HEADER = "# SPDX-License-Identifier: Apache-2.0"
MOST_LINES = 700
_TEXT = (".py", ".md", ".toml", ".cfg", ".ini", ".txt", ".in", ".yaml", ".yml", ".json", ".sh", ".cpp", ".cu", ".h", "")

# Folders of a developer or of a build machine.
_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|work|workspace|mnt)/[\w.-]+|/tmp/[a-z]\w*/|[A-Z]:\\Users")
# Examples in documentation and in tests of path handling.
_EXAMPLES = re.compile(r"/(?:home|work|mnt)/(?:me|user|you|ubuntu|nvme\w*|data|shared|models?|runs?|local_nvme)\b")


def _sources() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in files()]


def _header_problem(text: str) -> str | None:
    lines = text.splitlines()
    if not text.strip():
        return None  # nothing to say or to license
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    if not lines or lines[0] != HEADER:
        return "does not start with the licence line"
    if ast.get_docstring(ast.parse(text)) is None:
        return "has no module docstring"
    return None


def test_every_source_has_the_licence_line_and_a_docstring() -> None:
    found = {name: problem for name in _sources() if (problem := _header_problem((ROOT / name).read_text()))}
    assert found == {}


@pytest.mark.parametrize("text", ["x = 1\n", HEADER + "\nx = 1\n", '"""Doc."""\n' + HEADER])
def test_a_missing_header_is_seen(text: str) -> None:
    assert _header_problem(text) is not None


def test_no_source_grew_out_of_reading_size() -> None:
    long = {name: n for name in _sources() if (n := len((ROOT / name).read_text().splitlines())) > MOST_LINES}
    assert long == {}


def test_no_promise_for_later() -> None:
    word = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [name for name in _sources() if word.search((ROOT / name).read_text())]
    assert found == []


def machine_paths(text: str) -> list[str]:
    return [match.group(0) for match in _MACHINE.finditer(text) if not _EXAMPLES.match(match.group(0))]


def test_no_path_of_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip(needs("a git checkout", "git clone"))
    found = {}
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in _TEXT and path.is_file() and name != "tests/meta/test_files.py":
            hits = machine_paths(path.read_text(errors="replace"))
            if hits:
                found[name] = hits
    assert found == {}


@pytest.mark.parametrize(
    "text", ["cd /home/jane/src", "/root/.cache", "open('/workspace/jane/x')", "/tmp/abc/file", "C:\\Users\\x"]
)
def test_a_machine_path_is_seen(text: str) -> None:
    assert machine_paths(text)


@pytest.mark.parametrize("text", ["/job/hostfile", "a/home/b", "/mnt/nvme0/swap", "/dev/shm", "https://x.org/work/y"])
def test_other_paths_are_fine(text: str) -> None:
    assert machine_paths(text) == []


def test_pytest_enters_every_folder_of_tests(request: pytest.FixtureRequest) -> None:
    """Its own list of folders to leave out has `dist`: a whole folder of promises was never run."""
    left_out = request.config.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert parts and not [part for part in parts if any(fnmatch(part, pattern) for pattern in left_out)]
