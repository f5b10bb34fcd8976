# SPDX-License-Identifier: Apache-2.0
"""A warm pool of rank processes: torch is imported once per rank, process groups come and go per call.

    results = run_ranks(fn, 4, arg, timeout=60)      # fn is a module-level function; one result per rank

What must hold: a rank that fails is reported with its number and traceback, even while the others hang in a
collective; a pool in which anything failed is killed (its own pids only) and never used again; fault tests use
`run_fresh`, whose processes serve one call each.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.harness.wire import READY, Job, Reply, dump_job, load

_ROOT = Path(__file__).resolve().parents[2]
_GRACE = 3.0  # how long the other ranks may still answer after the first one failed
_START = 240.0  # how long a worker may take to import torch on a busy machine; not counted in a call's limit
MAX_RANKS = 4


class RankError(AssertionError):
    """One or more ranks failed. `failures` maps rank -> (exception type name, text)."""

    def __init__(self, message: str, failures: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass
class FreshResult:
    """How one fresh process ended: its exit code (negative: a signal) and its reply, if it lived to send one."""

    rank: int
    returncode: int
    value: Any
    error_type: str | None
    error_text: str
    log: str


class Worker:
    """One rank process, its pipe and its log file."""

    def __init__(self, folder: Path, name: str, once: bool) -> None:
        self.log = folder / f"{name}.log"
        self.conn, child = Pipe()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.worker", str(child.fileno()), "once" if once else "many"],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env=env,
            )
        child.close()

    def await_ready(self) -> None:
        """Raises RuntimeError where the process does not come up."""
        try:
            if self.conn.poll(_START) and self.conn.recv_bytes() == READY:
                return
        except (EOFError, OSError):
            pass
        raise RuntimeError(f"a worker did not start; its log ends with:\n{self.tail()}")

    def tail(self, size: int = 6000) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-size:]

    def kill(self) -> None:
        self.conn.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def dump_stacks(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)


class Pool:
    """Up to MAX_RANKS warm workers. Started on demand, so a test at world size 1 pays for one process."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[Worker] = []
        self.calls = 0

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, jobs: Sequence[Job], timeout: float) -> list[Any]:
        started = []
        while len(self.workers) < len(jobs):
            started.append(Worker(self.folder, f"rank{len(self.workers)}", once=False))
            self.workers.append(started[-1])
        for worker in started:
            worker.await_ready()
        workers = self.workers[: len(jobs)]
        for worker, job in zip(workers, jobs, strict=True):
            worker.conn.send_bytes(dump_job(job))
        replies = _collect(workers, timeout)
        if all(reply is not None and reply.error_type is None for reply in replies.values()):
            return [replies[rank].value for rank in range(len(workers))]  # type: ignore[union-attr]
        raise _explain(workers, replies, timeout)


def _collect(workers: Sequence[Worker], timeout: float) -> dict[int, Reply | None]:
    """Replies by rank; None for a rank that died or did not answer in time. Returns early once a rank has failed."""
    replies: dict[int, Reply | None] = {}
    by_conn: dict[Any, int] = {worker.conn: rank for rank, worker in enumerate(workers)}
    end = time.monotonic() + timeout
    while by_conn and (left := end - time.monotonic()) > 0:
        for conn in wait(list(by_conn), left):
            assert isinstance(conn, Connection)
            rank = by_conn.pop(conn)
            try:
                replies[rank] = load(conn.recv_bytes())
            except (EOFError, OSError):
                replies[rank] = None
            reply = replies[rank]
            if reply is None or reply.error_type is not None:
                end = min(end, time.monotonic() + _GRACE)
    if by_conn:
        for rank in by_conn.values():
            workers[rank].dump_stacks()
            replies[rank] = None
        time.sleep(0.3)  # let the stacks reach the log files
    return replies


def _explain(workers: Sequence[Worker], replies: dict[int, Reply | None], timeout: float) -> RankError:
    parts, failures = [], {}
    for rank in sorted(replies):
        reply, worker = replies[rank], workers[rank]
        if reply is None:
            code = worker.process.poll()
            how = "did not answer" if code is None else f"died with exit code {code}"
            failures[rank] = ("NoAnswer" if code is None else "Died", how)
            parts.append(f"--- rank {rank} {how} (limit {timeout:g} s); its log ends with:\n{worker.tail()}")
        elif reply.error_type is not None:
            failures[rank] = (reply.error_type, reply.error_text)
            parts.append(f"--- rank {rank} raised {reply.error_type}: {reply.error_text}\n{reply.traceback}")
    head = ", ".join(f"rank {rank}: {kind}" for rank, (kind, _) in failures.items())
    return RankError(f"{head}\n" + "\n".join(parts), failures)


def _jobs(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    call: int,
    group_timeout: float,
    init_group: bool,
    env: dict[str, str] | None,
) -> list[Job]:
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size is {world_size}; this harness runs 1 to {MAX_RANKS} ranks")
    store = str(folder / f"store{call}")
    return [
        Job(fn, args, rank, world_size, store, group_timeout, init_group, dict(env or {})) for rank in range(world_size)
    ]


_pool: Pool | None = None


def close_pool() -> None:
    """End the warm workers; the next call starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


atexit.register(close_pool)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    init_group: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on each of `world_size` warm ranks and return the results in rank order.

    `fn` must be importable by name. torch.distributed (gloo) is initialised unless `init_group` is False; RANK,
    WORLD_SIZE and LOCAL_RANK are set, `env` is added. Raises RankError.
    """
    global _pool
    if _pool is None:
        _pool = Pool()
    _pool.calls += 1
    jobs = _jobs(fn, world_size, args, _pool.folder, _pool.calls, timeout, init_group, env)
    try:
        return _pool.run(jobs, timeout)
    except BaseException:
        close_pool()
        raise


def run_fresh(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    group_timeout: float = 8,
    init_group: bool = True,
    env: dict[str, str] | None = None,
) -> list[FreshResult]:
    """Like run_ranks in processes of its own, for tests that kill, stall or abort ranks: never raises for a rank's end.

    A process that is still there after `timeout` seconds is killed after its stacks were written to its log; it then
    has returncode -9 and no reply.
    """
    folder = Path(tempfile.mkdtemp(prefix="fresh-"))
    jobs = _jobs(fn, world_size, args, folder, 0, group_timeout, init_group, env)
    workers = [Worker(folder, f"rank{job.rank}", once=True) for job in jobs]
    try:
        for worker in workers:
            worker.await_ready()
        for worker, job in zip(workers, jobs, strict=True):
            worker.conn.send_bytes(dump_job(job))
        end = time.monotonic() + timeout
        return [_await_end(worker, rank, end) for rank, worker in enumerate(workers)]
    finally:
        for worker in workers:
            worker.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _await_end(worker: Worker, rank: int, end: float) -> FreshResult:
    reply: Reply | None = None
    try:
        if worker.conn.poll(max(0.0, end - time.monotonic())):
            reply = load(worker.conn.recv_bytes())
    except (EOFError, OSError):
        pass
    try:
        worker.process.wait(max(0.5, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        worker.dump_stacks()
        time.sleep(0.3)
        worker.process.kill()
        worker.process.wait()
    log = worker.tail()
    if reply is None:
        return FreshResult(rank, worker.process.returncode, None, None, "", log)
    text = f"{reply.error_text}\n{reply.traceback}" if reply.error_type else ""
    return FreshResult(rank, worker.process.returncode, reply.value, reply.error_type, text, log)
