# SPDX-License-Identifier: Apache-2.0
"""The backends' own commands, run by stand-ins for ssh, pdsh, srun and mpirun that keep to what those programs promise.

They show what the real programs show in test_many_hosts.py, on machines that have none of them (L8, L9).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import mpi_rank, multinode_runner
from deepspeed.launcher.slots import free_port
from tests.launcher import jobs
from tests.launcher.test_quoting import TORTURE

StartJob = Callable[..., jobs.Job]

# ssh joins its remaining arguments with spaces and gives them to a shell.
SSH = """
import subprocess, sys
rest = sys.argv[sys.argv.index("--") + 1:]
host, words = rest[0], rest[1:]
sys.exit(subprocess.run(["sh", "-c", " ".join(words)]).returncode)
"""

# pdsh replaces %h, %n and %% in the joined command, and runs it on every host at once.
PDSH = """
import re, subprocess, sys
at = sys.argv.index("-w")
hosts, command = sys.argv[at + 1].split(","), " ".join(sys.argv[at + 2:])
running = []
for n, host in enumerate(hosts):
    text = re.sub("%(.)", lambda m: {"h": host, "n": str(n), "%": "%", "u": "root"}[m[1]], command)
    running.append(subprocess.Popen(["sh", "-c", text], stdin=subprocess.PIPE))
sys.exit(max(popen.wait() for popen in running))
"""

# srun and mpirun start every rank without a shell.
RANKS = """
import os, subprocess, sys
words = sys.argv[1:]
start = words.index(sys.executable)
options, command = words[:start], words[start:]
if os.path.basename(sys.argv[0]) == "srun":
    total = int(next(word for word in options if word.startswith("--ntasks=")).partition("=")[2])
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    assert "--nodelist=node-a,node-b" in options and "--nodes=2" in options, options
else:
    total = int(options[options.index("-n") + 1])
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    assert options[options.index("--host") + 1] == "node-a:2,node-b:2", options
running = []
for rank in range(total):
    env = {**os.environ, **dict(zip(names, (str(rank), str(total), str(rank % 2), "2")))}
    running.append(subprocess.Popen(command, env=env))
sys.exit(max(popen.wait() for popen in running))
"""


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "stubs"
    folder.mkdir()
    for name, code in {"ssh": SSH, "pdsh": PDSH, "srun": RANKS, "mpirun": RANKS}.items():
        (folder / name).write_text(f"#!{sys.executable}\n{code}")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.mark.parametrize("backend", ["ssh", "pdsh", "slurm", "openmpi"])
def test_arguments_and_variables_arrive_byte_for_byte(
    job: StartJob, stubs: dict[str, str], tmp_path: Path, backend: str
) -> None:
    folder = tmp_path / "it's a $(touch pwned) dir; *%h"
    folder.mkdir()
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=2\n")
    (folder / ".deepspeed_env").write_text("FROM_FILE=x $HOME `touch pwned`\n")
    values = {f"NCCL_T{index}": text for index, text in enumerate(TORTURE)}
    options = [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--launcher",
        backend,
        "--no_ssh_check",
        "--master_addr",
        "node-a",
    ]
    port = str(free_port())
    run = job(*options, "--master_port", port, worker=tuple(TORTURE), folder=folder, env={**stubs, **values})
    code, text = run.wait(30)
    assert code == 0, text
    for rank in range(4):
        found = json.loads((run.out / f"facts{rank}").read_text())
        env, argv = found["env"], found["argv"]
        if backend in ("ssh", "pdsh"):
            assert argv.pop(0) == f"--local_rank={rank % 2}"
        assert argv == TORTURE
        assert {name: env[name] for name in values} == values
        assert env["FROM_FILE"] == f"x {tmp_path} `touch pwned`"
        assert found["cwd"] == str(folder)
        assert (env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_SIZE"]) == (str(rank % 2), "4", "2")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node-a", port)
    assert not list(tmp_path.rglob("pwned"))


def test_a_malformed_env_file_stops_the_start(job: StartJob, stubs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=2\n")
    (tmp_path / "bad_env").write_text("GOOD=1\nno equals sign\n")
    run = job("--hostfile", "hosts", "--no_ssh_check", env={**stubs, "DS_ENV_FILE": "bad_env"})
    code, text = run.wait()
    assert code == 2
    assert "bad_env, line 2: expected 'NAME=VALUE'" in text
    assert not list(run.out.iterdir())


def test_backends_that_start_ranks_refuse_other_slots(job: StartJob, stubs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=1\n")
    for flags, message in (
        (["--launcher", "slurm"], "needs the same number of slots on every host"),
        (["--launcher", "openmpi", "--num_gpus", "1"], "does not know --num_gpus"),
        (["--launcher", "openmpi", "--include", "node-a:0@node-b"], "does not know --include"),
        (["--launcher", "mpich", "--venv_script", "x"], "does not know --venv_script"),
    ):
        code, text = job("--hostfile", "hosts", "--master_addr", "node-a", "--no_ssh_check", *flags, env=stubs).wait()
        assert code == 2
        assert message in text


def test_a_missing_backend_names_the_others(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=1\n")
    code, text = job("--hostfile", "hosts", "--launcher", "pdsh", env={"PATH": str(tmp_path)}).wait()
    assert code == 2
    assert "there is no 'pdsh' on PATH" in text and "ssh" in text


def test_the_callers_list_of_prefixes_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepspeed.launcher import runner

    environ = {"MINE_A": "1", "OTHER": "2", "PYTHONPATH": "/lib"}
    assert "MINE_A" not in multinode_runner.collect_environment(environ, [], "/work")
    monkeypatch.setattr(runner, "EXPORT_ENVS", runner.EXPORT_ENVS)
    runner.EXPORT_ENVS.append("MINE")
    try:
        found = multinode_runner.collect_environment(environ, [tmp_path / "absent"], "/work")
    finally:
        runner.EXPORT_ENVS.remove("MINE")
    assert found == {"MINE_A": ("1",), "PYTHONPATH": ("/work:/lib",)}


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2(x2)"},
    ],
)
def test_rank_variables(environ: dict[str, str]) -> None:
    found = mpi_rank.rank_variables(environ)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert found.get("LOCAL_SIZE", "2") == "2"


def test_rank_variables_of_nobody() -> None:
    with pytest.raises(LauncherError, match="OMPI_COMM_WORLD_RANK"):
        mpi_rank.rank_variables({"RANK": "0"})
