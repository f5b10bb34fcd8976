# SPDX-License-Identifier: Apache-2.0
"""Each file's share of time, and one line per outcome for the session's summary, written as it happens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import place


@pytest.fixture(scope="module", autouse=True)
def _file_limit() -> Iterator[None]:
    place.file_end = time.monotonic() + place.FILE_LIMIT
    yield
    place.file_end = float("inf")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get("GPU_SESSION_RESULTS")
    if not path or (report.when != "call" and report.passed) or (report.when == "teardown" and report.skipped):
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash is not None else report.longrepr)
    first = next((line for line in reason.splitlines() if line.strip()), "")[:200]
    with Path(path).open("a") as results:
        results.write(f"{report.outcome:8}{report.duration:6.1f}s {report.nodeid.split('gpu/')[-1]}  {first}\n")
