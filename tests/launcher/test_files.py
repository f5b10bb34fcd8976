# SPDX-License-Identifier: Apache-2.0
"""Logs and pid files are created safely, and values of variables are never logged (L12, L14)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import private_files
from tests.launcher import jobs

StartJob = Callable[..., jobs.Job]


def test_one_log_a_rank(job: StartJob, tmp_path: Path) -> None:
    run = job("--num_gpus", "2", "--enable_each_rank_log", "my logs")
    code, text = run.wait()
    assert code == 0, text
    assert "hello" not in text
    for rank in range(2):
        (log,) = (tmp_path / "my logs").glob(f"*_rank{rank}.log")
        assert log.read_text() == f"hello from rank {rank}\ncomplaint of rank {rank}\n"
        assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_folder_that_cannot_be_made_is_a_clear_error(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = job("--num_gpus", "1", "--enable_each_rank_log", "file/logs")
    code, text = run.wait()
    assert code == 2
    assert "--enable_each_rank_log" in text and "file/logs" in text
    assert not list(run.out.iterdir())


def test_new_files_follow_no_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(LauncherError, match="cannot create"):
        private_files.new_file(link)
    assert not target.exists()
    target.write_text("precious")
    with pytest.raises(LauncherError, match="cannot create"):
        private_files.new_file(target)
    assert target.read_text() == "precious"


def test_the_private_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"deepspeed-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LauncherError, match="not a private folder"):
        private_files.private_dir()
    folder.unlink()
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(LauncherError, match="not a private folder"):
        private_files.private_dir()
    folder.rmdir()
    assert private_files.private_dir() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_pids_are_recorded_while_the_job_runs(job: StartJob, tmp_path: Path) -> None:
    run = job("--num_gpus", "2", "--save_pid", worker=("sleep",), env={"TMPDIR": str(tmp_path)})
    pids = run.pids(2)
    path = tmp_path / f"deepspeed-{os.getuid()}" / f"{run.popen.pid}.deepspeed"
    jobs.wait_until(path.exists, 5, "no pid file")
    jobs.wait_until(lambda: len(path.read_text().split()) == 2, 5, "pid file incomplete")
    assert [int(line) for line in path.read_text().split()] == pids
    run.popen.terminate()
    assert run.wait()[0] == 143
    assert not path.exists()


def test_values_of_variables_are_not_logged(job: StartJob) -> None:
    run = job(
        "--num_gpus",
        "1",
        "--log_level",
        "debug",
        worker=("exit=0:3",),
        env={"NCCL_TOKEN": "s3cret", "MY_KEY": "s3cret"},
    )
    code, text = run.wait()
    assert code == 3
    assert "s3cret" not in text
