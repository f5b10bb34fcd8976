# SPDX-License-Identifier: Apache-2.0
"""Ranks as forks of the test process: each case costs a fraction of a second, so kill tests can be exhaustive.

A fork has torch imported and nothing started.  Each one joins a gloo group over a file and ends with `os._exit`; the
parent reaps and, after the limit, kills only the processes that it forked itself.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = 8.0


@dataclass
class Outcome:
    """How one rank ended: signal number or None, what `fn` returned (JSON), the error's class name and text."""

    killed_by: int | None
    value: Any = None
    error: str | None = None
    text: str = ""


def run_forked(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 40, ranks_env: Any = None
) -> list[Outcome]:
    """Call `fn(*args)` on `world` forked ranks; `ranks_env(rank)` gives extra environment variables."""
    assert world <= 4
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _child(fn, args, world, rank, folder, {} if ranks_env is None else ranks_env(rank))
        pids.append(pid)
    try:
        codes = _reap(pids, timeout)
        return [_outcome(folder / f"{rank}.json", codes[pid]) for rank, pid in enumerate(pids)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """`run_forked` for what must succeed: the values by rank, or `AssertionError` with the first rank's traceback."""
    outcomes = run_forked(fn, world, *args, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.killed_by is not None:
            raise AssertionError(f"rank {rank}: signal {outcome.killed_by}, {outcome.error}: {outcome.text}")
    return [outcome.value for outcome in outcomes]


def _child(fn: Callable[..., Any], args: Any, world: int, rank: int, folder: Path, env: dict[str, str]) -> None:
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo", **env)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
        )
        answer = {"value": fn(*args)}
    except BaseException as error:
        answer = {"error": type(error).__name__, "text": f"{error}\n{traceback.format_exc()}"}
    try:
        text = json.dumps(answer)
    except (TypeError, ValueError) as error:
        text = json.dumps({"error": "Unsendable", "text": f"the result is not JSON: {error}"})
    try:
        (folder / f"{rank}.json").write_text(text)
    finally:
        os._exit(0)


def _reap(pids: list[int], timeout: float) -> dict[int, int]:
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    late = [pid for pid in pids if pid not in codes]
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if late:
        raise AssertionError(f"ranks {[pids.index(pid) for pid in late]} did not end within {timeout} s")
    return codes


def _outcome(path: Path, code: int) -> Outcome:
    if code < 0:
        return Outcome(-code)
    answer = json.loads(path.read_text())
    return Outcome(None, answer.get("value"), answer.get("error"), answer.get("text", ""))
