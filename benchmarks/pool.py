# SPDX-License-Identifier: Apache-2.0
"""The ranks of one variant as processes, driven by commands with a time limit each."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class WorkerFailed(RuntimeError):
    """A rank raised, died or did not answer in time; its pool is gone."""


@dataclass
class Setting:
    """Where workers run.

    Attributes:
        device: "cuda" or "cpu"; ``gpus``: GPUs to spread ranks over (all ranks on device 0 where they are too few).
        python: interpreter by variant, else this one; ``paths``: extra PYTHONPATH by variant.
    """

    device: str
    gpus: int
    logs: Path
    python: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


class Pool:
    """The processes of one variant."""

    def __init__(self, variant: str, world: int, setting: Setting) -> None:
        self.variant, self.world = variant, world
        self.scratch = tempfile.TemporaryDirectory(prefix="bench-")
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[int] = []
        self.buffers = [b""] * world
        self.logs = [setting.logs / f"{variant}-{world}r-{rank}.log" for rank in range(world)]
        for rank in range(world):
            self._start(rank, setting)

    def _start(self, rank: int, setting: Setting) -> None:
        spread = setting.device == "cuda" and setting.gpus >= self.world
        local = rank if spread else 0
        read, write = os.pipe()
        spec = {
            "variant": self.variant,
            "rank": rank,
            "world": self.world,
            "local_rank": local,
            "device": setting.device,
            "rendezvous": str(Path(self.scratch.name) / "rendezvous"),
            "answer_fd": write,
            "parent": os.getpid(),
        }
        env = dict(os.environ)
        env.update(RANK=str(rank), WORLD_SIZE=str(self.world), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(self.world))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000), PYTHONUNBUFFERED="1")
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("TOKENIZERS_PARALLELISM", "false")
        if setting.device == "cpu":
            env["DS_ACCELERATOR"] = "cpu"
        if setting.device == "cuda":
            env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
        extra = [path for path in (setting.paths.get(self.variant), os.environ.get("PYTHONPATH")) if path]
        env["PYTHONPATH"] = os.pathsep.join(extra)
        with open(self.logs[rank], "a") as log:
            self.processes.append(
                subprocess.Popen(
                    [setting.python.get(self.variant, sys.executable), "-m", "benchmarks.worker", json.dumps(spec)],
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write,),
                    text=True,
                    start_new_session=True,
                )
            )
        os.close(write)
        self.answers.append(read)

    def ask(self, name: str, limit: float, **arguments: Any) -> list[dict[str, Any]]:
        """Give every rank the command and collect the answers, in rank order.

        Raises:
            WorkerFailed: a rank failed, died or took more than ``limit`` seconds. The pool is killed then.
        """
        self.tell(name, **arguments)
        return self.hear(name, limit)

    def tell(self, name: str, **arguments: Any) -> None:
        """Give every rank the command."""
        line = json.dumps({"do": name, **arguments}) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError:
                self._fail(name, "a rank is gone")

    def hear(self, name: str, limit: float) -> list[dict[str, Any]]:
        """Collect the answers to the last command."""
        end = time.monotonic() + limit
        found: dict[int, dict[str, Any]] = {}
        while len(found) < self.world:
            waiting = {self.answers[rank]: rank for rank in range(self.world) if rank not in found}
            left = end - time.monotonic()
            ready, _, _ = select.select(list(waiting), [], [], max(left, 0))
            if not ready:
                self._fail(name, f"no answer of ranks {sorted(waiting.values())} within {limit:.0f} s")
            for fd in ready:
                rank = waiting[fd]
                chunk = os.read(fd, 1 << 20)
                if not chunk:
                    self._fail(name, f"rank {rank} died")
                self.buffers[rank] += chunk
                if self.buffers[rank].endswith(b"\n"):
                    answer = json.loads(self.buffers[rank])
                    self.buffers[rank] = b""
                    if "error" in answer:
                        self._fail(name, f"rank {rank}: {answer['error']}")
                    found[rank] = answer
        return [found[rank] for rank in range(self.world)]

    def _fail(self, name: str, what: str) -> None:
        self.kill()
        raise WorkerFailed(f"{self.variant}: {name}: {what}")

    def kill(self) -> None:
        """End every process that this pool started."""
        for process in self.processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self._reap()

    def quit(self) -> None:
        """Ask every process to end; kill those that do not."""
        try:
            self.tell("quit")
        except WorkerFailed:
            return
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def _reap(self) -> None:
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:
                    pass
        for fd in self.answers:
            os.close(fd)
        self.answers = []
        self.scratch.cleanup()
