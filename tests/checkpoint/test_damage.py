# SPDX-License-Identifier: Apache-2.0
"""Tags, `latest` and shards that are wrong: C4, C5, C6, C7 and V7, and calls that not every rank makes (report 36)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed.checkpoint.store import safe_component
from deepspeed.errors import CheckpointError
from tests.checkpoint import fake
from tests.checkpoint.forked import run_forked

HOSTILE = [
    "../x",
    "/abs",
    "a/b",
    "",
    " ",
    "latest",
    "latest_universal",
    "a\0b",
    "..",
    ".",
    ".hidden",
    "a\nb",
    "a\\b",
    "x" * 300,
]
MODEL1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
OPTIM0, OPTIM1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))


def save(folder: str, tag: str, version: int) -> None:
    fake.engine(version).save_checkpoint(folder, tag=tag)


def prepared(folder: Path) -> Path:
    for tag, version in (("old", 1), ("new", 2)):
        assert all(outcome.error is None for outcome in run_forked(save, 2, str(folder), tag, version))
    return folder


# -- tags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", HOSTILE)
def test_hostile_tags(tmp_path: Path, tag: str) -> None:
    """C5: refused before anything is written, on save and on load."""
    engine = fake.FakeEngine(1, 0, 1)
    with pytest.raises(ValueError):
        safe_component(tag)
    with pytest.raises(ValueError):
        engine.save_checkpoint(tmp_path / "dir", tag=tag)
    with pytest.raises(ValueError):
        engine.load_checkpoint(tmp_path, tag=tag)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["global_step10", "pytorch_model_1", "checkpoint", "épreuve 3", "7", "a.b-c"])
def test_ordinary_tags(tmp_path: Path, tag: str) -> None:
    engine = fake.FakeEngine(1, 0, 1)
    engine.save_checkpoint(tmp_path, tag=tag)
    assert engine.load_checkpoint(tmp_path)[0] is not None
    assert (tmp_path / tag).is_dir()


def test_tags_that_are_numbers(tmp_path: Path) -> None:
    engine = fake.FakeEngine(1, 0, 1)
    engine.save_checkpoint(tmp_path, tag=12)
    assert engine.load_checkpoint(tmp_path, tag=12)[0] is not None


@pytest.mark.parametrize("policy", ["Warn", "Fail", "Ignore"])
def test_different_tags(tmp_path: Path, policy: str) -> None:
    """C4: an error on all ranks and nothing written; 'Ignore' uses the tag of rank 0."""
    outcomes = run_forked(_own_tag, 2, str(tmp_path / "dir"), policy)
    if policy == "Ignore":
        assert [outcome.error for outcome in outcomes] == [None, None]
        assert (tmp_path / "dir" / "latest").read_text() == "x0"
        fake.FakeEngine(1, 0, 9).load_checkpoint(tmp_path / "dir")
    else:
        assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
        assert all("rank 0: 'x0', rank 1: 'x1'" in outcome.text for outcome in outcomes)
        assert not (tmp_path / "dir").exists()


def _own_tag(folder: str, policy: str) -> None:
    engine = fake.engine(1, checkpoint={"tag_validation": policy})
    engine.save_checkpoint(folder, tag=f"x{engine.global_rank}")


def test_one_hostile_tag_among_good_ones(tmp_path: Path) -> None:
    outcomes = run_forked(_hostile_on_rank_1, 2, str(tmp_path / "dir"))
    assert [outcome.error for outcome in outcomes] == ["ValueError"] * 2
    assert not (tmp_path / "dir").exists()


def _hostile_on_rank_1(folder: str) -> None:
    engine = fake.engine(1)
    engine.save_checkpoint(folder, tag="../x" if engine.global_rank else "x")


def test_save_by_rank_0_only(tmp_path: Path) -> None:
    """Report 36: the others go on to a collective of training; rank 0 gets an error that says what is wrong."""
    started = time.monotonic()
    outcomes = run_forked(_rank_0_only, 2, str(tmp_path))
    assert time.monotonic() - started < 15
    assert outcomes[0].error == "CheckpointError" and "All ranks must make this call" in outcomes[0].text
    assert not any(tmp_path.iterdir())


def _rank_0_only(folder: str) -> None:
    engine = fake.engine(1, checkpoint={"wait_timeout": 2})
    if engine.global_rank == 0:
        engine.save_checkpoint(folder)
    else:
        time.sleep(4)


def test_second_save_by_rank_0_only(tmp_path: Path) -> None:
    """As above once the ranks have a group for control messages; the rest of the job can still use its own."""
    outcomes = run_forked(_rank_0_twice, 2, str(tmp_path))
    assert outcomes[0].error == "CheckpointError" and "within 2 s" in outcomes[0].text
    assert outcomes[1].error is None
    assert (tmp_path / "latest").read_text() == "a"


def _rank_0_twice(folder: str) -> None:
    engine = fake.engine(1, checkpoint={"wait_timeout": 2})
    engine.save_checkpoint(folder, tag="a")
    if engine.global_rank == 0:
        engine.save_checkpoint(folder, tag="b")
    time.sleep(3)


# -- latest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "''"),
        (b"\xff\xfe\x00garbage", "garbage"),
        (b"gone", "'gone'"),
        (b"../elsewhere", "'../elsewhere'"),
        (b"/etc", "'/etc'"),
        (b"x" * 5000, "xxxx"),
    ],
)
def test_bad_latest(tmp_path: Path, content: bytes, shown: str) -> None:
    """C6: the error says what `latest` contains and which tags are complete; nothing changes."""
    engine = fake.FakeEngine(1, 0, 1)
    engine.save_checkpoint(tmp_path, tag="whole")
    (tmp_path / "latest").write_bytes(content)
    before = engine.optimizer.digest()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path)
    assert shown in str(caught.value) and "complete tags: whole" in str(caught.value)
    assert engine.optimizer.digest() == before


@pytest.mark.parametrize("content", [b"whole\n", b"whole\r\n"])
def test_newline_after_the_tag(tmp_path: Path, content: bytes) -> None:
    engine = fake.FakeEngine(1, 0, 1)
    engine.save_checkpoint(tmp_path, tag="whole")
    (tmp_path / "latest").write_bytes(content)
    assert engine.load_checkpoint(tmp_path)[0] is not None


def test_latest_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    engine = fake.FakeEngine(1, 0, 1)
    engine.save_checkpoint(tmp_path / "dir", tag="whole")
    (tmp_path / "outside").write_text("whole")
    (tmp_path / "dir" / "latest").unlink()
    (tmp_path / "dir" / "latest").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="symbolic link out"):
        engine.load_checkpoint(tmp_path / "dir")


def test_unknown_tag(tmp_path: Path) -> None:
    engine = fake.FakeEngine(1, 0, 1)
    engine.save_checkpoint(tmp_path, tag="whole")
    with pytest.raises(CheckpointError, match="no tag 'other'; complete tags: whole"):
        engine.load_checkpoint(tmp_path, tag="other")


# -- shards ---------------------------------------------------------------------------------------------------------


def _cut(folder: Path, other: Path) -> str:
    path = folder / OPTIM1
    os.truncate(path, path.stat().st_size // 2)
    return OPTIM1


def _empty(folder: Path, other: Path) -> str:
    os.truncate(folder / MODEL1, 0)
    return MODEL1


def _lost(folder: Path, other: Path) -> str:
    (folder / OPTIM1).unlink()
    return OPTIM1


def _flipped(folder: Path, other: Path) -> str:
    data = bytearray((folder / OPTIM1).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / OPTIM1).write_bytes(data)
    return OPTIM1


def _swapped(folder: Path, other: Path) -> str:
    (folder / OPTIM0).rename(folder / "t")
    (folder / OPTIM1).rename(folder / OPTIM0)
    (folder / "t").rename(folder / OPTIM1)
    return OPTIM0


def _foreign(folder: Path, other: Path) -> str:
    shutil.copyfile(other / OPTIM1, folder / OPTIM1)
    return OPTIM1


def _extra(folder: Path, other: Path) -> str:
    shutil.copyfile(folder / OPTIM1, folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    return "zero_pp_rank_2_mp_rank_00_optim_states.pt"


def _other_manifest(folder: Path, other: Path) -> str:
    shutil.copyfile(other / "ds_manifest.json", folder / "ds_manifest.json")
    return "_states.pt"


def _bad_manifest(folder: Path, other: Path) -> str:
    (folder / "ds_manifest.json").write_text('{"format": "deepspeed-zero3/1", "files": 3}')
    return "ds_manifest.json"


DAMAGES: list[Callable[[Path, Path], str]] = [
    _cut,
    _empty,
    _lost,
    _flipped,
    _swapped,
    _foreign,
    _extra,
    _other_manifest,
    _bad_manifest,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda entry: entry.__name__.strip("_"))
@pytest.mark.parametrize("world", [2, 3])
def test_damaged_shards(tmp_path: Path, damage: Callable[[Path, Path], str], world: int) -> None:
    """C7, V7: CheckpointCorrupt naming the file on all ranks, before anything changed; the other tag still loads."""
    prepared(tmp_path)
    name = damage(tmp_path / "new", tmp_path / "old")
    outcomes = run_forked(_refused, world, str(tmp_path))
    for outcome in outcomes:
        assert outcome.error is None, outcome.text
        assert outcome.value == outcomes[0].value
        kind, text = outcome.value
        assert kind == "CheckpointCorrupt" and name in text and "new" in text


def _refused(folder: str) -> list[str]:
    engine = fake.engine(9)
    before = engine.optimizer.digest(), engine.global_steps, engine.lr_scheduler.last
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        caught = [type(error).__name__, str(error)]
    assert (engine.optimizer.digest(), engine.global_steps, engine.lr_scheduler.last) == before
    assert engine.optimizer.imports == 0
    engine.load_checkpoint(folder, tag="old")
    engine.check(1)
    return caught


def test_hashes_can_be_left_out(tmp_path: Path) -> None:
    """`verify_on_load: false` skips reading for hashes; sizes are still compared."""
    folder = prepared(tmp_path)
    _flipped(folder / "new", folder / "old")
    assert all(outcome.error is None for outcome in run_forked(_unverified, 2, str(folder)))
    _cut(folder / "new", folder / "old")
    assert {outcome.error for outcome in run_forked(_unverified, 2, str(folder))} == {"CheckpointCorrupt"}


def _unverified(folder: str) -> None:
    fake.engine(9, checkpoint={"verify_on_load": False}).load_checkpoint(folder)


@pytest.mark.parametrize("damage", [_cut, _empty, _lost, _extra], ids=["cut", "empty", "lost", "extra"])
def test_folders_without_a_manifest(tmp_path: Path, damage: Callable[[Path, Path], str]) -> None:
    """Other tools write none: the file set is checked, and every file's own structure."""
    folder = prepared(tmp_path)
    for tag in ("old", "new"):
        (folder / tag / "ds_manifest.json").unlink()
    assert all(outcome.error is None for outcome in run_forked(_unverified, 2, str(folder)))
    damage(folder / "new", folder / "old")
    outcomes = run_forked(_refused, 2, str(folder))
    assert all(outcome.value[0] == "CheckpointCorrupt" for outcome in outcomes), outcomes


def test_a_failing_import_is_reported_by_all(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    outcomes = run_forked(_breaks_on_rank_1, 2, str(folder))
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("rank 1: RuntimeError: device lost" in outcome.text for outcome in outcomes)


def _breaks_on_rank_1(folder: str) -> None:
    engine = fake.engine(9)

    def broken(state: Any, load_optimizer_states: bool) -> None:
        raise RuntimeError("device lost")

    if dist.get_rank() == 1:
        engine.optimizer.import_state = broken  # type: ignore[method-assign]
    engine.load_checkpoint(folder)
