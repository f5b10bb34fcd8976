# SPDX-License-Identifier: Apache-2.0
"""Loading runs nothing from a file: S1, S2, S3, S5, S6 (S4, the repository-wide scan, is with the meta tests)."""

from __future__ import annotations

import argparse
import ast
import os
import random
import struct
import zipfile
from collections.abc import Callable
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.checkpoint import control as control_module
from deepspeed.checkpoint import inspect as inspector
from deepspeed.checkpoint import serialization
from deepspeed.checkpoint.universal import convert
from deepspeed.errors import CheckpointCorrupt, CheckpointError, CheckpointUnsafe
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import zero_to_fp32
from tests.checkpoint import fake

MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def poisoned(path: Path, marker: Path, unsigned: bool = True) -> None:
    """Put a payload into a file of a checkpoint and remove the manifest that would have caught it."""
    content = serialization.load_file(path, mmap=False)
    content["poison"] = Payload(marker)
    path.unlink()
    torch.save(content, path)
    if unsigned:
        (path.parent / "ds_manifest.json").unlink(missing_ok=True)


def saved(folder: Path, **options: Any) -> Path:
    fake.FakeEngine(1, 0, 3).save_checkpoint(folder, tag="t", **options)
    return folder / "t"


LOADERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "model": (MODEL, lambda base: fake.FakeEngine(1, 0, 9).load_checkpoint(base)),
    "optim": (OPTIM, lambda base: fake.FakeEngine(1, 0, 9).load_checkpoint(base)),
    "module_only": (MODEL, lambda base: fake.FakeEngine(1, 0, 9).load_checkpoint(base, load_module_only=True)),
    "zero_to_fp32 model": (MODEL, lambda base: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(base)),
    "zero_to_fp32 optim": (OPTIM, lambda base: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(base)),
    "parse_model_states": (MODEL, lambda base: zero_to_fp32.parse_model_states([base / "t" / MODEL])),
    "to universal": (OPTIM, lambda base: convert(base / "t", base / "u")),
    "torch engine": (MODEL, lambda base: TorchCheckpointEngine().load(str(base / "t" / MODEL))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_payload_in_any_file(tmp_path: Path, name: str) -> None:
    """S1: refused by name in each of the loaders; the payload did not run."""
    file, loader = LOADERS[name]
    folder, marker = saved(tmp_path), tmp_path / "marker"
    poisoned(folder / file, marker)
    with pytest.raises(CheckpointUnsafe, match="posix.mkdir"):
        loader(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "file", ["zero/up.weight/fp32.pt", "zero/up.weight/exp_avg.pt", "zero/optimizer_state.pt", MODEL]
)
def test_payload_in_a_universal_folder(tmp_path: Path, file: str) -> None:
    folder, marker = saved(tmp_path), tmp_path / "marker"
    convert(folder, tmp_path / "u")
    content = serialization.load_file(tmp_path / "u" / file, mmap=False)
    (tmp_path / "u" / file).unlink()
    torch.save({"param": content, "poison": Payload(marker)}, tmp_path / "u" / file)
    engine = fake.FakeEngine(1, 0, 9, checkpoint={"load_universal": True})
    with pytest.raises(CheckpointUnsafe, match="posix.mkdir"):
        engine.load_checkpoint(tmp_path)
    assert not marker.exists()


def test_inspect_reports_a_payload(tmp_path: Path) -> None:
    folder, marker = saved(tmp_path), tmp_path / "marker"
    poisoned(folder / OPTIM, marker)
    (facts,) = inspector.describe(tmp_path)["tags"]
    assert not facts["complete"] and "posix.mkdir" in facts["problem"] and not marker.exists()


def test_client_state_needs_an_opt_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S2, decision 1: warned about at save, refused at load, loaded once it is named, with a warning."""
    monkeypatch.setattr("deepspeed.runtime.engine_parts.checkpoint.logger.propagate", True)
    engine = fake.FakeEngine(1, 0, 3)
    engine.save_checkpoint(tmp_path, client_state={"share": Fraction(2, 29)})
    assert "fractions.Fraction" in caplog.text and "checkpoint.allow_globals" in caplog.text
    with pytest.raises(CheckpointUnsafe, match=r"fractions\.Fraction.*DS_CHECKPOINT_ALLOW_GLOBALS=fractions\.Fraction"):
        engine.load_checkpoint(tmp_path)
    monkeypatch.setenv(serialization.ALLOW_ENV, "fractions.Fraction")
    with pytest.warns(UserWarning, match=r"fractions\.Fraction"):
        assert engine.load_checkpoint(tmp_path)[1]["share"] == Fraction(2, 29)
    monkeypatch.delenv(serialization.ALLOW_ENV)
    named = fake.FakeEngine(1, 0, 9, checkpoint={"allow_globals": ["fractions.Fraction"]})
    with pytest.warns(UserWarning, match=r"fractions\.Fraction"):
        assert named.load_checkpoint(tmp_path)[1]["share"] == Fraction(2, 29)


def test_an_opt_in_covers_only_what_it_names(tmp_path: Path) -> None:
    folder, marker = saved(tmp_path), tmp_path / "marker"
    poisoned(folder / MODEL, marker)
    engine = fake.FakeEngine(1, 0, 9, checkpoint={"allow_globals": ["fractions.Fraction"]})
    with pytest.warns(UserWarning), pytest.raises(CheckpointUnsafe, match="posix.mkdir"):
        engine.load_checkpoint(tmp_path)
    assert not marker.exists()


def test_what_loads_without_an_opt_in(tmp_path: Path) -> None:
    """Decision 1: containers, numbers, text, tensors, what hyper-parameters hold, RNG states of all three."""
    state = {
        "args": argparse.Namespace(lr=0.1, layers=[1, 2], name="x", data=Path("a/b"), every=timedelta(minutes=5)),
        "begun": datetime(2026, 11, 30, 14, 45),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.float64(1.5),
        "nested": {"a": [1, 2.5, None, True, b"bytes", "text", (1, {2})]},
    }
    engine = fake.FakeEngine(1, 0, 3)
    engine.save_checkpoint(tmp_path, client_state=state)
    _, loaded = engine.load_checkpoint(tmp_path)
    assert loaded["args"] == state["args"] and loaded["python"] == state["python"]
    assert loaded["nested"] == state["nested"] and loaded["generator"] == state["generator"]
    assert loaded["numpy"][0] == state["numpy"][0] and np.array_equal(loaded["numpy"][1], state["numpy"][1])
    assert torch.equal(loaded["torch"], state["torch"]) and np.array_equal(loaded["array"], state["array"])
    assert loaded["scalar"] == 1.5 and loaded["begun"] == state["begun"]


def test_no_second_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: one call of torch.load per file, weights_only=True, and none after a refusal."""
    folder, marker = saved(tmp_path), tmp_path / "marker"
    poisoned(folder / MODEL, marker)
    calls: list[Any] = []
    original = torch.load

    def spied(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.get("weights_only"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spied)
    with pytest.raises(CheckpointUnsafe):
        serialization.load_file(folder / MODEL)
    assert calls == [True]


def test_our_files_load_with_plain_torch(tmp_path: Path) -> None:
    """Report 33: the only class in our files is the loss scaler, which other readers need as an object."""
    folder = saved(tmp_path, client_state={"epoch": 1})
    assert torch.load(folder / MODEL, weights_only=True)["epoch"] == 1
    assert torch.serialization.get_unsafe_globals_in_checkpoint(folder / OPTIM) == [
        "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    ]
    with serialization.safe_globals():
        assert torch.load(folder / OPTIM, weights_only=True)["optimizer_state_dict"]["zero_stage"] == 3


# -- absurd files (S5) ----------------------------------------------------------------------------------------------


def test_compressed_records(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(50_000_000))
    assert bomb.stat().st_size < 100_000
    with pytest.raises(CheckpointCorrupt, match="compressed"):
        serialization.load_file(bomb)


def test_header_that_claims_more_than_the_file(tmp_path: Path) -> None:
    lie = tmp_path / "lie.pt"
    torch.save({"a": torch.zeros(10)}, lie)
    data = bytearray(lie.read_bytes())
    at = data.find(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 20, 0x7FFFFFF0)
    struct.pack_into("<I", data, at + 24, 0x7FFFFFF0)
    lie.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="claims"):
        serialization.load_file(lie)


class Oversized:
    """Pickles as a tensor of a terabyte over a storage of 40 bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        rebuild, args = self.tensor.__reduce_ex__(2)[:2]
        rebuild, args = rebuild, list(args)
        for index, entry in enumerate(args):
            if isinstance(entry, tuple) and len(entry) == 2 and callable(entry[0]):
                args[index] = entry
        args = [args[0], 0, (1 << 38,), (1,), *args[4:]]
        return torch._utils._rebuild_tensor_v2, tuple(args)


def test_tensor_larger_than_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save({"a": Oversized(torch.zeros(10))}, path)
    with pytest.raises(CheckpointCorrupt):
        serialization.load_file(path)


@pytest.mark.parametrize("shape", [[1 << 31, 1 << 31, 1 << 31], [-1, 4], [1 << 60]])
def test_absurd_shapes(tmp_path: Path, shape: list[int]) -> None:
    folder = saved(tmp_path)
    content = serialization.load_file(folder / MODEL, mmap=False)
    content["param_shapes"][0]["up.weight"] = shape
    (folder / MODEL).unlink()
    torch.save(content, folder / MODEL)
    (folder / "ds_manifest.json").unlink()
    with pytest.raises(CheckpointCorrupt, match="up.weight has the impossible shape"):
        fake.FakeEngine(1, 0, 9).load_checkpoint(tmp_path)


@pytest.mark.parametrize("junk", [b"", b"PK", b"not a zip at all", b"\x80\x04N.", bytes(4096)])
def test_junk(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(junk)
    with pytest.raises(CheckpointError):
        serialization.load_file(path)


# -- control messages (S6) ------------------------------------------------------------------------------------------


def test_no_object_collectives() -> None:
    """S6: the checkpoint package exchanges JSON; no collective that pickles is called anywhere in it."""
    root = Path(control_module.__file__).parent
    engine = root.parent / "runtime" / "engine_parts" / "checkpoint.py"
    used: set[str] = set()
    for path in [*root.glob("*.py"), engine, root.parent / "utils" / "zero_to_fp32.py"]:
        tree = ast.parse(path.read_text())
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {name for name in used if name.endswith("_object_list") or name.endswith("_object")}
    assert "all_gather" in used


def test_an_opt_in_that_cannot_be_imported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong name never costs the save; the load says which name it is."""
    engine = fake.FakeEngine(1, 0, 3, checkpoint={"allow_globals": ["no.such.Thing"]})
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    with pytest.raises(ValueError, match=r"no\.such\.Thing"), pytest.warns(UserWarning):
        engine.load_checkpoint(tmp_path)
    engine.check(3)
