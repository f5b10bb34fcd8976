# SPDX-License-Identifier: Apache-2.0
"""`job`: starts jobs of the launcher and leaves none of their processes behind, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import jobs


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., jobs.Job]]:
    started: list[jobs.Job] = []

    def start(*args: str, worker: tuple[str, ...] = (), folder: Path | None = None, **kwargs: Any) -> jobs.Job:
        started.append(jobs.start(folder or tmp_path, args, worker, **kwargs))
        return started[-1]

    yield start
    for item in started:
        if item.popen.poll() is None:
            item.kill()
        for name in item.out.glob("pid*"):
            if name.suffix != ".tmp":
                jobs.kill_quietly(int(name.read_text())) if jobs.alive(int(name.read_text())) else None
        if item.popen.stdout:
            item.popen.stdout.close()
