# SPDX-License-Identifier: Apache-2.0
"""Markers and the lifetime of the warm pool. Nothing here imports torch unless a GPU test was collected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.harness import pool
from tests.harness.skips import needs, table

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=1): needs that many CUDA devices; skipped elsewhere")
    config.addinivalue_line("markers", "slow: left out of the quick tier (-m 'not slow')")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu")) is not None]
    if not marked:
        return
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, marker in marked:
        need = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        if have < need:
            what = f"{need} CUDA device(s), this machine has {have}"
            why = needs(what, "bash tests/gpu/session.sh on a machine with them")
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        (report.nodeid.partition("::")[0], str(report.longrepr[2]).removeprefix("Skipped: "))
        for report in terminalreporter.stats.get("skipped", [])
    ]
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        terminalreporter.write("\n".join(table(skipped)) + "\n")


@pytest.fixture(autouse=True)
def _leave_no_process_group() -> Iterator[None]:
    """A test that shards in this process (a world of one) leaves no process group to tests that fork ranks from it."""
    yield
    comm = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def _close_pool() -> Iterator[None]:
    yield
    pool.close_pool()
