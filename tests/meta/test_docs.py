# SPDX-License-Identifier: Apache-2.0
"""Documents point at what exists: links, the files that the architecture's map names, keys in examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed.runtime.config import DeepSpeedConfig
from tests.meta.sources import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]+)?(?:#([\w-]+))?\)")


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def _broken(page: Path) -> list[str]:
    found = []
    for target, anchor in _LINK.findall(page.read_text()):
        there = page.parent / target if target else page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            found.append(f"{target}#{anchor}" if anchor else target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert _broken(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](#one-thing) [b](#other) [c](gone.md) [d](https://example.org)")
    assert _broken(page) == ["#other", "gone.md"]


def _named_files(text: str) -> list[Path]:
    """Files of the map's tables; a row names several, below the folder that its heading gives."""
    folder, found = ROOT / "deepspeed", []
    for line in text[text.index("## Map") : text.index("## A step")].splitlines():
        if line.startswith("### "):
            given = re.search(r"`(.+?)`", line)
            folder = ROOT / "deepspeed" / (given.group(1) if given else "")
        elif line.startswith("| `"):
            cell = line.split("|")[1]
            found += [folder / name for name in re.findall(r"`([\w./]+)`", cell)]
    return found


def test_the_map_names_files_that_exist() -> None:
    files = _named_files((ROOT / "docs" / "architecture.md").read_text())
    assert len(files) > 40
    assert [str(path) for path in files if not path.exists()] == []


def _examples(text: str) -> list[dict[str, Any]]:
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.+?)```", text, flags=re.DOTALL)]
    return [block for block in blocks if "zero_optimization" in block]


@pytest.mark.parametrize("page", [page for page in PAGES if _examples(page.read_text())], ids=lambda page: page.name)
def test_configurations_in_documents_are_accepted(page: Path) -> None:
    for example in _examples(page.read_text()):
        config = {key: value for key, value in example.items() if value != "auto"}
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config}, world_size=16)
