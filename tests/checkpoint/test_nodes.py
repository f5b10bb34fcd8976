# SPDX-License-Identifier: Apache-2.0
"""Two nodes of two ranks, emulated by LOCAL_RANK and a folder each: node-local storage, shared storage (report 27)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint import ds_to_universal
from tests.checkpoint import fake, faulty
from tests.checkpoint.forked import Outcome, ranks, run_forked

LOCAL = {"use_node_local_storage": True}


def _engine(version: int, options: dict[str, Any]) -> fake.FakeEngine:
    engine = fake.engine(version, checkpoint=options)
    engine.local_rank = engine.global_rank % 2
    return engine


def _folder(base: str, engine: fake.FakeEngine, shared: bool) -> Path:
    return Path(base) if shared else Path(base) / f"node{engine.global_rank // 2}"


def save(base: str, tag: str, version: int, shared: bool, options: dict[str, Any], fail: int | None = None) -> None:
    engine = _engine(version, options)
    if fail == engine.global_rank:
        engine.checkpoint_storage = faulty.failing(2)
    engine.save_checkpoint(_folder(base, engine, shared), tag=tag)


def load(base: str, tag: str | None, version: int, shared: bool, options: dict[str, Any]) -> None:
    engine = _engine(9, options)
    path, _ = engine.load_checkpoint(_folder(base, engine, shared), tag=tag)
    assert path is not None and f"rank_{engine.global_rank}_" in path
    engine.check(version)


def test_every_node_has_its_own(tmp_path: Path) -> None:
    """Each node's folder holds its ranks' files, its own `latest` and a manifest that says which ranks."""
    ranks(save, 4, str(tmp_path), "a", 3, False, LOCAL)
    for node in (0, 1):
        folder = tmp_path / f"node{node}"
        assert (folder / "latest").read_text() == "a" and (folder / "zero_to_fp32.py").exists()
        manifest = json.loads((folder / "a" / "ds_manifest.json").read_text())
        assert manifest["ranks"] == [2 * node, 2 * node + 1] and manifest["world_size"] == 4
        assert len(list((folder / "a").glob("*.pt"))) == 4
    ranks(load, 4, str(tmp_path), None, 3, False, LOCAL)
    ranks(save, 4, str(tmp_path), "a", 4, False, LOCAL)
    ranks(load, 4, str(tmp_path), "a", 4, False, LOCAL)


def test_node_local_on_a_shared_folder(tmp_path: Path) -> None:
    """The option is on but the nodes see one folder: the tag ends up whole, whoever publishes last."""
    for version in (3, 4):
        ranks(save, 4, str(tmp_path), "a", version, True, LOCAL)
        assert json.loads((tmp_path / "a" / "ds_manifest.json").read_text())["ranks"] is None
        ranks(load, 4, str(tmp_path), "a", version, True, LOCAL)
        ranks(load, 4, str(tmp_path), None, version, True, {})


def test_shared_folder_with_local_ranks(tmp_path: Path) -> None:
    ranks(save, 4, str(tmp_path), "a", 3, True, {})
    ranks(load, 4, str(tmp_path), None, 3, True, {})


@pytest.mark.parametrize("rank", [1, 2])
def test_one_failing_rank_fails_both_nodes(tmp_path: Path, rank: int) -> None:
    ranks(save, 4, str(tmp_path), "a", 3, False, LOCAL)
    outcomes = run_forked(save, 4, str(tmp_path), "b", 4, False, LOCAL, rank)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 4
    for node in (0, 1):
        assert (tmp_path / f"node{node}" / "latest").read_text() == "a"
        assert not [path for path in (tmp_path / f"node{node}").iterdir() if path.name.endswith(".tmp")]
    ranks(load, 4, str(tmp_path), None, 3, False, LOCAL)


def _texts(outcomes: list[Outcome]) -> set[str]:
    return {outcome.text.splitlines()[0] for outcome in outcomes}


def test_nodes_that_disagree(tmp_path: Path) -> None:
    ranks(save, 4, str(tmp_path), "a", 3, False, LOCAL)
    ranks(save, 4, str(tmp_path), "b", 4, False, LOCAL)
    (tmp_path / "node1" / "latest").write_text("a")
    outcomes = run_forked(load, 4, str(tmp_path), None, 4, False, LOCAL)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 4
    assert "the nodes hold different checkpoints (rank 0: 'b', rank 2: 'a')" in _texts(outcomes).pop()


def test_other_world_size_needs_all_files_in_one_place(tmp_path: Path) -> None:
    ranks(save, 4, str(tmp_path), "a", 3, False, LOCAL)
    outcomes = run_forked(load, 2, str(tmp_path), None, 3, False, LOCAL)
    assert {outcome.error for outcome in outcomes} == {"CheckpointMismatch"}, outcomes
    assert "not on this node" in _texts(outcomes).pop()


def test_universal_from_two_nodes(tmp_path: Path) -> None:
    """Report 27: converted from a shared folder, loaded on two nodes; rank arithmetic is global."""
    ranks(save, 4, str(tmp_path), "a", 3, True, {})
    ds_to_universal.main(["--input_folder", str(tmp_path / "a"), "--output_folder", str(tmp_path / "u")])
    ranks(_universal, 4, str(tmp_path))


def _universal(base: str) -> None:
    engine = _engine(9, {"load_universal": True})
    engine.load_checkpoint(base)
    engine.check(3)
