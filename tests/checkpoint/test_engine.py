# SPDX-License-Identifier: Apache-2.0
"""Training goes on as if it had not been interrupted: the real engine, plain and hpZ, on 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.serialization import load_file
from deepspeed.checkpoint.universal import convert
from deepspeed.errors import CheckpointError, CheckpointMismatch
from deepspeed.utils import zero_to_fp32
from tests.checkpoint import golden_model as gm
from tests.checkpoint import real
from tests.checkpoint.forked import ranks

GOLDEN = Path(__file__).parent / "golden"
HPZ = {"zero_hpz_partition_size": 2}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
PLAIN: dict[str, Any] = {}


def _start(folder: str, variant: str, zero: dict[str, Any]) -> list[Any]:
    eng = real.engine(variant, zero=zero)
    first = real.train(eng, 0, 1)
    before = real.evaluate(eng)
    eng.save_checkpoint(folder, client_state={"epoch": 7})
    return [first, before, real.train(eng, 2, 3, 4)]


def _resume(folder: str, variant: str, zero: dict[str, Any]) -> list[Any]:
    eng = real.engine(variant, seed=99, zero=zero)
    real.train(eng, 50)  # a used engine with valid secondaries and moments of its own
    _, client = eng.load_checkpoint(folder)
    assert client["epoch"] == 7 and eng.global_steps == 2
    return [real.evaluate(eng), real.train(eng, 2, 3, 4)]


@pytest.mark.parametrize("variant", list(gm.VARIANTS))
@pytest.mark.parametrize(("world", "zero"), [(2, PLAIN), (4, HPZ)], ids=["plain", "hpz"])
def test_resume_equals_uninterrupted(tmp_path: Path, variant: str, world: int, zero: dict[str, Any]) -> None:
    """Report 1 (deepspeedai/DeepSpeed#7606): evaluation and every later loss, bit for bit, in a fresh process."""
    _, before, after = ranks(_start, world, str(tmp_path), variant, zero)[0]
    resumed = ranks(_resume, world, str(tmp_path), variant, zero)
    assert all(result == [before, after] for result in resumed), (resumed, before, after)


@pytest.mark.parametrize(("saved", "loaded"), [(PLAIN, HPZ), (HPZ, PLAIN)], ids=["plain-hpz", "hpz-plain"])
def test_hpz_on_either_side(tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    _, before, after = ranks(_start, 4, str(tmp_path), "bf16_groups", saved)[0]
    assert ranks(_resume, 4, str(tmp_path), "bf16_groups", loaded)[0] == [before, after]


@pytest.mark.parametrize("variant", list(gm.VARIANTS))
def test_golden_folders_train_on(variant: str) -> None:
    """C13: a folder of upstream 0.19.8; the next five losses are those that upstream had."""
    want = torch.load(GOLDEN / variant / "expected.pt", weights_only=True)
    after, skipped, scales = ranks(_golden, 2, variant)[0]
    assert after == pytest.approx(want["after"], rel=1e-6 if variant == "fp32" else 2e-3)
    assert skipped == want["skipped_steps"]
    assert scales == want["loss_scales"]


def _golden(variant: str) -> list[Any]:
    eng = real.engine(variant, seed=99)
    assert eng.load_checkpoint(str(GOLDEN / variant))[0] is not None
    losses, scales = [], [float(eng.optimizer.loss_scale)]
    for step in range(2, 7):
        losses += real.train(eng, step)
        scales.append(float(eng.optimizer.loss_scale))
    return [losses, eng.skipped_steps, scales]


def _global_start(folder: str, zero: dict[str, Any]) -> list[float]:
    eng = real.engine(zero=zero, gradient_accumulation_steps=4 // dist.get_world_size(), gradient_clipping=0.0)
    real.train_global(eng, 0, 1)
    eng.save_checkpoint(folder)
    return real.train_global(eng, 2, 3, 4)


def _global_resume(folder: str, zero: dict[str, Any], universal: bool) -> list[float]:
    eng = real.engine(
        seed=99,
        zero=zero,
        gradient_accumulation_steps=4 // dist.get_world_size(),
        gradient_clipping=0.0,
        checkpoint={"load_universal": universal, "wait_timeout": 20},
    )
    assert eng.load_checkpoint(folder)[0] is not None
    return real.train_global(eng, 2, 3, 4)


@pytest.mark.parametrize(("source", "target"), [(4, 2), (4, 1), (2, 4), (1, 2)])
def test_any_world_size(tmp_path: Path, source: int, target: int) -> None:
    """Report 17: the next losses over the same global batch are equal."""
    zero = {"sub_group_size": 60}
    after = ranks(_global_start, source, str(tmp_path), zero)[0]
    assert ranks(_global_resume, target, str(tmp_path), zero, False)[0] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("target", [1, 2, 4])
def test_universal(tmp_path: Path, target: int) -> None:
    """Reports 26, 28: converted, loaded at another world size, trained on; a save after that is whole again."""
    after = ranks(_global_start, 4, str(tmp_path / "a"), {})[0]
    convert(tmp_path / "a" / "global_step2", tmp_path / "a" / "global_step2_universal")
    assert ranks(_global_resume, target, str(tmp_path / "a"), {}, True)[0] == pytest.approx(after, rel=1e-5)
    ranks(_save_after_universal, target, str(tmp_path / "a"), str(tmp_path / "b"))
    names = sorted(path.name for path in (tmp_path / "b" / "global_step3").glob("*_model_states.pt"))
    assert len(names) == target
    zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "b")


def _save_after_universal(source: str, target: str) -> None:
    eng = real.engine(
        gradient_accumulation_steps=4 // dist.get_world_size(),
        checkpoint={"load_universal": True, "wait_timeout": 20},
    )
    eng.load_checkpoint(source)
    real.train_global(eng, 2)
    eng.save_checkpoint(target)


@pytest.mark.parametrize(
    ("world", "zero"),
    [(2, PLAIN), (4, HPZ), (2, OFFLOAD), (4, {**HPZ, **OFFLOAD})],
    ids=["plain", "hpz", "cpu", "hpz-cpu"],
)
def test_loads_on_a_used_engine(tmp_path: Path, world: int, zero: dict[str, Any]) -> None:
    """C10, report 23: a/b/a/b between training steps; each evaluation is that of the tag."""
    ranks(_alternate, world, str(tmp_path), zero)


def _alternate(folder: str, zero: dict[str, Any]) -> None:
    eng = real.engine("bf16_groups", zero=zero)
    real.train(eng, 0)
    eng.save_checkpoint(folder, tag="a")
    losses = {"a": real.evaluate(eng)}
    real.train(eng, 1, 2)
    eng.save_checkpoint(folder, tag="b")
    losses["b"] = real.evaluate(eng)
    for tag in "abab":
        eng.load_checkpoint(folder, tag=tag)
        assert real.evaluate(eng) == losses[tag]
        eng.save_checkpoint(folder, tag="c")
        eng.load_checkpoint(folder, tag="c")
        assert real.evaluate(eng) == losses[tag]
        real.train(eng, 5)


@pytest.mark.parametrize(("world", "zero"), [(2, PLAIN), (4, HPZ)], ids=["plain", "hpz"])
def test_module_only(tmp_path: Path, world: int, zero: dict[str, Any]) -> None:
    """V3 and V11: a training engine and one without an optimizer both get the weights, masters included."""
    _, before, _ = ranks(_start, world, str(tmp_path), "bf16_groups", zero)[0]
    assert ranks(_module_only, world, str(tmp_path), zero)[0] == [before] * 4


def _module_only(folder: str, zero: dict[str, Any]) -> list[float]:
    eng = real.engine("bf16_groups", seed=99, zero=zero)
    eng.load_checkpoint(folder, load_module_only=True)
    assert eng.global_steps == 0
    losses = [real.evaluate(eng)]
    for group in eng.optimizer.param_groups:
        group["lr"] = 0.0
    real.train(eng, 3)
    losses.append(real.evaluate(eng))
    server = real.serving("bf16_groups", seed=98, zero=zero)
    server.load_checkpoint(folder, load_module_only=True)
    losses.append(real.evaluate(server))
    server.save_checkpoint(f"{folder}/again")
    other = real.serving("bf16_groups", seed=97, zero=zero)
    other.load_checkpoint(f"{folder}/again")
    return [*losses, real.evaluate(other)]


def test_weights_set_under_gather_are_saved(tmp_path: Path) -> None:
    """V2, report 24: trained and frozen weights rewritten through a gather are what a fresh engine loads."""
    ranks(_rewrite, 2, str(tmp_path))


def test_converters_put_elsewhere_by_the_client(tmp_path: Path) -> None:
    """xtuner replaces `_copy_recovery_script` of the class: a save calls it once, and fails everywhere if it fails."""
    ranks(_replaced_script, 2, str(tmp_path))


def _replaced_script(folder: str) -> None:
    def copy(self: Any, save_path: str) -> None:
        calls.append(save_path)
        target = Path(save_path) / "mine.py"
        target.write_text("print(7)")
        self._change_recovery_script_permissions(target)

    def fail(self: Any, save_path: str) -> None:
        raise OSError("the script store is away")

    calls: list[Any] = []
    eng = real.engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.DeepSpeedEngine, "_copy_recovery_script", copy)
        eng.save_checkpoint(folder)
        assert calls == ([Path(folder)] if dist.get_rank() == 0 else [])
        patch.setattr(deepspeed.DeepSpeedEngine, "_copy_recovery_script", fail)
        with pytest.raises(CheckpointError, match="rank 0.*the script store is away"):
            eng.save_checkpoint(folder, tag="second")
    script = Path(folder) / "mine.py"
    assert script.stat().st_mode & 0o100 and not (Path(folder) / "zero_to_fp32.py").exists()
    eng.save_checkpoint(folder)
    assert (Path(folder) / "zero_to_fp32.py").stat().st_mode & 0o100


def test_keys_by_their_constants(tmp_path: Path) -> None:
    """A converter of others that reads the files by `deepspeed.checkpoint.constants` finds what it asks for."""
    ranks(_keys, 2, str(tmp_path))


def _keys(folder: str) -> None:
    from deepspeed.checkpoint import constants as keys

    real.engine("bf16_groups").save_checkpoint(folder, tag="t")
    model, optim = (load_file(next(Path(folder, "t").glob(f"*_{kind}_states.pt"))) for kind in ("model", "optim"))
    for key in ("BUFFER_NAMES", "PARAM_SHAPES", "FROZEN_PARAM_SHAPES", "FROZEN_PARAM_FRAGMENTS", "DS_VERSION"):
        assert getattr(keys, key) in model
    assert keys.DS_VERSION in optim
    inner = optim[keys.OPTIMIZER_STATE_DICT]
    assert int(inner[keys.ZERO_STAGE]) == 3 and inner[keys.PARTITION_COUNT] == 2 and inner[keys.FP32_FLAT_GROUPS]


def _rewrite(folder: str) -> None:
    eng = real.engine("bf16_groups")
    real.train(eng, 0)
    for name in ("up.weight", "norm.weight"):
        with real.gathered(eng, name) as param, torch.no_grad():
            param.fill_(0.25 if dist.get_rank() == 0 else 9.0)
    eng.save_checkpoint(folder)
    fresh = real.engine("bf16_groups", seed=99)
    fresh.load_checkpoint(folder)
    found = real.weights(fresh)
    assert (found["up.weight"] == 0.25).all() and (found["norm.weight"] == 0.25).all()
    assert real.evaluate(fresh) == real.evaluate(eng)


def test_frozen_excluded(tmp_path: Path) -> None:
    """Report 25."""
    ranks(_excluded, 2, str(tmp_path))


def _excluded(folder: str) -> None:
    eng = real.engine("bf16_groups")
    real.train(eng, 0)
    eng.save_checkpoint(folder, exclude_frozen_parameters=True)
    base = real.engine("bf16_groups", seed=99)
    mine = real.weights(base)
    with pytest.raises(CheckpointMismatch, match="down.weight.*norm.weight"):
        base.load_checkpoint(folder)
    base.load_checkpoint(folder, load_module_strict=False)
    loaded, trained = real.weights(base), real.weights(eng)
    for name in loaded:
        want = mine if name.startswith(("norm", "down")) else trained
        assert torch.equal(loaded[name], want[name]), name


def test_custom_load_fn(tmp_path: Path) -> None:
    """The function sees full weights by name and the gathered module; what it writes reaches masters and lasts."""
    ranks(_custom, 2, str(tmp_path))


def _custom(folder: str) -> None:
    eng = real.engine("fp32")
    real.train(eng, 0)
    saved = real.weights(eng)
    eng.save_checkpoint(folder)
    fresh = real.engine("fp32", seed=99)

    def halve(src: Any, dst: torch.nn.Module) -> None:
        assert set(src) == set(dst.state_dict())
        with torch.no_grad():
            for name, param in dst.named_parameters():
                assert src[name].shape == param.shape
                param.copy_(src[name] / 2)

    fresh.load_checkpoint(folder, custom_load_fn=halve, load_optimizer_states=False)
    for group in fresh.optimizer.param_groups:
        group["lr"] = 0.0
    real.train(fresh, 1)
    found = real.weights(fresh)
    assert all(torch.equal(found[name], saved[name] / 2) for name in saved)


def test_between_micro_steps(tmp_path: Path) -> None:
    """C11: a save in mid-accumulation holds the last step's weights; a load there starts a clean accumulation."""
    ranks(_mid_accumulation, 2, str(tmp_path))


def _mid_accumulation(folder: str) -> None:
    eng = real.engine(gradient_accumulation_steps=2)
    for step in (0, 1):
        loss = eng(*gm.batch(step, dist.get_rank()))
        eng.backward(loss)
        eng.step()
    whole = real.weights(eng)
    eng.save_checkpoint(folder, tag="clean")
    loss = eng(*gm.batch(2, dist.get_rank()))
    eng.backward(loss)
    eng.save_checkpoint(folder, tag="odd")
    eng.load_checkpoint(folder, tag="odd")
    real.same(whole, real.weights(eng))
    reference = real.engine(seed=98, gradient_accumulation_steps=2)
    reference.load_checkpoint(folder, tag="clean")
    for candidate in (eng, reference):
        for step in (3, 4):
            loss = candidate(*gm.batch(step, dist.get_rank()))
            candidate.backward(loss)
            candidate.set_gradient_accumulation_boundary(is_boundary=step == 4)
            candidate.step()
    real.same(real.weights(eng), real.weights(reference))


def test_save_inside_a_forward(tmp_path: Path) -> None:
    """C11: a save while units are gathered and prefetches are in flight holds the right shards."""
    ranks(_inside, 4, str(tmp_path))


def _inside(folder: str) -> None:
    eng = real.engine("bf16_groups", zero={**HPZ, "stage3_prefetch_bucket_size": 10**6})
    real.train(eng, 0, 1, 2)
    handle = eng.module.up.register_forward_hook(lambda *_: (eng.save_checkpoint(folder), None)[1])
    inside = eng(*gm.batch(3, dist.get_rank()))
    handle.remove()
    eng.backward(inside)
    eng.step()
    losses = [real.mean(inside), *real.train(eng, 4)]
    fresh = real.engine("bf16_groups", seed=99, zero=HPZ)
    fresh.load_checkpoint(folder)
    assert real.train(fresh, 3, 4) == losses


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Report 68: many saves and loads later the process is no larger than after the second."""
    ranks(_many, 1, str(tmp_path), timeout=120)


def _many(folder: str) -> None:
    eng = real.engine()
    sizes = []
    for round_ in range(20):
        eng.save_checkpoint(folder, tag=f"t{round_ % 2}")
        eng.save_16bit_model(folder)
        eng.load_checkpoint(folder)
        with open("/proc/self/statm") as statm:
            sizes.append(int(statm.read().split()[1]) * 4)
    assert sizes[-1] - sizes[2] < 2000, sizes
    assert len(list(Path("/proc/self/fd").iterdir())) < 60


# -- whole weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "zero"), [(2, PLAIN), (4, HPZ)], ids=["plain", "hpz"])
@pytest.mark.parametrize("variant", ["fp32", "bf16_groups"])
def test_consolidated(tmp_path: Path, variant: str, world: int, zero: dict[str, Any]) -> None:
    """Reports 16, 30, 32: gathered weights, the saved file and the converters agree exactly; tied names share."""
    ranks(_consolidated, world, str(tmp_path), variant, zero)
    gathered = torch.load(tmp_path / "gathered.pt", weights_only=True)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, tensor in gathered.items():
        assert torch.equal(state[name].to(tensor.dtype), tensor), name
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(gm.build(1, **gm.VARIANTS[variant]["model"]), tmp_path)
    for name, param in model.named_parameters(remove_duplicate=False):
        assert torch.equal(param.detach(), state[name].float()), name
    ranks(_loaded_in_place, 2, str(tmp_path), variant)


def _loaded_in_place(folder: str, variant: str) -> None:
    """Into a live engine's module: inside a block that gathers it; a named error outside, on every rank."""
    eng = real.engine(variant, zero=PLAIN)
    everything = list(eng.module.parameters())
    with pytest.raises(RuntimeError, match="partitioned by ZeRO-3 .*GatheredParameters"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(eng.module, folder)
    with deepspeed.zero.GatheredParameters(everything, modifier_rank=0):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(eng.module, folder)
    gathered = torch.load(Path(folder) / "gathered.pt", weights_only=True)
    for name, tensor in real.weights(eng).items():
        assert torch.equal(tensor, gathered[name]), name


def _consolidated(folder: str, variant: str, zero: dict[str, Any]) -> None:
    eng = real.engine(variant, zero=zero)
    real.train(eng, 0, 1)
    full = real.weights(eng)
    found = eng._zero3_consolidated_16bit_state_dict()
    assert eng.save_16bit_model(folder) is True
    assert eng.save_16bit_model(folder, "model.safetensors") is True
    eng.save_checkpoint(folder)
    if dist.get_rank() != 0:
        assert found is None
        return
    assert list(found) == list(gm.build(**gm.VARIANTS[variant]["model"]).state_dict())
    real.same(full, found)
    real.same(full, f"{folder}/pytorch_model.bin")
    assert found["scale"].dtype == torch.float32
    loaded = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
    if variant == "bf16_groups":
        assert found["head.weight"] is found["embed.weight"]
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    from safetensors.torch import load_file

    safe = load_file(f"{folder}/model.safetensors")
    real.same({name: tensor for name, tensor in full.items() if name in safe}, safe)
    assert set(full) - set(safe) == ({"head.weight"} if variant == "bf16_groups" else set())
    torch.save(full, f"{folder}/gathered.pt")


def test_without_the_gather_flag(tmp_path: Path) -> None:
    """Report 16: returns False and writes nothing; the consolidated dict is still there for who asks."""
    ranks(_no_flag, 2, str(tmp_path))
    assert not any(tmp_path.iterdir())


def _no_flag(folder: str) -> None:
    eng = real.engine(zero={"stage3_gather_16bit_weights_on_model_save": False})
    assert eng.save_16bit_model(folder) is False
    assert eng.zero_gather_16bit_weights_on_model_save() is False


def test_exclude_frozen_from_consolidated() -> None:
    ranks(_exclude_consolidated, 2)


def _exclude_consolidated() -> None:
    eng = real.engine("bf16_groups")
    found = eng._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if dist.get_rank() == 0:
        names = {"gain", "mix", "scale", "up.weight", "up.bias", "embed.weight", "head.weight"}
        assert set(found) == names


def test_signatures_that_clients_inspect() -> None:
    import inspect

    for method in (
        deepspeed.DeepSpeedEngine.save_checkpoint,
        deepspeed.DeepSpeedEngine._zero3_consolidated_16bit_state_dict,
    ):
        assert "exclude_frozen_parameters" in inspect.signature(method).parameters


def _mid_window(folder: str) -> list[Any]:
    """Losses after a load in the middle of an accumulation window, and after the same load at its end."""
    found = []
    for extra in (1, 0):
        eng = real.engine("fp32", seed=99, zero=HPZ, gradient_accumulation_steps=2)
        if not found:
            eng.save_checkpoint(folder)
        for step in range(50, 52 + extra):
            _micro(eng, step)
        eng.load_checkpoint(folder)
        found.append([eng.global_steps, *[_micro(eng, step) for step in range(8)], eng.global_steps])
    return found


def _micro(eng: Any, step: int) -> float:
    loss = eng(*gm.batch(step, dist.get_rank()))
    eng.backward(loss)
    eng.step()
    return float(loss.detach())


def test_a_load_begins_a_new_accumulation_window(tmp_path: Path) -> None:
    for middle, end in ranks(_mid_window, 2, str(tmp_path)):
        assert middle == end
        assert middle[-1] == middle[0] + 4
