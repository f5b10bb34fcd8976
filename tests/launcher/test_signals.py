# SPDX-License-Identifier: Apache-2.0
"""No orphan, whatever dies, and one grace period in total (L2 to L6, L13, report V8)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher import jobs

StartJob = Callable[..., jobs.Job]
GRACE = 1.0


@pytest.mark.parametrize("target", ["runner", "launch"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_job_reaches_every_rank(job: StartJob, target: str, signum: signal.Signals) -> None:
    run = job("--num_gpus", "2", worker=("note", "sleep"))
    pids = run.pids(2)
    sent = time.monotonic()
    os.kill(run.popen.pid if target == "runner" else run.launch_pid(), signum)
    assert run.wait()[0] == 128 + signum
    assert jobs.seconds_until_gone(pids, 1) < 1
    for rank in range(2):
        received, when = (run.out / f"signal{rank}").read_text().split()
        assert int(received) == signum
        assert float(when) - sent < 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_four_ranks_that_ignore_signals_cost_one_grace_period(job: StartJob, signum: signal.Signals) -> None:
    run = job("--num_gpus", "4", worker=("ignore", "sleep"), grace=GRACE)
    pids = run.pids(4)
    started = time.monotonic()
    os.kill(run.popen.pid, signum)
    assert run.wait()[0] == 128 + signum
    elapsed = time.monotonic() - started
    assert GRACE * 0.9 < elapsed < GRACE + 2
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


def test_peers_of_a_failed_rank_that_ignore_signals_cost_one_grace_period(job: StartJob) -> None:
    run = job("--num_gpus", "4", worker=("ignore", "exit=2:5", "sleep"), grace=GRACE)
    pids = run.pids(4)
    started = time.monotonic()
    assert run.wait()[0] == 5
    assert time.monotonic() - started < GRACE + 2
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


def test_ranks_have_time_to_save(job: StartJob) -> None:
    """Also when a signal arrives while the job is being ended because a rank failed."""
    run = job("--num_gpus", "2", worker=("save", "exit=1:7", "sleep"), grace=10)
    launch = run.launch_pid()
    run.pids(2)
    time.sleep(0.4)
    os.kill(launch, signal.SIGTERM)
    assert run.wait()[0] == 7
    assert (run.out / "saved0").exists()


def test_a_second_interrupt_ends_the_patience(job: StartJob) -> None:
    run = job("--num_gpus", "2", worker=("ignore", "sleep"), grace=30)
    pids = run.pids(2)
    run.popen.send_signal(signal.SIGINT)
    time.sleep(0.6)
    started = time.monotonic()
    run.popen.send_signal(signal.SIGINT)
    assert run.wait()[0] == 130
    assert time.monotonic() - started < 2
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


@pytest.mark.parametrize("worker", [("sleep",), ("ignore", "sleep"), ("grandchild", "ignore", "sleep")])
@pytest.mark.parametrize("target", ["runner", "launch", "both"])
def test_a_killed_launcher_leaves_nothing(job: StartJob, target: str, worker: tuple[str, ...]) -> None:
    run = job("--num_gpus", "2", worker=worker, grace=20)
    pids = run.pids(2, children="grandchild" in worker)
    launch = run.launch_pid()
    if target == "both":
        os.kill(run.popen.pid, signal.SIGSTOP)  # so that nothing happens between the two
        os.kill(launch, signal.SIGKILL)
    os.kill(launch if target == "launch" else run.popen.pid, signal.SIGKILL)
    assert jobs.seconds_until_gone([*pids, launch], 2) < 2
    assert run.wait()[0] == (137 if target == "launch" else -9)


def test_what_a_rank_leaves_behind_ends_with_the_job(job: StartJob) -> None:
    run = job("--num_gpus", "2", worker=("grandchild",), grace=GRACE)
    pids = run.pids(2, children=True)
    assert run.wait()[0] == 0
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


def test_stopped_ranks_end_too(job: StartJob) -> None:
    run = job("--num_gpus", "2", worker=("sleep",), grace=GRACE)
    pids = run.pids(2)
    os.kill(pids[0], signal.SIGSTOP)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 143
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["runner", "launch"])
def test_a_killed_launcher_leaves_nothing_of_an_elastic_job(job: StartJob, target: str) -> None:
    run = job("--elastic_training", "--num_gpus", "2", worker=("sleep",), grace=20)
    pids = run.pids(2)
    launch = run.launch_pid()
    agents = jobs.children_of(launch)
    os.kill(launch if target == "launch" else run.popen.pid, signal.SIGKILL)
    assert jobs.seconds_until_gone([*pids, *agents, launch], 3) < 3


SIGNAL_AT_SPAWN = """
import os, signal, sys
from deepspeed.launcher import launch, spawn
n, signum = int(sys.argv[1]), int(sys.argv[2])
calls = 0
real = spawn.spawn
def counted(*args, **kwargs):
    global calls
    if calls == n:
        os.kill(os.getpid(), signum)
    calls += 1
    child = real(*args, **kwargs)
    if calls == n:
        os.kill(os.getpid(), signum)
    return child
launch.spawn = counted
launch.main(sys.argv[3:])
"""


@pytest.mark.parametrize("point", [0, 1, 2])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_spawning_leaves_nothing(job: StartJob, tmp_path: Path, point: int, signum: int) -> None:
    """The signal is delivered right before, between and right after the two spawns."""
    from deepspeed.launcher.hosts import encode_world_info

    (tmp_path / "seam.py").write_text(SIGNAL_AT_SPAWN)
    (tmp_path / "worker.py").write_text(jobs.WORKER)
    (tmp_path / "out").mkdir()
    env = {**jobs.clean_environment(), "DS_TEST_OUT": str(tmp_path / "out"), "DEEPSPEED_LAUNCHER_GRACE": "2"}
    world = f"--world_info={encode_world_info({'localhost': [0, 1]})}"
    args = [world, f"--master_port={free()}", "worker.py", "grandchild", "sleep"]
    result = subprocess.run(
        [sys.executable, "seam.py", str(point), str(int(signum)), *args],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=15,
        preexec_fn=jobs.as_a_terminal_would,
    )
    assert result.returncode == 128 + signum, result.stderr
    pids = [int(path.read_text()) for path in (tmp_path / "out").glob("pid*") if path.suffix != ".tmp"]
    jobs.seconds_until_gone(pids, 1)


def free() -> int:
    from deepspeed.launcher.slots import free_port

    return free_port()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("target", ["runner", "launch"])
def test_a_job_that_was_started_to_ignore_signals_ends_by_them(
    job: StartJob, target: str, signum: signal.Signals
) -> None:
    """`nohup deepspeed … &`, a CI step, a container's first process: a hangup goes unheard, the others end the job."""
    everything = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    run = job("--num_gpus", "2", worker=("asis", "sleep"), grace=20, ignored=everything)
    pids = run.pids(2)
    for rank in range(2):
        facts = json.loads((run.out / f"facts{rank}").read_text())
        assert facts["ignored"] == {"SIGTERM": False, "SIGINT": False, "SIGHUP": True, "SIGCHLD": False}
        assert facts["sigmask"] == 0
    addressed = run.popen.pid if target == "runner" else run.launch_pid()
    os.kill(addressed, signal.SIGHUP)
    time.sleep(0.3)
    assert run.popen.poll() is None
    assert all(map(jobs.alive, pids))
    started = time.monotonic()
    os.kill(addressed, signum)
    assert run.wait()[0] == 128 + signum
    assert time.monotonic() - started < 5  # not the grace period
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


def test_an_interrupt_is_heard_while_hosts_are_asked(job: StartJob, tmp_path: Path) -> None:
    """Before there is anything to supervise, and with SIGINT ignored from the start."""
    (tmp_path / "hostfile").write_text("one slots=1\ntwo slots=1\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\ntouch asked\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = job("--hostfile", "hostfile", worker=("sleep",), env=env, ignored=(signal.SIGINT,))
    jobs.wait_until((tmp_path / "asked").exists, 15, "no host was asked")
    run.popen.send_signal(signal.SIGINT)
    assert run.wait(10)[0] == 130


def test_ending_one_job_leaves_the_other_alone(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = job("--num_gpus", "1", worker=("sleep",), folder=tmp_path / "one")
    second = job("--num_gpus", "1", worker=("sleep",), folder=tmp_path / "two")
    first_pids, second_pids = first.pids(1), second.pids(1)
    first.popen.send_signal(signal.SIGTERM)
    assert first.wait()[0] == 143
    assert jobs.seconds_until_gone(first_pids, 0.5) < 0.5
    assert jobs.alive(second_pids[0])
    assert second.popen.poll() is None
    os.kill(second.launch_pid(), signal.SIGKILL)
    assert second.wait()[0] == 137
