# SPDX-License-Identifier: Apache-2.0
"""What is saved is what is loaded: same world, any other world, every argument; exact comparisons throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.reshard import pieces
from deepspeed.checkpoint.state import shard_numel
from deepspeed.errors import CheckpointMismatch
from tests.checkpoint import fake
from tests.checkpoint.forked import ranks


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 13, 33])
def test_pieces_cover_every_element_once(numel: int) -> None:
    """Re-slicing from any world to any other, against slicing the whole."""
    full = torch.arange(numel, dtype=torch.float32)
    for source in range(1, 7):
        shards = [fake.shard(full, source, rank) for rank in range(source)]
        for target in range(1, 7):
            for rank in range(target):
                out = torch.full((shard_numel(numel, target),), 777.0)
                for piece in pieces(numel, source, target, rank):
                    taken = shards[piece.source_rank][piece.source_start : piece.source_start + piece.length]
                    assert len(taken) == piece.length > 0
                    out[piece.target_start : piece.target_start + piece.length] = taken
                assert torch.equal(out, fake.shard(full, target, rank)), (source, target, rank)


def save(folder: str, version: int, options: dict[str, Any], arguments: dict[str, Any]) -> str:
    engine = fake.engine(version, **options)
    assert engine.save_checkpoint(folder, **arguments) is True
    return engine.optimizer.digest()


def load(folder: str, version: int, options: dict[str, Any], arguments: dict[str, Any]) -> Any:
    engine = fake.engine(9, **options)
    path, client = engine.load_checkpoint(folder, **arguments)
    assert path is not None and Path(path).is_file()
    with_optimizer = arguments.get("load_optimizer_states", True) and not arguments.get("load_module_only", False)
    engine.check(version, optimizer=with_optimizer)
    counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.lr_scheduler.last)
    step = float(engine.optimizer.state[0]["step"]) if engine.optimizer.state else 0.0
    shown = ("epoch", "seen", "global_steps", "lr_scheduler")
    return (
        engine.optimizer.digest(),
        {key: value if key in shown else "" for key, value in client.items()},
        counters,
        step,
    )


def test_same_world_is_bit_exact_with_padding(tmp_path: Path) -> None:
    saved = ranks(save, 2, str(tmp_path), 3, {}, {"client_state": {"epoch": 4, "seen": [1, 2]}})
    loaded = ranks(load, 2, str(tmp_path), 3, {}, {})
    assert [entry[0] for entry in loaded] == saved
    for _, client, counters, _ in loaded:
        assert client["epoch"] == 4 and client["seen"] == [1, 2]
        assert counters == [3, 12, 1, 3]
    assert (tmp_path / "latest").read_bytes() == b"global_step3"


@pytest.mark.parametrize(("source", "target"), [(4, 2), (4, 3), (4, 1), (1, 3), (2, 4), (3, 2)])
def test_any_world_size(tmp_path: Path, source: int, target: int) -> None:
    """C8 and report 17: weights, frozen weights, moments and step at another world size, exactly."""
    ranks(save, source, str(tmp_path), 5, {}, {})
    ranks(load, target, str(tmp_path), 5, {}, {})


@pytest.mark.parametrize("sub_group", [1, 25, 10**9])
def test_other_sub_groups(tmp_path: Path, sub_group: int) -> None:
    ranks(save, 2, str(tmp_path), 5, {"sub_group": 60}, {})
    ranks(load, 2, str(tmp_path), 5, {"sub_group": sub_group}, {})


def test_bf16_names_and_frozen_dtype(tmp_path: Path) -> None:
    options = {"param_dtype": torch.bfloat16}
    ranks(save, 2, str(tmp_path), 2, options, {})
    names = sorted(path.name for path in (tmp_path / "global_step2").iterdir())
    assert names == [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "ds_manifest.json",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
    ]
    ranks(load, 3, str(tmp_path), 2, options, {})


def test_module_only_restores_weights_and_nothing_else(tmp_path: Path) -> None:
    """V3: the weights are really restored; counters, scheduler and optimizer stay."""
    ranks(save, 2, str(tmp_path), 3, {}, {"client_state": {"epoch": 1}})
    for _, client, counters, step in ranks(load, 2, str(tmp_path), 3, {}, {"load_module_only": True}):
        assert counters == [9, 36, 4, 9]
        assert step == 9
        assert "module" not in client and client["epoch"] == 1 and client["global_steps"] == 3


def test_without_optimizer_states(tmp_path: Path) -> None:
    ranks(save, 2, str(tmp_path), 3, {}, {})
    for _, client, counters, step in ranks(load, 3, str(tmp_path), 3, {}, {"load_optimizer_states": False}):
        assert counters == [3, 12, 1, 3] and step == 9
        assert {"optimizer", "buffer_names", "param_shapes", "ds_config", "ds_version", "global_samples"} <= set(client)
        assert not {"module", "lr_scheduler", "global_steps", "dp_world_size"} & set(client)


def test_without_scheduler_states(tmp_path: Path) -> None:
    ranks(save, 2, str(tmp_path), 3, {}, {})
    for _, client, counters, _ in ranks(load, 2, str(tmp_path), 3, {}, {"load_lr_scheduler_states": False}):
        assert counters == [3, 12, 1, 9] and client["lr_scheduler"] == {"last_batch_iteration": 3}


def test_fp16_scaler_travels(tmp_path: Path) -> None:
    ranks(save, 2, str(tmp_path), 3, {"dynamic": True}, {})
    ranks(_scaler, 2, str(tmp_path))


def _scaler(folder: str) -> None:
    engine = fake.engine(9, dynamic=True)
    engine.load_checkpoint(folder)
    assert type(engine.optimizer.scaler).__name__ == "DynamicLossScaler"
    assert engine.optimizer.scaler.cur_scale == 2.0**13 and engine.optimizer.scaler.scale_window == 100


def test_engine_without_optimizer(tmp_path: Path) -> None:
    """V11, report 35: loads a training checkpoint, saves one itself, and that loads again."""
    training, serving = tmp_path / "training", tmp_path / "serving"
    ranks(save, 2, str(training), 3, {"frozen": False}, {})
    ranks(_serve, 2, str(training), str(serving))
    ranks(_serve, 3, str(serving), str(tmp_path / "again"))


def _serve(folder: str, target: str) -> None:
    engine = fake.engine(9, frozen=False, with_optimizer=False)
    path, _ = engine.load_checkpoint(folder, load_module_only=True)
    assert path is not None
    for name, shape in engine.optimizer.shapes.items():
        size = shard_numel(shape.numel(), engine.world_size)
        real = max(0, min(size, shape.numel() - engine.global_rank * size))
        want = fake.shard(fake.truth(name, "fp32", 3, shape), engine.world_size, engine.global_rank)
        assert torch.equal(engine.optimizer.frozen[name][:real], want[:real]), name
    engine.save_checkpoint(target)


def test_exclude_frozen_parameters(tmp_path: Path) -> None:
    """Report 25: frozen weights are absent; strict says so, non-strict keeps the engine's."""
    ranks(save, 2, str(tmp_path), 3, {}, {"exclude_frozen_parameters": True})
    content = torch.load(tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=True)
    assert content["frozen_param_shapes"] is None and content["frozen_param_fragments"] is None
    assert "norm.weight" not in content["module"] and "up.weight" in content["module"]
    ranks(_partial, 2, str(tmp_path))
    ranks(_partial, 3, str(tmp_path))


def _partial(folder: str) -> None:
    engine = fake.engine(9)
    before = engine.optimizer.digest()
    with pytest.raises(CheckpointMismatch, match="norm.weight.*load_module_strict=False"):
        engine.load_checkpoint(folder)
    assert engine.optimizer.digest() == before
    frozen = {name: tensor.clone() for name, tensor in engine.optimizer.frozen.items()}
    path, _ = engine.load_checkpoint(folder, load_module_strict=False)
    assert path is not None
    engine.check(3, only=[name for _, members in engine.optimizer.groups for name in members])
    assert all(torch.equal(engine.optimizer.frozen[name], tensor) for name, tensor in frozen.items())


def test_nothing_to_load(tmp_path: Path) -> None:
    ranks(_nothing, 2, str(tmp_path / "absent"))


def _nothing(folder: str) -> None:
    engine = fake.engine(2)
    assert engine.load_checkpoint(folder) == (None, None)
    engine.check(2)


def test_other_shapes_and_names_are_refused(tmp_path: Path) -> None:
    ranks(save, 2, str(tmp_path), 3, {}, {})
    ranks(_foreign, 2, str(tmp_path))


def _foreign(folder: str) -> None:
    engine = fake.engine(9)
    engine.optimizer.shapes["up.weight"] = torch.Size([7, 11])
    before = engine.optimizer.digest()
    with pytest.raises(CheckpointMismatch, match=r"up.weight: checkpoint \(11, 7\), model \(7, 11\)"):
        engine.load_checkpoint(folder)
    assert engine.optimizer.digest() == before and engine.optimizer.imports == 0


def test_save_load_save_load(tmp_path: Path) -> None:
    """Report 23: loads a/b/a/b on one engine, each exact; C10 without the hpZ part."""
    ranks(_alternate, 2, str(tmp_path))


def _alternate(folder: str) -> None:
    engine = fake.engine(1)
    engine.save_checkpoint(folder, tag="a")
    engine.advance(2)
    engine.save_checkpoint(folder, tag="b")
    for tag, version in [("a", 1), ("b", 2), ("a", 1), (None, 2)]:
        engine.load_checkpoint(folder, tag=tag)
        engine.check(version)
    digest = engine.optimizer.digest()
    engine.save_checkpoint(folder, tag="c")
    engine.load_checkpoint(folder, tag="c")
    assert engine.optimizer.digest() == digest


def test_client_state_may_not_replace_the_file(tmp_path: Path) -> None:
    engine = fake.engine(1)
    with pytest.raises(ValueError, match="param_shapes"):
        engine.save_checkpoint(tmp_path, client_state={"param_shapes": 1})
    assert not any(tmp_path.iterdir())


class _Counter(torch.nn.Module):
    """A module with state outside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    engine = fake.FakeEngine(1, 0, 1)
    engine.module.add_module("counter", _Counter())
    engine.module.counter.calls = 41
    engine.save_checkpoint(tmp_path)
    engine.module.counter.calls = 0
    engine.load_checkpoint(tmp_path)
    assert engine.module.counter.calls == 41
    other = fake.FakeEngine(1, 0, 9)
    assert other.load_checkpoint(tmp_path)[0] is not None


def test_folders_of_engines_that_convert(tmp_path: Path) -> None:
    """Whole weights out of folders without frozen weights and of engines without an optimizer."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as full

    ranks(save, 2, str(tmp_path / "a"), 3, {}, {"exclude_frozen_parameters": True})
    found = full(tmp_path / "a")
    assert "norm.weight" not in found and torch.equal(found["mix"], fake.truth("mix", "fp32", 3, torch.Size([3])))
    ranks(save, 2, str(tmp_path / "b"), 3, {"with_optimizer": False}, {})
    found = full(tmp_path / "b")
    assert torch.equal(found["mix"], fake.truth("mix", "frozen", 3, torch.Size([3]))) and "head.weight" in found


def test_torch_checkpoint_engine(tmp_path: Path) -> None:
    from deepspeed.runtime.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine

    engine = TorchCheckpointEngine()
    assert isinstance(engine, CheckpointEngine)
    engine.create("tag")
    engine.makedirs(str(tmp_path / "x"), exist_ok=True)
    path = str(tmp_path / "x" / "state.pt")
    for value in (1.0, 2.0):
        engine.save({"a": torch.full((3,), value), "b": [1, (2, torch.ones(1))]}, path)
        loaded = engine.load(path, map_location="cpu")
        assert torch.equal(loaded["a"], torch.full((3,), value)) and loaded["b"][1][0] == 2
    assert engine.commit("tag") is True
    assert [entry.name for entry in (tmp_path / "x").iterdir()] == ["state.pt"]
