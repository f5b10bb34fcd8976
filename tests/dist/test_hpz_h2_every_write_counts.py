# SPDX-License-Identifier: Apache-2.0
"""Promise H2: whatever writes weights counts as a write.

Four ranks, two a group. Before each event every secondary shard is valid and in use; after it a forward and a backward
give the loss and every gradient of a plain model that was changed in the same way (deepspeedai/DeepSpeed#4851, #7164,
#7606, PR 7130, cases 1 to 3, 21).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from tests.dist.twin import Twin
from tests.harness import models
from tests.harness.pool import run_ranks

GatheredParameters = deepspeed.zero.GatheredParameters


def change(name: str, tensor: Tensor) -> None:
    """A change that depends on the element, and so on the shard."""
    tensor.mul_(0.5).add_(torch.linspace(-0.3, 0.4, tensor.numel()).view(tensor.shape))


def optimizer_step(twin: Twin) -> None:
    twin.check("nothing")
    twin.step()


def partition_updated(twin: Twin) -> None:
    params = list(twin.named.values())
    params[0].all_gather(params)
    with torch.no_grad():
        for name, param in twin.named.items():
            change(name, param)
    params[0].partition(params, has_been_updated=True)
    twin.plain_write(change)


def modifier_rank(rank: int) -> Callable[[Twin], None]:
    def event(twin: Twin) -> None:
        with GatheredParameters(twin.engine.module.parameters(), modifier_rank=rank), torch.no_grad():
            if twin.rank == rank:
                for name, param in twin.named.items():
                    change(name, param)
        twin.plain_write(change)

    return event


def replaced_data(twin: Twin) -> None:
    """`param.data = new` instead of an edit in place."""
    with GatheredParameters(list(twin.named.values()), modifier_rank=1):
        for name, param in twin.named.items():
            new = param.detach().clone()
            change(name, new)
            param.data = new
    twin.plain_write(change)


def load_state_dict(twin: Twin) -> None:
    twin.plain_write(change)
    state = {name: value.clone() for name, value in twin.plain.state_dict().items()}
    with GatheredParameters(list(twin.named.values()), modifier_rank=0):
        if twin.rank == 0:
            twin.engine.module.load_state_dict(state)


def load_module_by_module(twin: Twin) -> None:
    """As `from_pretrained` and Lightning do it: each module's own parameters, rank 0 copies."""
    twin.plain_write(change)
    state = twin.plain.state_dict()
    for prefix, module in twin.engine.module.named_modules():
        with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0), torch.no_grad():
            if twin.rank == 0:
                for name, param in module.named_parameters(recurse=False):
                    param.copy_(state[f"{prefix}.{name}" if prefix else name])


def reinitialised(twin: Twin) -> None:
    module = twin.engine.module.up
    with GatheredParameters(module.parameters(), modifier_rank=2):
        torch.manual_seed(twin.rank)
        module.reset_parameters()
    torch.manual_seed(2)
    twin.plain.up.reset_parameters()


def lora_merged(twin: Twin) -> None:
    delta = torch.linspace(-1, 1, 33)[:, None] @ torch.linspace(0, 1, 16)[None]
    with GatheredParameters([twin.engine.module.up.weight], modifier_rank=0):
        twin.engine.module.up.weight.data += delta
    twin.plain.up.weight.data += delta


def lora_merged_and_unmerged(twin: Twin) -> None:
    lora_merged(twin)
    twin.check("merging")
    twin.forget_gradients()
    delta = torch.linspace(-1, 1, 33)[:, None] @ torch.linspace(0, 1, 16)[None]
    with GatheredParameters([twin.engine.module.up.weight], modifier_rank=0):
        twin.engine.module.up.weight.data -= delta
    twin.plain.up.weight.data -= delta


def ema_swapped_in_and_out(twin: Twin) -> None:
    kept = {name: param.detach().clone() for name, param in twin.plain.named_parameters()}
    modifier_rank(0)(twin)
    twin.evaluate()
    with GatheredParameters(list(twin.named.values()), modifier_rank=3):
        for name, param in twin.named.items():
            param.data.copy_(kept[name] * 0.9)
    twin.plain_write(lambda name, param: param.copy_(kept[name] * 0.9))


def set_full(twin: Twin) -> None:
    twin.plain_write(change)
    wanted = dict(twin.plain.named_parameters())
    for name, param in twin.named.items():
        safe_set_full_fp32_param(param, wanted[name].detach())
        got = safe_get_full_fp32_param(param)
        assert got is not None and torch.equal(got, wanted[name])


def set_local(twin: Twin) -> None:
    for param in twin.named.values():
        shard = safe_get_local_fp32_param(param)
        assert shard is not None
        safe_set_local_fp32_param(param, shard * 0.75)
    twin.plain_write(lambda _, param: param.mul_(0.75))


def states_away_and_back(twin: Twin) -> None:
    twin.engine.offload_states()
    twin.engine.reload_states()


def states_away_written_and_back(twin: Twin) -> None:
    """Weights change between two offloads: a copy from before the first must not come back."""
    twin.engine.offload_states()
    twin.engine.reload_states()
    modifier_rank(1)(twin)
    twin.evaluate()
    twin.engine.offload_states()
    twin.engine.reload_states()


def optimizer_state_loaded(twin: Twin) -> None:
    saved = twin.engine.optimizer.state_dict()
    state = {**saved, "fp32_flat_groups": [flat.clone() for flat in saved["fp32_flat_groups"]]}
    before = {name: param.detach().clone() for name, param in twin.plain.named_parameters()}
    modifier_rank(0)(twin)
    twin.evaluate()
    twin.engine.optimizer.load_state_dict(state)
    twin.plain_write(lambda name, param: param.copy_(before[name]))


def checkpoint_loaded(**flags: Any) -> Callable[[Twin], None]:
    def event(twin: Twin) -> None:
        folder = [tempfile.mkdtemp(prefix="hpz-") if twin.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        before = {name: param.detach().clone() for name, param in twin.plain.named_parameters()}
        twin.engine.save_checkpoint(folder[0], tag="a")
        modifier_rank(0)(twin)
        twin.evaluate()
        path, _ = twin.engine.load_checkpoint(folder[0], tag="a", **flags)
        assert path is not None
        twin.plain_write(lambda name, param: param.copy_(before[name]))
        dist.barrier()
        if twin.rank == 0:
            shutil.rmtree(Path(folder[0]))

    return event


def only_forgotten(twin: Twin) -> None:
    twin.engine.optimizer.invalidate_secondary_tensor()
    assert all(shard is None for shard in twin.secondaries())


EVENTS: dict[str, Callable[[Twin], None]] = {
    "optimizer step": optimizer_step,
    "partition(has_been_updated=True)": partition_updated,
    "modifier rank 0": modifier_rank(0),
    "modifier rank 3": modifier_rank(3),
    "replaced data": replaced_data,
    "load_state_dict": load_state_dict,
    "load module by module": load_module_by_module,
    "re-initialisation": reinitialised,
    "LoRA merge": lora_merged,
    "LoRA merge and unmerge": lora_merged_and_unmerged,
    "EMA swap": ema_swapped_in_and_out,
    "safe_set_full_fp32_param": set_full,
    "safe_set_local_fp32_param": set_local,
    "offload and reload": states_away_and_back,
    "offload, write, reload": states_away_written_and_back,
    "optimizer.load_state_dict": optimizer_state_loaded,
    "load_checkpoint": checkpoint_loaded(),
    "load_checkpoint without optimizer states": checkpoint_loaded(load_optimizer_states=False),
    "load_checkpoint, module only": checkpoint_loaded(load_module_only=True),
    "invalidate_secondary_tensor": only_forgotten,
}


def run_events(names: list[str], threshold: int) -> None:
    """Each event on a twin of its own: twice, once on a valid cache and once after a step."""
    twin = Twin(models.uneven, hpz=2, zero={"stage3_param_persistence_threshold": threshold})
    for name in names:
        for _ in range(2):
            twin.evaluate()
            assert all(shard is not None for shard in twin.secondaries()), f"before {name}"
            EVENTS[name](twin)
            twin.check(name)
            twin.weights_match()
            twin.step()
    twin.engine.destroy()


def save_changed(folder: str) -> dict[str, Tensor]:
    """Weights written through a gather after the last step, saved before the next (V2)."""
    twin = Twin(models.uneven, hpz=1)
    twin.check("start")
    twin.step()
    modifier_rank(1)(twin)
    twin.engine.save_checkpoint(folder, tag="a")
    return {name: param.detach().clone() for name, param in twin.plain.named_parameters()}


def load_elsewhere(folder: str, saved: dict[str, Tensor], flags: dict[str, Any], config: dict[str, Any]) -> None:
    twin = Twin(models.uneven, hpz=2, **config)
    twin.check("start")
    twin.step()
    twin.evaluate()
    assert all(shard is not None for shard in twin.secondaries())
    path, _ = twin.engine.load_checkpoint(folder, **flags)
    assert path is not None
    twin.plain_write(lambda name, param: param.copy_(saved[name]))
    twin.check("loading what another world wrote")
    twin.step()
    twin.check("a step after it")


def test_checkpoint_of_another_world(tmp_path: Path) -> None:
    """Saved by 2 ranks without hpZ, loaded by 4 with it: as it is, and after conversion to the universal layout."""
    (saved, _) = run_ranks(save_changed, 2, str(tmp_path / "plain"))
    for flags in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
        run_ranks(load_elsewhere, 4, str(tmp_path / "plain"), saved, flags, {})
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", str(tmp_path / "plain" / "a"), "--output_folder", str(tmp_path / "universal" / "a")]
    subprocess.run([*command, *folders], check=True, capture_output=True, timeout=120)
    run_ranks(
        load_elsewhere, 4, str(tmp_path / "universal"), saved, {"tag": "a"}, {"checkpoint": {"load_universal": True}}
    )


def frozen_written() -> None:
    """Frozen weights are cached for good, so a write to them is where a stale copy would stay longest."""
    twin = Twin(models.frozen, hpz=2)
    frozen = [name for name, param in twin.plain.named_parameters() if not param.requires_grad]
    for rank in (0, 2):
        twin.check("start")
        twin.step()
        twin.evaluate()
        assert all(shard is not None for shard in twin.secondaries())
        with GatheredParameters([twin.named[name] for name in frozen], modifier_rank=rank), torch.no_grad():
            if twin.rank == rank:
                for name in frozen:
                    change(name, twin.named[name])
        twin.plain_write(change, frozen)
        twin.check("frozen weights written")
        twin.step()
        twin.weights_match()


def test_frozen_weights_are_written() -> None:
    run_ranks(frozen_written, 4)


@pytest.mark.parametrize("threshold", [0, 40])
@pytest.mark.parametrize("part", range(3))
def test_every_event(part: int, threshold: int) -> None:
    """Without persistent parameters, and with some."""
    run_ranks(run_events, 4, list(EVENTS)[part::3], threshold, timeout=120)
