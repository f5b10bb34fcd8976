# SPDX-License-Identifier: Apache-2.0
"""Run a function on ranks that may die, stall or raise, and say how each ended.

    ended = run(scenarios.train, 3, "gather", group_timeout=3)      # one Ended per rank; never raises for a rank's end

Functions are module-level and exchange JSON. A rank that outlives the limit is killed after its stacks were written to
its log; it then has code -9.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PRELOAD = ("deepspeed", "tests.harness.models", "tests.harness.faults", "tests.harness.reference")


@dataclass
class Ended:
    """How a rank ended: exit code (negative: a signal), seconds after the start, its value or its error."""

    rank: int
    code: int
    seconds: float
    value: Any
    error: str | None
    text: str
    trace: str
    log: str


class _Zygote:
    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", *_PRELOAD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=env,
            text=True,
        )
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self._line()
        if not line:
            raise AssertionError(f"the process that forks ranks ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


_zygote: _Zygote | None = None


def close() -> None:
    """End the zygote; the next ``run`` starts a new one."""
    global _zygote
    if _zygote is not None:
        _zygote.close()
        _zygote = None


atexit.register(close)


def run(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    group_timeout: float = 3,
    limit: float = 60,
    env: dict[str, str] | None = None,
    folder: Path | None = None,
    whole: bool = False,
) -> list[Ended]:
    """Call ``fn(*args)`` on ``world`` forked ranks with gloo initialised; see the module.

    ``whole``: ranks end through the interpreter's shutdown instead of at once.
    """
    global _zygote
    if _zygote is None:
        _zygote = _Zygote()
    place = Path(tempfile.mkdtemp(prefix="faults-")) if folder is None else folder
    request = {
        "fn": f"{fn.__module__}:{fn.__qualname__}",
        "args": args,
        "world": world,
        "group_timeout": group_timeout,
        "limit": limit,
        "env": env or {},
        "folder": str(place),
        "whole": whole,
    }
    try:
        answer = _zygote.ask(request)
        return [_ended(place, rank, int(code), at) for rank, (code, at) in enumerate(answer["ended"])]
    except BaseException:
        close()
        raise
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def values(fn: Callable[..., Any], world: int, *args: Any, **kwargs: Any) -> list[Any]:
    """``run`` for what must succeed: every rank's value, or AssertionError with the first failing rank's trace."""
    ended = run(fn, world, *args, **kwargs)
    for rank in ended:
        if rank.code:
            raise AssertionError(f"rank {rank.rank} ended with {rank.code}\n{rank.trace}\n{rank.log}")
    return [rank.value for rank in ended]


def _ended(folder: Path, rank: int, code: int, seconds: float) -> Ended:
    path, log = folder / f"{rank}.json", folder / f"{rank}.log"
    answer = json.loads(path.read_text()) if path.exists() else {}
    return Ended(
        rank,
        code,
        seconds,
        answer.get("value"),
        answer.get("error"),
        answer.get("text", ""),
        answer.get("trace", ""),
        log.read_text(errors="replace") if log.exists() else "",
    )
