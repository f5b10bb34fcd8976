# SPDX-License-Identifier: Apache-2.0
"""Clients ask importlib.metadata whether deepspeed is installed; in a bare checkout a metadata folder on the path
says so."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest

from tests.harness.skips import needs
from tests.meta.sources import ROOT


def _make_visible() -> None:
    try:
        importlib.metadata.metadata("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        line = next(
            text for text in (ROOT / "deepspeed" / "version.py").read_text().splitlines() if "__version__ =" in text
        )
        version = line.split("=")[1].strip().strip("\"'")
        folder = Path(tempfile.mkdtemp(prefix="metadata-"))
        info = folder / f"deepspeed-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
        sys.path.append(str(folder))


_make_visible()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    for item in items:
        if missing and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=needs(" and ".join(missing))))
