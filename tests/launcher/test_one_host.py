# SPDX-License-Identifier: Apache-2.0
"""One host: what ranks are given, what the command line means, and what comes back."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import cores, launch, runner, slots
from tests.harness.skips import needs
from tests.launcher import jobs
from tests.launcher.test_quoting import TORTURE

StartJob = Callable[..., jobs.Job]


def facts(job: jobs.Job, rank: int) -> dict[str, dict[str, str]]:
    found = json.loads((job.out / f"facts{rank}").read_text())
    assert isinstance(found, dict)
    return found


def test_ranks_get_the_whole_environment_on_the_cpu(job: StartJob) -> None:
    run = job("--num_gpus", "3", worker=("--deepspeed", "cfg.json"))
    code, text = run.wait()
    assert code == 0, text
    for rank in range(3):
        env = facts(run, rank)["env"]
        want = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_TORCH_DEVICE": "cpu",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)),
        }
        assert {name: env.get(name) for name in want} == want
        assert facts(run, rank)["argv"] == [f"--local_rank={rank}", "--deepspeed", "cfg.json"]
        assert facts(run, rank)["sigmask"] == 0


def test_without_local_rank_as_module_and_directly(job: StartJob, tmp_path: Path) -> None:
    run = job("--num_gpus", "1", "--no_local_rank", "--module", script=["worker", "a"], env={"OMP_NUM_THREADS": "7"})
    assert run.wait()[0] == 0
    assert facts(run, 0)["argv"] == ["a"]
    assert facts(run, 0)["env"]["OMP_NUM_THREADS"] == "7"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} worker.py "$@"\n')
    program.chmod(0o755)
    run = job("--num_gpus", "1", "--no_python", script=["./program", "b"])
    assert run.wait()[0] == 0
    assert facts(run, 0)["argv"] == ["--local_rank=0", "b"]


def test_arguments_arrive_byte_for_byte(job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "it's a $(touch pwned) dir; *"
    folder.mkdir()
    run = job("--num_gpus", "1", worker=tuple(TORTURE), folder=folder)
    code, text = run.wait()
    assert code == 0, text
    assert facts(run, 0)["argv"][1:] == TORTURE  # type: ignore[index]
    assert facts(run, 0)["cwd"] == str(folder)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(("word", "code"), [("exit=1:7", 7), ("exit=0:1", 1), ("die=1:9", 137), ("die=0:11", 139)])
def test_a_failing_rank_ends_the_job_with_its_code(job: StartJob, word: str, code: int) -> None:
    run = job("--num_gpus", "3", worker=(word, "sleep"))
    pids = run.pids(3)
    assert run.wait()[0] == code
    assert jobs.seconds_until_gone(pids, 0.5) < 0.5


def test_ranks_that_end_well_wait_for_the_others(job: StartJob) -> None:
    run = job("--num_gpus", "2", worker=("exit=0:0",))
    assert run.wait()[0] == 0
    assert {path.name for path in run.out.glob("facts?")} == {"facts0", "facts1"}


def test_a_program_that_cannot_start_is_named(job: StartJob) -> None:
    code, text = job("--num_gpus", "1", "--no_python", script=["./absent"]).wait()
    assert code == 2
    assert "rank 0: cannot start './absent'" in text
    code, text = job("--num_gpus", "1", script=["absent.py"]).wait()
    assert code == 2
    assert "no script 'absent.py'" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--autotuning", "run"], "--autotuning is not built"),
        (["--launcher", "carrier-pigeon"], "use one of pdsh, ssh"),
        (["--module", "--no_python"], "--module and --no_python"),
        (["--num_gpus", "1", "--include", "localhost:0"], "--num_gpus and --include"),
        (["--num_nodes", "1", "--exclude", "localhost:0"], "--num_nodes and --include"),
        (["--num_nodes", "2"], "no hostfile"),
        (["--no_ssh"], "--no_ssh needs --node_rank"),
        (["--node_rank", "1"], "only for --no_ssh"),
        (["--master_port", "0"], "use a port from 1"),
        (["--bind_core_list", "0"], "needs --bind_cores_to_rank"),
        (["--min_elastic_nodes", "1"], "need --elastic_training"),
        (["--log_level", "loud"], "--log_level 'loud'"),
        (["--num_gpus", "0"], "no GPU is visible: give --num_gpus N"),
        (["--include", "elsewhere:0"], "unknown host 'elsewhere'"),
    ],
)
def test_contradictions_are_errors_before_anything_starts(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(LauncherError, match=message):
        runner.main([*args, "script.py"])


def test_without_gpu_and_number_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="--num_gpus N to run N ranks on the CPU"):
        runner.main(["script.py"])


def local_world(monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None, *args: str) -> runner.World:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(slots, "device_count", lambda: gpus)
    monkeypatch.setattr(runner, "device_count", lambda: gpus)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return runner._choose_world(runner.parse_args([*args, "script.py"]))[0]


@pytest.mark.parametrize(
    ("gpus", "visible", "args", "chosen"),
    [
        (4, None, [], [0, 1, 2, 3]),
        (4, None, ["--num_gpus", "2"], [0, 1]),
        (4, "0,2", [], [0, 2]),
        (4, "2,0", ["--num_gpus", "1"], [2]),
        (2, "4,5", [], [4, 5]),
        (4, "GPU-ab12,MIG-cd", [], ["GPU-ab12", "MIG-cd"]),
        (4, None, ["--include", "localhost:1,3"], [1, 3]),
        (4, "0,1", ["--include", "localhost:3"], [3]),
        (4, None, ["--exclude", "localhost:0"], [1, 2, 3]),
        (4, "-1", ["--num_gpus", "2"], [0, 1]),
        (0, None, ["--num_accelerators", "2"], [0, 1]),
        (0, None, ["--include", "localhost:0,1"], [0, 1]),
    ],
)
def test_slots_of_this_host(
    monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None, args: list[str], chosen: list[int]
) -> None:
    assert local_world(monkeypatch, gpus, visible, *args) == {"localhost": chosen}


def test_wrong_slots_list_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no slot 7: its slots are 0,1$"):
        local_world(monkeypatch, 2, None, "--include", "localhost:7")
    with pytest.raises(ValueError, match=r"--num_gpus 3: host 'localhost' has 2 slot\(s\) \(0,1\)"):
        local_world(monkeypatch, 2, None, "--num_gpus", "3")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES: 'x' is no device"):
        local_world(monkeypatch, 2, "x")


def test_environment_of_hosts_with_different_counts() -> None:
    node = launch.Node({"a": [0, 1], "b": [4, 5, 6]}, 1)
    envs = launch.rank_environments(node, "10.0.0.1", 1234, {"KEEP": "x"}, on_cpu=False)
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in envs] == [("2", "0"), ("3", "1"), ("4", "2")]
    for env in envs:
        assert env["CUDA_VISIBLE_DEVICES"] == "4,5,6"
        assert (env["WORLD_SIZE"], env["LOCAL_SIZE"], env["CROSS_RANK"], env["CROSS_SIZE"]) == ("5", "3", "1", "2")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["KEEP"]) == ("10.0.0.1", "1234", "x")


def test_no_ssh_starts_only_this_host(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    run = job("--hostfile", "hosts", "--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "77")
    assert run.wait()[0] == 0
    assert {path.name for path in run.out.glob("facts?")} == {"facts1", "facts2"}
    env = facts(run, 2)["env"]
    assert (env["LOCAL_RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) == (
        "1",
        "3",
        "10.0.0.1",
        "77",
    )


def test_a_hostfile_that_names_only_this_host_needs_no_backend(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=2\n")
    run = job("--hostfile", "hosts")
    code, text = run.wait()
    assert code == 0, text
    assert facts(run, 1)["env"]["WORLD_SIZE"] == "2"


def test_cores_are_shared_out(job: StartJob) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip(needs("two cores", "another machine"))
    run = job("--num_gpus", "2", "--bind_cores_to_rank")
    assert run.wait()[0] == 0
    share = len(allowed) // 2
    for rank in range(2):
        assert facts(run, rank)["cores"] == allowed[rank * share : (rank + 1) * share]
        assert facts(run, rank)["env"]["OMP_NUM_THREADS"] == str(share)
        assert "KMP_AFFINITY" in facts(run, rank)["env"]


def test_core_lists() -> None:
    assert cores.parse_core_list("0-2,8, 10-11") == [0, 1, 2, 8, 10, 11]
    for bad in ("", "3-1", "a", "1,1", "0-"):
        with pytest.raises(LauncherError, match="--bind_core_list"):
            cores.parse_core_list(bad)
    with pytest.raises(LauncherError, match="but only"):
        cores.cores_by_rank(10_000, None)
    with pytest.raises(LauncherError, match="not among"):
        cores.cores_by_rank(1, "99999")


def test_the_command_does_not_load_torch(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; import deepspeed.launcher.runner, deepspeed.launcher.launch, deepspeed.launcher.multinode_runner;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'numpy', 'pydantic') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=jobs.clean_environment(), cwd=tmp_path).returncode == 0
