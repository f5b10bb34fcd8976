# SPDX-License-Identifier: Apache-2.0
"""Folders written by another implementation of the format (C13): every value is read exactly, at any world size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.folder import open_tag
from deepspeed.checkpoint.loading import whole
from deepspeed.checkpoint.reader import ZeroSource
from deepspeed.checkpoint.reshard import build_state
from deepspeed.checkpoint.state import Zero3State
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint import fake, golden_model

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = list(golden_model.VARIANTS)


def expected(variant: str) -> dict[str, Any]:
    return torch.load(GOLDEN / variant / "expected.pt", weights_only=True)


def source(variant: str) -> ZeroSource:
    return ZeroSource(open_tag(GOLDEN / variant / "global_step2"), 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_weights_and_moments(variant: str) -> None:
    opened, want = source(variant), expected(variant)
    opened.prepare(list(opened.shapes), 1, 0)
    for name, shape in opened.shapes.items():
        assert torch.equal(whole(opened, name), want["weights"][name]), name
        if name in opened.trainable:
            arrays, single = opened.state_keys(name)
            assert set(arrays) == {"exp_avg", "exp_avg_sq"} and float(single["step"]) == 2
            for key in arrays:
                value = torch.empty(shape.numel())
                opened.read_state(name, key, 1, 0, value)
                assert torch.equal(value.view(shape), want["moments"][f"{name}.{key}"]), (name, key)


@pytest.mark.parametrize("variant", VARIANTS)
def test_converter(variant: str) -> None:
    state, want = get_fp32_state_dict_from_zero_checkpoint(GOLDEN / variant), expected(variant)["weights"]
    for name, tensor in want.items():
        assert torch.equal(state[name].float(), tensor), name
    assert torch.equal(state["scale"], torch.linspace(0.9, 1.1, golden_model.HIDDEN))
    if variant == "bf16_groups":
        assert state["head.weight"] is state["embed.weight"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_state_for_every_rank(variant: str, world: int) -> None:
    """`build_state` against slicing the known full values, hyper-parameters and scaler included."""
    spec, want = golden_model.VARIANTS[variant], expected(variant)
    for rank in range(world):
        dynamic = variant == "fp16_scaler"
        dtype = {"fp32": torch.float32, "bf16_groups": torch.bfloat16, "fp16_scaler": torch.float16}[variant]
        core = fake.FakeCore(
            golden_model.build(**spec["model"]), world, rank, param_dtype=dtype, dynamic=dynamic, version=0
        )
        if not spec["groups"]:
            names = [name for _, members in core.groups for name in members]
            core.groups, core.hyper = [(0, names)], core.hyper[:1]
            core.set_version(0)
        state = build_state(core.export_state(), source(variant), strict=True, load_optimizer_states=True)
        _compare(state, want, dtype)
        assert [group["betas"] for group in state.param_groups][0] == (0.9, 0.95 if spec["groups"] else 0.999)
        assert len(state.param_groups) == (2 if spec["groups"] else 1)
        if dynamic:
            assert state.loss_scaler.cur_scale == want["loss_scales"][0]
            assert type(state.loss_scaler).__module__ == "deepspeed.runtime.fp16.loss_scaler"


def _compare(state: Zero3State, want: dict[str, Any], dtype: torch.dtype) -> None:
    world, rank = state.world_size, state.rank
    for group in state.sub_groups:
        offset = 0
        for name, shape in zip(group.names, group.shapes, strict=True):
            part = fake.shard(want["weights"][name], world, rank)
            real = max(0, min(len(part), shape.numel() - rank * len(part)))
            span = slice(offset, offset + real)
            assert torch.equal(group.fp32[span], part[:real]), name
            for key in ("exp_avg", "exp_avg_sq"):
                moment = fake.shard(want["moments"][f"{name}.{key}"], world, rank)
                assert torch.equal(group.state[key][span], moment[:real]), (name, key)
            offset += len(part)
        assert float(group.state["step"]) == 2
    for name, (shape, shard) in state.frozen.items():
        part = fake.shard(want["weights"][name], world, rank)
        real = max(0, min(len(part), shape.numel() - rank * len(part)))
        assert shard.dtype == dtype and torch.equal(shard[:real].float(), part[:real]), name


def test_client_state_and_counters(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "bf16_groups", tmp_path / "copy")
    engine = fake.FakeEngine(1, 0, 9, param_dtype=torch.bfloat16)
    path, client = engine.load_checkpoint(tmp_path / "copy")
    assert path is not None and path.endswith("global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert client["note"] == "golden" and client["epoch"] == 3
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (2, 16, 0)
    assert engine.lr_scheduler.last == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_files_have_the_same_keys(variant: str, tmp_path: Path) -> None:
    """Key by key, type by type: what we write is laid out as the recorded files are."""
    spec = golden_model.VARIANTS[variant]
    dtype = torch.bfloat16 if variant == "bf16_groups" else torch.float32
    engine = fake.FakeEngine(1, 0, 2, tied=spec["model"].get("tied", False), frozen=spec["model"].get("frozen", False),
                             param_dtype=dtype, dynamic=variant == "fp16_scaler")  # fmt: skip
    engine.save_checkpoint(tmp_path, client_state={"note": "golden", "epoch": 3})
    ours, theirs = ZeroSource(open_tag(tmp_path / "global_step2"), 0), source(variant)
    mine, golden = ours.model(0), theirs.model(0)
    assert list(mine) == list(golden)
    assert list(mine["module"]) == list(golden["module"])
    assert {name: (t.dtype, t.shape) for name, t in mine["module"].items()}.keys() == golden["module"].keys()
    for key in golden:
        if key not in ("lr_scheduler",):
            assert type(mine[key]) is type(golden[key]), key
    assert list(ours.optim(0)) == list(theirs.optim(0))
    inner, golden_inner = ours.optim(0)["optimizer_state_dict"], theirs.optim(0)["optimizer_state_dict"]
    assert list(inner) == list(golden_inner)
    assert list(inner["state"][0]) == list(golden_inner["state"][0])
    assert json.dumps(sorted(vars(ours.optim(0)["loss_scaler"]))) == json.dumps(
        sorted(vars(theirs.optim(0)["loss_scaler"]))
    )
