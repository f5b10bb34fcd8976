# SPDX-License-Identifier: Apache-2.0
"""Real jobs of the launcher with workers that start in milliseconds (no torch), and questions about their processes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank = os.environ.get("RANK", "x")
out = Path(os.environ["DS_TEST_OUT"])
stubborn = "ignore" in sys.argv
inherited = {signal.Signals(s).name: signal.getsignal(s) is signal.SIG_IGN
             for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)}
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if "asis" in sys.argv:
        pass
    elif stubborn:
        signal.signal(s, signal.SIG_IGN)
    elif "save" in sys.argv:
        def save(signum, frame):
            time.sleep(0.9)
            (out / f"saved{rank}").touch()
            sys.exit(0)
        signal.signal(s, save)
    elif "note" in sys.argv:
        def note(signum, frame):
            (out / f"signal{rank}").write_text(f"{signum} {time.monotonic()}")
            sys.exit(0)
        signal.signal(s, note)
    else:
        signal.signal(s, signal.SIG_DFL)
if "grandchild" in sys.argv:
    code = "import time; time.sleep(60)"
    if stubborn:
        code = "import signal; signal.signal(15, signal.SIG_IGN); " + code
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    (out / f"pid{rank}.child.tmp").write_text(str(child.pid))
    (out / f"pid{rank}.child.tmp").rename(out / f"pid{rank}.child")
facts = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "cores": sorted(os.sched_getaffinity(0)),
         "ignored": inherited, "sigmask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "ppid": os.getppid()}
(out / f"facts{rank}.tmp").write_text(json.dumps(facts))
(out / f"facts{rank}.tmp").rename(out / f"facts{rank}")
(out / f"pid{rank}.tmp").write_text(str(os.getpid()))
(out / f"pid{rank}.tmp").rename(out / f"pid{rank}")
print(f"hello from rank {rank}", flush=True)
print(f"complaint of rank {rank}", file=sys.stderr, flush=True)
for word in sys.argv:
    kind, _, value = word.partition("=")
    who, _, what = value.partition(":")
    if kind == "exit" and who == rank:
        while not all((out / f"pid{r}").exists() for r in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.01)
        sys.exit(int(what))
    if kind == "die" and who == rank:
        while not all((out / f"pid{r}").exists() for r in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.01)
        os.kill(os.getpid(), int(what))
if "sleep" in sys.argv:
    time.sleep(60)
"""


@dataclass
class Job:
    """One run of the `deepspeed` command."""

    popen: subprocess.Popen[str]
    out: Path

    def wait(self, timeout: float = 20.0) -> tuple[int, str]:
        """Exit code and everything printed."""
        try:
            text, _ = self.popen.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.popen.returncode, text

    def pids(self, count: int, children: bool = False) -> list[int]:
        """Pids of `count` ranks (and their children), once all of them run."""
        names = [f"pid{rank}" for rank in range(count)]
        names += [f"pid{rank}.child" for rank in range(count)] if children else []
        wait_until(lambda: all((self.out / name).exists() for name in names), 15, "ranks did not start")
        return [int((self.out / name).read_text()) for name in names]

    def launch_pid(self) -> int:
        """Pid of the per-host launcher: what the runner started."""
        wait_until(lambda: len(children_of(self.popen.pid)) == 1, 10, "the runner has no single child")
        return children_of(self.popen.pid)[0]

    def kill(self) -> None:
        """End what is left of the job after a failed test."""
        for name in self.out.glob("pid*"):
            if name.suffix != ".tmp":
                kill_quietly(int(name.read_text()))
        for pid in [*children_of(self.popen.pid), self.popen.pid]:
            kill_quietly(pid)
        self.popen.wait(5)


def start(
    folder: Path,
    args: Sequence[str],
    worker_args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    grace: float = 5.0,
    script: Sequence[str] | None = None,
    cwd: Path | None = None,
    prefix: Sequence[str] = (),
    ignored: Sequence[int] = (),
) -> Job:
    """Start `deepspeed ARGS worker.py WORKER_ARGS` in `folder`, on the CPU, with signals `ignored` from the start."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    (folder / "worker.py").write_text(WORKER)
    full = {**clean_environment(), "DS_TEST_OUT": str(out), "DEEPSPEED_LAUNCHER_GRACE": str(grace), **(env or {})}
    command = [*prefix, sys.executable, "-m", "deepspeed.launcher.runner", *args]
    command += script if script is not None else [str(folder / "worker.py"), *worker_args]
    popen = subprocess.Popen(
        command,
        env={name: value for name, value in full.items() if value != "UNSET"},
        cwd=cwd or folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=functools.partial(as_a_terminal_would, ignored),
    )
    return Job(popen, out)


def as_a_terminal_would(ignored: Sequence[int] = ()) -> None:
    """In a child before it becomes another program: signals as at a terminal, however the suite was started.

    Those ``ignored`` are blocked too: what a shell's ``&``, ``nohup`` or a supervisor does.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*ignored} - {signal.SIGHUP})


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher or an earlier test may have left, and with the repository."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in drop and not name.startswith("DS_")}
    return {**env, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def children_of(pid: int) -> list[int]:
    """Live children of a process, without the launcher's guard."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in found if alive(int(child))]


def seconds_until_gone(pids: Sequence[int], limit: float) -> float:
    """Seconds until none of `pids` runs; fails after `limit`."""
    started = time.monotonic()
    wait_until(lambda: not any(map(alive, pids)), limit, f"some of {pids} still run")
    return time.monotonic() - started


def wait_until(condition: Callable[[], bool], limit: float, message: str) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{message} after {limit} s")
        time.sleep(0.01)


def kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
