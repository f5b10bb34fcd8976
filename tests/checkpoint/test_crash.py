# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, disks that fill, jobs that collide: C1, C2, C3, C9, C12, C14 and the old tag stays whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint.folder import complete_tags
from deepspeed.checkpoint.store import Storage
from deepspeed.errors import CheckpointCorrupt
from tests.checkpoint import fake, faulty
from tests.checkpoint.forked import Outcome, run_forked

WORLD = 2
FILES_PER_RANK = 2


class NoExchange(faulty.CountingStorage):
    """A file system without an exchange of folders."""

    def exchange(self, one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(other))


def save(folder: str, tag: str, version: int, storages: dict[int, Any] | None = None) -> list[list[str]]:
    engine = fake.engine(version, checkpoint={"wait_timeout": 8})
    storage = (storages or {}).get(engine.global_rank) or faulty.CountingStorage()
    engine.checkpoint_storage = storage
    engine.save_checkpoint(folder, tag=tag)
    return [list(entry) for entry in storage.log] if isinstance(storage, faulty.CountingStorage) else []


def loads(folder: Path, tag: str | None, version: int) -> None:
    """The tag loads in this process (world 1), hashes verified, every element exact."""
    engine = fake.FakeEngine(1, 0, 9)
    assert engine.load_checkpoint(folder, tag=tag)[0] is not None
    engine.check(version)


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tags, "keep" at version 4 and "old" (which `latest` names) at version 1, saved once."""
    folder = tmp_path_factory.mktemp("template") / "dir"
    for tag, version in (("keep", 4), ("old", 1)):
        assert all(outcome.error is None for outcome in run_forked(save, WORLD, str(folder), tag, version))
    _template.append(folder)
    return folder


_template: list[Path] = []


def prepared(folder: Path) -> None:
    shutil.copytree(_template[-1], folder, dirs_exist_ok=True)


def no_half(folder: Path) -> None:
    """Nothing of an unfinished save is visible: only hidden names besides whole tags."""
    visible = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert visible == set(complete_tags(folder))


@pytest.fixture
def counted(tmp_path: Path) -> dict[str, list[list[list[str]]]]:
    """Storage calls per rank of a save to a new tag, an exchange, and an overwrite file by file."""
    prepared(tmp_path / "count")
    new = run_forked(save, WORLD, str(tmp_path / "count"), "new", 2)
    again = run_forked(save, WORLD, str(tmp_path / "count"), "new", 3)
    files = run_forked(save, WORLD, str(tmp_path / "count"), "new", 3, {0: NoExchange()})
    return {"new": [o.value for o in new], "exchange": [o.value for o in again], "files": [o.value for o in files]}


def survivors_raise(outcomes: list[Outcome], dead: int) -> None:
    assert outcomes[dead].killed_by == signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != dead:
            assert outcome.killed_by is None
            assert outcome.error in (None, "CheckpointError"), outcome.text


def test_kill_before_every_storage_call(tmp_path: Path, counted: dict[str, list[list[list[str]]]]) -> None:
    """C2, bar: whatever call of a save to a new tag a rank dies at, `latest` names a tag that verifies and loads."""
    for dead in range(WORLD):
        for call in range(1, len(counted["new"][dead]) + 1):
            folder = tmp_path / f"{dead}-{call}"
            prepared(folder)
            started = time.monotonic()
            outcomes = run_forked(save, WORLD, str(folder), "new", 2, {dead: faulty.killing(call)})
            assert time.monotonic() - started < 15
            survivors_raise(outcomes, dead)
            named = (folder / "latest").read_text()
            loads(folder, None, {"old": 1, "new": 2}[named])
            loads(folder, "keep", 4)
            no_half(folder)


@pytest.mark.parametrize("how", ["exchange", "files"])
def test_kill_during_overwrite(tmp_path: Path, counted: dict[str, list[list[list[str]]]], how: str) -> None:
    """C9: old or new, whole; without folder exchange a torn overwrite is refused, never loaded as a mixture."""
    torn = 0
    for call in range(1, len(counted[how][0]) + 1):
        folder = tmp_path / str(call)
        prepared(folder)
        storage: Any = faulty.killing(call)
        if how == "files":
            storage = NoExchange(storage.before)
        survivors_raise(run_forked(save, WORLD, str(folder), "old", 2, {0: storage}), 0)
        loads(folder, "keep", 4)
        try:
            loads(folder, None, 1)
        except CheckpointCorrupt as error:
            assert how == "files" and "being overwritten" in str(error)
            torn += 1
        except AssertionError:
            loads(folder, None, 2)
    assert torn > 0 if how == "files" else torn == 0


@pytest.mark.parametrize("dead", range(WORLD))
@pytest.mark.parametrize("file", range(1, FILES_PER_RANK + 1))
@pytest.mark.parametrize("when", ["half", "after"])
def test_kill_at_a_shard(tmp_path: Path, dead: int, file: int, when: str) -> None:
    """C1: half a shard on disk, or a shard that nobody heard of; survivors raise in time, the old tag is what loads."""
    prepared(tmp_path)
    started = time.monotonic()
    storage = faulty.HalfWriting(file, kill=True) if when == "half" else faulty.DiesAfter(file)
    outcomes = run_forked(save, WORLD, str(tmp_path), "new", 2, {dead: storage})
    assert time.monotonic() - started < 15
    survivors_raise(outcomes, dead)
    assert [outcome.error for rank, outcome in enumerate(outcomes) if rank != dead] == ["CheckpointError"]
    assert (tmp_path / "latest").read_text() == "old"
    loads(tmp_path, None, 1)
    no_half(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("rank", range(WORLD))
def test_failing_disk_on_one_rank(tmp_path: Path, rank: int, code: int) -> None:
    """C3: the same error on all ranks, naming rank and file; staging gone; the next save works."""
    prepared(tmp_path)
    outcomes = run_forked(save, WORLD, str(tmp_path), "new", 2, {rank: faulty.failing(3, code)})
    texts = {outcome.text.splitlines()[0] for outcome in outcomes}
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * WORLD and len(texts) == 1
    text = texts.pop()
    assert f"rank {rank}:" in text and "optim_states.pt" in text and os.strerror(code) in text
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"keep", "old"}
    assert (tmp_path / "latest").read_text() == "old"
    assert all(outcome.error is None for outcome in run_forked(save, WORLD, str(tmp_path), "new", 2))
    loads(tmp_path, None, 2)


def test_every_failing_call_of_rank_0(tmp_path: Path, counted: dict[str, list[list[list[str]]]]) -> None:
    """P2: whichever call fails on rank 0, both ranks raise the same and what `latest` names loads."""
    for call in range(1, len(counted["new"][0]) + 1):
        folder = tmp_path / str(call)
        prepared(folder)
        outcomes = run_forked(save, WORLD, str(folder), "new", 2, {0: faulty.failing(call)})
        assert {outcome.error for outcome in outcomes} in ({"CheckpointError"}, {None}), outcomes
        loads(folder, None, {"old": 1, "new": 2}[(folder / "latest").read_text()])
        no_half(folder)


def test_half_written_by_a_full_disk(tmp_path: Path) -> None:
    prepared(tmp_path)
    outcomes = run_forked(save, WORLD, str(tmp_path), "new", 2, {1: faulty.HalfWriting(2, kill=False)})
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * WORLD
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_sigterm_during_save(tmp_path: Path) -> None:
    """C12: SIGTERM to every rank at any call: old or new, whole, and no rank stays."""
    for call in (1, 2, 3):
        folder = tmp_path / str(call)
        prepared(folder)
        started = time.monotonic()
        storages = {rank: faulty.killing(call, signal.SIGTERM) for rank in range(WORLD)}
        outcomes = run_forked(save, WORLD, str(folder), "new", 2, storages)
        assert all(outcome.killed_by == signal.SIGTERM for outcome in outcomes)
        assert time.monotonic() - started < 10
        loads(folder, None, {"old": 1, "new": 2}[(folder / "latest").read_text()])


def test_leftovers_are_swept_by_the_next_save(tmp_path: Path) -> None:
    prepared(tmp_path)
    run_forked(save, WORLD, str(tmp_path), "new", 2, {0: faulty.killing(3)})
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    foreign = tmp_path / ".x.00000000-1-0123456789abcdef.tmp"
    foreign.mkdir()
    run_forked(save, WORLD, str(tmp_path), "new", 2)
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == [foreign]


class Slow(Storage):
    """Takes its time before publishing, so that two jobs meet there."""

    def rename(self, source: Path, target: Path) -> None:
        time.sleep(0.3)
        super().rename(source, target)


@pytest.mark.parametrize("exchange", [True, False])
def test_two_jobs_one_directory(tmp_path: Path, exchange: bool) -> None:
    """C14: two jobs of two ranks save the same tag at the same time; one of them is there, whole."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        outcomes = run_forked(_two_jobs, 4, str(folder), exchange, ranks_env=None)
        assert all(outcome.error is None for outcome in outcomes), outcomes
        engine = fake.FakeEngine(1, 0, 9)
        engine.load_checkpoint(folder)
        assert engine.global_steps in (1, 2)
        engine.check(engine.global_steps)


def _two_jobs(folder: str, exchange: bool) -> None:
    import datetime

    import torch.distributed as dist

    rank = dist.get_rank()
    job, local = divmod(rank, 2)
    store = f"{folder}-store{job}"
    dist.barrier()
    dist.destroy_process_group()
    limit = datetime.timedelta(seconds=8)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=local, world_size=2, timeout=limit)
    engine = fake.engine(job + 1)
    engine.checkpoint_storage = Slow() if exchange else _SlowFiles()
    engine.save_checkpoint(folder, tag="same")


class _SlowFiles(Slow):
    def exchange(self, one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(other))

    def replace(self, source: Path, target: Path) -> None:
        time.sleep(0.02)
        super().replace(source, target)
