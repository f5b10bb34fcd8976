# SPDX-License-Identifier: Apache-2.0
"""Converters and inspector: exact output in every form, bounded memory, commands that stand on their own."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint import inspect as inspector
from deepspeed.checkpoint.export import parse_size
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.errors import CheckpointCorrupt, CheckpointError
from deepspeed.utils import zero_to_fp32, zero_to_torch
from tests.checkpoint import fake
from tests.checkpoint.forked import ranks

ROOT = Path(__file__).resolve().parents[2]


def save(folder: str, version: int, options: dict[str, Any]) -> None:
    fake.engine(version, **options).save_checkpoint(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, bf16, tied, frozen, several groups and sub-groups."""
    ranks(save, 2, str(tmp_path / "dir"), 3, {"param_dtype": torch.bfloat16})
    return tmp_path / "dir"


def truth() -> dict[str, torch.Tensor]:
    core = fake.FakeEngine(1, 0, 3, param_dtype=torch.bfloat16).optimizer
    full = {name: fake.truth(name, "fp32", 3, shape) for name, shape in core.shapes.items()}
    for name in core.frozen_names:
        full[name] = fake.truth(name, "frozen", 3, core.shapes[name], torch.bfloat16)
    full["head.weight"] = full["embed.weight"]
    full["scale"] = fake.truth("scale", "buffer", 3, torch.Size([7]))
    return full


def equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(want)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def read_all(output: Path, safe: bool) -> dict[str, torch.Tensor]:
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    index = output / f"{stem}.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {stem}
    assert {path.name for path in output.iterdir()} == names | ({index.name} if index.exists() else set())
    found: dict[str, torch.Tensor] = {}
    for name in names:
        part = load_file(output / name) if safe else torch.load(output / name, weights_only=True)
        assert not set(part) & set(found)
        found.update(part)
    if index.exists():
        where = json.loads(index.read_text())
        assert set(where["weight_map"]) == set(found)
        unique = {tensor.data_ptr(): tensor.nbytes for tensor in found.values()}
        assert where["metadata"]["total_size"] == sum(unique.values())
    return found


@pytest.mark.parametrize("safe", [False, True], ids=["torch", "safetensors"])
@pytest.mark.parametrize("limit", ["5GB", "600B", "1B"])
def test_every_form(folder: Path, tmp_path: Path, safe: bool, limit: str) -> None:
    """Report 31: the union of the shards is the model; tied names are stored once."""
    arguments = [str(folder), str(tmp_path / "out"), "--max_shard_size", limit] + ["--safe_serialization"] * safe
    assert zero_to_fp32.main(arguments) == 0
    want, found = truth(), read_all(tmp_path / "out", safe)
    if safe:
        want.pop("head.weight")
        for path in (tmp_path / "out").glob("*.safetensors"):
            with safe_open(path, "pt") as handle:
                if "embed.weight" in handle.keys():
                    assert handle.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    else:
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    equal(found, want)


def test_exclude_frozen(folder: Path, tmp_path: Path) -> None:
    assert zero_to_fp32.main([str(folder), str(tmp_path / "out"), "--exclude_frozen_parameters"]) == 0
    want = {name: tensor for name, tensor in truth().items() if tensor.dtype == torch.float32}
    equal(read_all(tmp_path / "out", False), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert zero_to_torch.main([str(folder), str(tmp_path / "out"), "--dtype", name]) == 0
    equal(read_all(tmp_path / "out", False), {key: tensor.to(dtype) for key, tensor in truth().items()})


def test_lazy_and_eager(folder: Path) -> None:
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert isinstance(lazy["up.weight"], zero_to_fp32.GatheredTensor)
    assert lazy["up.weight"].shape == (11, 7) and lazy["up.weight"].numel() == 77
    assert lazy["head.weight"] is lazy["embed.weight"]
    eager = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step3")
    equal(eager, truth())
    equal(zero_to_fp32.to_torch_tensor(lazy), truth())
    empty = zero_to_fp32.to_torch_tensor(lazy, return_empty_tensor=True)
    assert {name: tensor.shape for name, tensor in empty.items()} == {name: t.shape for name, t in truth().items()}


def test_helpers_that_clients_call(folder: Path) -> None:
    """The names and results of contract 4.5, as Lightning uses them."""
    tag = str(folder / "global_step3")
    files = zero_to_fp32.get_optim_files(tag)
    assert [Path(file).name for file in files] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    assert Path(zero_to_fp32.get_model_state_file(tag, 3)).name == "zero_pp_rank_0_mp_rank_00_model_states.pt"
    models = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(tag))
    assert models[0].shared_params == [["head.weight", "embed.weight"]] and models[1].shared_params == []
    assert models[0].buffers["scale"].dtype == torch.float32 and models[0].frozen_param_fragments is not None
    stage, world, groups, _ = zero_to_fp32.parse_optim_states(files, tag)
    assert (stage, world, len(groups)) == (3, 2, 2)
    with pytest.raises(FileNotFoundError):
        zero_to_fp32.get_checkpoint_files(tag, "nothing*")
    with pytest.raises(FileNotFoundError):
        zero_to_fp32.get_model_state_file(tag, 2)


def test_files_in_numerical_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0, 1):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    found = [Path(path).name.split("_")[3] for path in zero_to_fp32.get_optim_files(tmp_path)]
    assert found == ["0", "1", "2", "10"]


def test_missing_latest_tag_and_shards(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="nope")
    (folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointCorrupt, match="rank_1"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert zero_to_fp32.main([str(folder), str(tmp_path / "out")]) == 1
    (folder / "latest").unlink()
    with pytest.raises(ValueError, match="latest"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)


@pytest.mark.parametrize("script", ["zero_to_fp32.py", "zero_to_torch.py"])
def test_the_copy_in_the_folder_runs(folder: Path, tmp_path: Path, script: str) -> None:
    """``cd DIR && python zero_to_fp32.py . OUT``: with this package importable and nothing else of the job."""
    path = folder / script
    assert path.stat().st_mode & stat.S_IXUSR
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, ".", str(tmp_path / "out")], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = read_all(tmp_path / "out", False)
    want = truth() if script == "zero_to_fp32.py" else {name: tensor.float() for name, tensor in truth().items()}
    equal(found, want)


def test_interrupted_conversion_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("deepspeed.checkpoint.store.Storage.replace", broken)
    assert zero_to_fp32.main([str(folder), str(tmp_path / "out")]) == 1
    assert not any((tmp_path / "out").iterdir())


_MEMORY = """
import sys, threading, time
from deepspeed.utils import zero_to_fp32
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])
peak, done = [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
import deepspeed.runtime.config, torch
base = anonymous()
thread = threading.Thread(target=watch)
thread.start()
if sys.argv[3] == "eager":
    held = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])
else:
    extra = ["--safe_serialization"] if sys.argv[3] == "safe" else []
    assert zero_to_fp32.main([sys.argv[1], sys.argv[2], *extra]) == 0
done.set()
thread.join()
print("PEAK", (peak[0] - base) / 1024)
"""


def _large(folder: str) -> None:
    """192 MB of fp32 in 12 parameters of 16 MB."""
    module = torch.nn.ModuleList([torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)])
    engine = fake.engine(0)
    engine.module = module
    engine.optimizer = fake.FakeCore(module, engine.world_size, engine.global_rank, sub_group=10**9)
    engine.save_checkpoint(folder)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """192 MB of weights convert in a few parameters' worth of memory; the same meter sees the whole when held."""
    ranks(_large, 2, str(tmp_path / "dir"))
    peaks = {}
    for mode in ("safe", "torch", "eager"):
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(tmp_path / "dir"), str(tmp_path / mode), mode],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        peaks[mode] = float(done.stdout.split("PEAK")[1])
    assert peaks["safe"] < 50 and peaks["torch"] < 50 < 180 < peaks["eager"], peaks


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("300MiB", 300 * 2**20), ("1.5kb", 1500), (77, 77), ("10", 10)]
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "5 G B"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_clone_tensors_for_torch_save(tmp_path: Path) -> None:
    """Views of a large buffer are saved at their own size; structure, names and requires_grad stay."""
    big = torch.arange(100000.0)
    item = {"a": big[5:7], "b": [big[:1], (big[1:2], 3)], "c": torch.nn.Parameter(torch.ones(2)), "d": "text"}
    copy = clone_tensors_for_torch_save(item)
    torch.save(copy, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 5000
    assert torch.equal(copy["a"], item["a"]) and copy["b"][1][1] == 3 and isinstance(copy["b"][1], tuple)
    assert isinstance(copy["c"], torch.nn.Parameter) and copy["d"] == "text"
    copy["a"].zero_()
    assert big[5] == 5


# -- universal ------------------------------------------------------------------------------------------------------


def _load_universal(folder: str, version: int) -> None:
    engine = fake.engine(9, param_dtype=torch.bfloat16, checkpoint={"load_universal": True})
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and "universal" in path
    engine.check(version)
    assert engine.global_steps == version


@pytest.mark.parametrize("world", [1, 2, 3])
def test_universal(folder: Path, world: int) -> None:
    """Command, layout and values; frozen weights and hyper-parameters included, at any world size."""
    arguments = ["--input_folder", str(folder / "global_step3"), "--output_folder", str(folder / "universal")]
    assert ds_to_universal.main(arguments) == 0
    assert (folder / "latest_universal").read_text() == "universal"
    up = folder / "universal" / "zero" / "up.weight"
    assert sorted(path.name for path in up.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt"]
    assert torch.equal(torch.load(up / "fp32.pt", weights_only=True), truth()["up.weight"].flatten())
    ranks(_load_universal, world, str(folder), 3)


def test_universal_is_replaced_only_by_a_whole_one(folder: Path) -> None:
    source, target = folder / "global_step3", folder / "universal"
    arguments = ["--input_folder", str(source), "--output_folder", str(target)]
    assert ds_to_universal.main(arguments) == 0 == ds_to_universal.main(arguments)
    path = source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(path, path.stat().st_size - 1)
    assert ds_to_universal.main(arguments) == 1
    ranks(_load_universal, 1, str(folder), 3)
    assert not [entry for entry in folder.iterdir() if entry.name.endswith(".tmp")]
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("x")
    assert ds_to_universal.main([*arguments[:3], str(folder / "mine")]) == 1
    assert (folder / "mine" / "thesis.txt").exists()


def test_universal_with_tensors_under_param(folder: Path) -> None:
    """The other spelling of the layout: a dictionary with the shaped tensor, and a step file."""
    ds_to_universal.main(["--input_folder", str(folder / "global_step3"), "--output_folder", str(folder / "universal")])
    shapes = fake.FakeEngine(1, 0).optimizer.shapes
    for path in (folder / "universal" / "zero").glob("*/*.pt"):
        tensor = torch.load(path, weights_only=True).view(shapes[path.parent.name])
        path.unlink()
        torch.save({"param": tensor}, path)
        torch.save(3, path.parent / "step.pt")
    ranks(_load_universal, 2, str(folder), 3)


def test_damaged_universal(folder: Path) -> None:
    ds_to_universal.main(["--input_folder", str(folder / "global_step3"), "--output_folder", str(folder / "universal")])
    shutil.rmtree(folder / "universal" / "zero" / "up.bias")
    engine = fake.FakeEngine(1, 0, 9, param_dtype=torch.bfloat16, checkpoint={"load_universal": True})
    before = engine.optimizer.digest()
    with pytest.raises(CheckpointError, match="up.bias"):
        engine.load_checkpoint(folder)
    assert engine.optimizer.digest() == before


# -- inspect --------------------------------------------------------------------------------------------------------


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspector.main([str(folder), "--params"]) == 0
    table = capsys.readouterr().out
    assert "* is what 'latest' names" in table and "sha256" in table
    assert (
        "up.weight  (11, 7)" in table
        and "head.weight  = embed.weight" in table
        and "norm.weight  (11,)  frozen" in table
    )
    assert inspector.main([str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (tag,) = facts["tags"]
    assert facts["latest"] == tag["tag"] == "global_step3"
    assert tag["complete"] and tag["world_size"] == 2 and tag["verified"] == "sha256" and tag["param_groups"] == 2
    assert tag["parameters"]["embed.weight"] == [13, 7] and tag["frozen"] == ["down.weight", "norm.bias", "norm.weight"]
    assert tag["trainable_elements"] + tag["frozen_elements"] == sum(
        shape.numel() for shape in fake.FakeEngine(1, 0).optimizer.shapes.values()
    )


def test_inspect_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(save, 2, str(folder), 4, {"param_dtype": torch.bfloat16})
    path = folder / "global_step4" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    assert inspector.main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert "BROKEN" in out and "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt does not match" in out
    assert inspector.main([str(folder), "--tag", "global_step3"]) == 0
    assert inspector.main([str(folder / "global_step3")]) == 0
    assert inspector.main([str(folder / "nowhere")]) == 2
    (folder / "latest").write_text("gone")
    inspector.main([str(folder), "--no-verify"])
    assert "names 'gone', which does not exist" in capsys.readouterr().out


def test_inspect_recorded_folders(capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parent / "golden"
    for variant in golden.iterdir():
        assert inspector.main([str(variant)]) == 0
        assert "no manifest" in capsys.readouterr().out
