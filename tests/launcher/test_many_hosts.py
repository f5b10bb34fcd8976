# SPDX-License-Identifier: Apache-2.0
"""Real jobs on several hosts: each backend hands everything over, passes exit codes on, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.skips import MULTIHOST_TOOLS, needs
from tests.launcher import jobs
from tests.launcher import lab as labs
from tests.launcher.test_quoting import TORTURE

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(120)]

StartJob = Callable[..., jobs.Job]
GRACE = 2.0
WHY_NOT = labs.missing()
ROOT_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[labs.Lab]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with labs.hosts(tmp_path_factory.mktemp("lab"), 2) as made:
        yield made


def mpirun_of(backend: str) -> str | None:
    """The mpirun of Open MPI, or the Hydra of MPICH, which Intel MPI and MVAPICH use as well."""
    return shutil.which("mpirun.openmpi" if backend == "openmpi" else "mpirun.mpich")


@pytest.fixture
def start(job: StartJob, lab: labs.Lab, tmp_path: Path) -> StartJob:
    def run(
        backend: str,
        *args: str,
        slots: tuple[int, ...] = (1, 2),
        env: dict[str, str] | None = None,
        quick: bool = True,
        **kw: object,
    ) -> jobs.Job:
        shims: list[Path] = []
        if backend in ("pdsh", "ssh"):
            if shutil.which(backend) is None:
                pytest.skip(needs(backend, MULTIHOST_TOOLS))
        else:
            real = mpirun_of(backend)
            if real is None:
                pytest.skip(needs(f"an mpirun for {backend}", MULTIHOST_TOOLS))
            shims.append(tmp_path / "shims")
            shims[0].mkdir(exist_ok=True)
            (shims[0] / "mpirun").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
            (shims[0] / "mpirun").chmod(0o755)
        hostfile = lab.hostfile(tmp_path, slots)
        options = ["--hostfile", str(hostfile), "--launcher", backend, "--ssh_port", str(labs.PORT), *args]
        if quick:  # two logins less
            options[:0] = ["--no_ssh_check", "--master_addr", lab.hosts[0]]
        full = {"PATH": lab.path(*shims), "HOME": str(tmp_path), **ROOT_MPI, **(env or {})}
        return job(*options, env=full, prefix=lab.prefix(), grace=GRACE, **kw)

    return run


def facts(run: jobs.Job, rank: int) -> dict[str, dict[str, str]]:
    found = json.loads((run.out / f"facts{rank}").read_text())
    assert isinstance(found, dict)
    return found


BACKENDS = [
    "pdsh",
    "ssh",
    "openmpi",
    "mpich",
    pytest.param("impi", marks=pytest.mark.slow),
    pytest.param("mvapich", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_arrives_on_every_host(start: StartJob, lab: labs.Lab, tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "it's a $(touch pwned) dir; *%h"
    folder.mkdir()
    lines = ["FROM_FILE=a b:$SHELL_ONLY:$(touch pwned)", "NCCL_BOTH=file wins"]
    (folder / ".deepspeed_env").write_text("\n".join(lines) + "\n")
    values = {f"NCCL_T{index}": text for index, text in enumerate(TORTURE) if text}
    slots = (2, 2) if backend == "impi" else (1, 2)
    run = start(
        backend,
        worker=tuple(TORTURE),
        folder=folder,
        slots=slots,
        env={**values, "NCCL_BOTH": "x", "NOT_SENT": "y"},
        quick=backend != "pdsh",
    )
    code, text = run.wait(60)
    assert code == 0, text
    first_on_second = slots[0]
    for rank in range(sum(slots)):
        found = facts(run, rank)
        env = found["env"]
        argv = list(found["argv"])
        if backend in ("pdsh", "ssh"):
            assert argv.pop(0) == f"--local_rank={env['LOCAL_RANK']}"
            assert "NOT_SENT" not in env
        assert argv == TORTURE
        assert {name: env.get(name) for name in values} == values
        assert found["cwd"] == str(folder)
        assert env["FROM_FILE"] == "a b::$(touch pwned)"
        assert env["NCCL_BOTH"] == "file wins"
        on_second = rank >= first_on_second
        assert env["LOCAL_RANK"] == str(rank - first_on_second if on_second else rank)
        assert env["WORLD_SIZE"] == str(sum(slots))
        assert env["LOCAL_SIZE"] == str(slots[on_second])
        assert env["MASTER_ADDR"] == lab.hosts[0]
        assert env["PYTHONPATH"].split(":")[0] == str(folder)
        assert env["DS_ACCELERATOR"] == "cpu"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failing_rank_ends_every_host(start: StartJob, backend: str) -> None:
    slots = (2, 2) if backend == "impi" else (1, 2)
    run = start(backend, worker=("exit=1:7", "ignore", "sleep"), slots=slots)
    pids = run.pids(sum(slots))
    started = time.monotonic()
    code, text = run.wait(30)
    assert code == 7, text
    jobs.seconds_until_gone(pids, GRACE + 2)
    assert time.monotonic() - started < 2 * GRACE + 4


@pytest.mark.parametrize(
    ("backend", "signum"),
    [
        ("pdsh", signal.SIGTERM),
        ("pdsh", signal.SIGKILL),
        ("ssh", signal.SIGHUP),
        ("ssh", signal.SIGKILL),
        pytest.param("pdsh", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("ssh", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("openmpi", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("openmpi", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("openmpi", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("mpich", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("mpich", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_whatever_ends_the_runner_ends_every_rank(start: StartJob, backend: str, signum: signal.Signals) -> None:
    run = start(backend, worker=("ignore", "sleep"))
    pids = run.pids(3)
    run.popen.send_signal(signum)
    assert jobs.seconds_until_gone(pids, GRACE + 3) < GRACE + 3
    assert run.wait(10)[0] == (-9 if signum == signal.SIGKILL else 128 + signum)


def test_ssh_hands_the_signal_itself_on(start: StartJob) -> None:
    run = start("ssh", worker=("note", "sleep"))
    run.pids(3)
    run.popen.send_signal(signal.SIGINT)
    assert run.wait(20)[0] == 130
    assert [(run.out / f"signal{rank}").read_text().split()[0] for rank in range(3)] == ["2", "2", "2"]


@pytest.mark.parametrize("backend", ["pdsh", "ssh"])
def test_ranks_on_every_host_have_time_to_save(start: StartJob, backend: str) -> None:
    run = start(backend, worker=("save", "sleep"))
    pids = run.pids(3)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait(10)[0] == 143
    jobs.seconds_until_gone(pids, GRACE + 2)
    assert {path.name for path in run.out.glob("saved?")} == {"saved0", "saved1", "saved2"}


@pytest.mark.parametrize("backend", ["pdsh", "ssh"])
def test_a_killed_launcher_of_one_host_ends_the_other(start: StartJob, backend: str) -> None:
    run = start(backend, worker=("grandchild", "ignore", "sleep"))
    pids = run.pids(3, children=True)
    os.kill(int(facts(run, 2)["ppid"]), signal.SIGKILL)  # type: ignore[call-overload]
    jobs.seconds_until_gone(pids, GRACE + 3)
    assert run.wait(10)[0] != 0


def test_an_unreachable_host_is_named_with_the_reason(start: StartJob, lab: labs.Lab, tmp_path: Path) -> None:
    hostfile = write(tmp_path / "other", f"{lab.hosts[0]} slots=1\n10.231.7.99 slots=1\n")
    run = start("ssh", "--hostfile", str(hostfile), quick=False)
    code, text = run.wait(40)
    assert code == 2
    assert "host 10.231.7.99: ssh -o BatchMode=yes" in text
    assert "No route to host" in text or "timed out" in text
    assert f"host {lab.hosts[0]}" not in text
    assert not list(run.out.iterdir())


def test_slots_and_hosts_can_be_chosen(start: StartJob, lab: labs.Lab) -> None:
    run = start("ssh", "--exclude", f"{lab.hosts[1]}:0", slots=(2, 2))
    assert run.wait(30)[0] == 0
    assert {path.name for path in run.out.glob("facts?")} == {"facts0", "facts1", "facts2"}
    assert facts(run, 2)["env"]["CROSS_RANK"] == "1"


def test_one_remote_host_is_reached_without_force(start: StartJob, lab: labs.Lab) -> None:
    run = start("ssh", "--include", lab.hosts[1], quick=False)
    code, text = run.wait(30)
    assert code == 0
    assert facts(run, 1)["env"]["MASTER_ADDR"] == lab.hosts[1]


def test_venv_script_and_rank_logs(start: StartJob, tmp_path: Path) -> None:
    script = write(tmp_path / "my venv" / "activate", "export FROM_VENV=yes\n")
    run = start("pdsh", "--venv_script", str(script), "--enable_each_rank_log", "logs", "--save_pid")
    code, text = run.wait(30)
    assert code == 0, text
    assert [facts(run, rank)["env"].get("FROM_VENV") for rank in range(3)] == ["yes"] * 3
    assert len(list((tmp_path / "logs").glob("*_rank?.log"))) == 3


def test_backends_refuse_what_they_cannot_do(start: StartJob, lab: labs.Lab) -> None:
    for flag, value in (("--include", lab.hosts[1]), ("--num_gpus", "1")):
        code, text = start("openmpi", flag, value).wait(20)
        assert code == 2
        assert f"does not know {flag}" in text


def test_secrets_are_not_logged(start: StartJob) -> None:
    run = start("ssh", "--log_level", "debug", worker=("exit=0:3",), env={"NCCL_TOKEN": "s3cret"})
    code, text = run.wait(30)
    assert code == 3
    assert "NCCL_TOKEN" in text
    assert "s3cret" not in text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pdsh", "openmpi"])
def test_hpz_across_two_hosts(start: StartJob, backend: str) -> None:
    """Two hosts with an hpZ group each: the losses are plain torch's, and the backward pass stays inside the hosts."""
    from tests.launcher import hpz_worker

    env = {"GLOO_SOCKET_IFNAME": "lab0", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "1"}
    run = start(backend, script=[hpz_worker.__file__], slots=(2, 2), env=env)
    code, text = run.wait(110)
    assert code == 0, text
    wanted = hpz_worker.reference(4)
    for rank in range(4):
        steps = json.loads((run.out / f"steps{rank}").read_text())
        assert [step["loss"] for step in steps] == pytest.approx(wanted, rel=1e-6)
        for step in steps:
            assert step["forward"]["gathers_across"] > 0
            assert step["backward"]["gathers_across"] == 0
            assert step["backward"]["gathers_inside"] > 0


@pytest.mark.slow
def test_elastic_restart_across_two_hosts(start: StartJob, tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, time\n"
        "out, rank = pathlib.Path(os.environ['DS_TEST_OUT']), os.environ['RANK']\n"
        "again = (out / 'failed').exists()\n"
        "(out / f'ran{int(again)}.{rank}').write_text(os.environ['WORLD_SIZE'])\n"
        "if not again and rank == '0': time.sleep(60)\n"  # as a rank that waits for its peer would
        "while not (out / 'ran0.0').exists(): time.sleep(0.01)\n"  # rank 0 knows which round it is in
        "if not again: (out / 'failed').touch(), sys.exit(5)\n"
    )
    script = write(tmp_path / "elastic" / "train.py", program)
    options = ("--elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "2", "--max_restarts", "1")
    run = start("ssh", *options, script=[str(script)], slots=(1, 1))
    code, text = run.wait(110)
    assert code == 0, text
    names = {path.name for path in run.out.glob("ran?.?")}
    assert names == {"ran0.0", "ran0.1", "ran1.0", "ran1.1"}
    assert (run.out / "ran1.0").read_text() == "2"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path
