# SPDX-License-Identifier: Apache-2.0
"""Call patterns of clients that are not installed here, written out by hand from the public surface they rely on."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import models, reference, run_ranks

WORLD = 4


def _config(hpz: int = 2, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **extra,
    }


def _step(engine: Any, step: int) -> float:
    loss = engine(*models.batch(step, engine.global_rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


# ---------------------------------------- hooks taken off for generation, then put back


def _offload_of(engine: Any) -> Any:
    optimizer = engine.optimizer
    return optimizer.parameter_offload if hasattr(optimizer, "parameter_offload") else optimizer


@contextlib.contextmanager
def _without_hooks(engine: Any) -> Iterator[nn.Module]:
    offload = _offload_of(engine)
    with _gathered(engine.module):
        module = offload.module
        for _, param in itertools.chain(module.named_parameters(), module.ds_external_parameters()):
            param.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        try:
            yield engine.module
        finally:
            coordinator = offload.param_coordinator
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()
            offload._register_deepspeed_module(offload.module)


def _gathered(module: nn.Module) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(module.parameters())


def rollouts(hpz: int, trained: bool) -> dict[str, Any]:
    """Runs on every rank: losses, and what the plain module computes between the steps with all hooks off."""
    import deepspeed

    model = models.blocks()
    kwargs: dict[str, Any] = {}
    if trained:
        kwargs["optimizer"] = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, config=_config(hpz), **kwargs)[0]
    losses, between, usual = [], [], []
    for step in range(4):
        if trained:
            losses.append(_step(engine, step))
        with _without_hooks(engine) as module, torch.no_grad():
            between.append([module(*models.batch(50 + i, engine.global_rank)).item() for i in range(2)])
        with torch.no_grad():
            usual.append([engine(*models.batch(50 + i, engine.global_rank)).item() for i in range(2)])
    engine.destroy()
    return {"losses": losses, "between": between, "usual": usual}


@pytest.mark.parametrize(("hpz", "trained"), [(1, True), (2, True), (2, False)])
def test_hooks_can_be_taken_off_and_put_back(hpz: int, trained: bool) -> None:
    want = reference.train(models.blocks, models.batch, 4, WORLD)
    for rank, got in enumerate(run_ranks(rollouts, WORLD, hpz, trained)):
        if trained:
            assert got["losses"] == pytest.approx([losses[rank] for losses in want.losses], abs=1e-5)
        for bare, hooked in zip(got["between"], got["usual"], strict=True):
            assert bare == pytest.approx(hooked, abs=1e-6)


# ---------------------------------------- RLHF trainer: groups, callable scheduler, sleep


def sleeper() -> dict[str, Any]:
    """Runs on every rank: state moved away and back between steps, called on the optimizer and on the engine."""
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    model = models.blocks()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args={"local_rank": 0},
        model=model,
        model_parameters=[
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ],
        optimizer=None,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step),
        config=_config(optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, bf16={"enabled": False}),
        dist_init_required=True,
    )
    losses, rates = [], []
    for step in range(3):
        losses.append(_step(engine, step))
        rates.append(scheduler.get_last_lr())
        engine.optimizer.offload_states(
            include=[
                OffloadStateTypeEnum.optim_states,
                OffloadStateTypeEnum.contiguous_grad_buffer,
                OffloadStateTypeEnum.hp_params,
            ],
            device=OffloadDeviceEnum.cpu,
            pin_memory=False,
            non_blocking=False,
        )
        engine.optimizer.empty_partition_cache()
        engine.reload_states(non_blocking=False)
        engine.offload_states()
        engine.reload_states()
    result = {
        "losses": losses,
        "rates": rates,
        "loader": loader,
        "groups": [group["weight_decay"] for group in optimizer.param_groups],
        "device": engine.config["zero_optimization"]["stage"],
        "norm": float(engine.get_global_grad_norm() or 0.0),
    }
    engine.destroy()
    return result


def test_group_dicts_callable_scheduler_and_sleep() -> None:
    for rank, got in enumerate(run_ranks(sleeper, WORLD)):
        model = models.blocks()
        decayed = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(3):
            optimizer.zero_grad()
            losses = [model(*models.batch(step, r)) for r in range(WORLD)]
            torch.stack(losses).mean().backward()
            optimizer.step()
            schedule.step()
            assert got["losses"][step] == pytest.approx(losses[rank].item(), abs=1e-5)
            assert got["rates"][step] == pytest.approx(schedule.get_last_lr())
        assert got["groups"] == [0.1, 0.0] and got["loader"] is None and got["norm"] > 0


# ---------------------------------------- Lightning's strategy


def strategy(folder: str) -> dict[str, Any]:
    """Runs on every rank."""
    import deepspeed
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    deepspeed.init_distributed("gloo", distributed_port=29501)
    deepspeed.checkpointing.configure(
        mpu_=None, partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=False, profile=False
    )
    with deepspeed.zero.Init(enabled=True, remote_device=None, config_dict_or_path=_config(), dtype=torch.float32):
        model = models.blocks()
    weights = models.blocks().state_dict()
    for prefix, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                for name, param in module.named_parameters(recurse=False):
                    param.data.copy_(weights[f"{prefix}.{name}" if prefix else name])
    engine, optimizer, _, _ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        config=_config(),
        model=model,
        model_parameters=filter(lambda param: param.requires_grad, model.parameters()),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        lr_scheduler=None,
        dist_init_required=False,
    )
    engine.lr_scheduler = None
    losses = [_step(engine, step) for step in range(2)]
    saved = engine.save_checkpoint(folder, client_state={"epoch": 3, "hparams": {"a": 1}}, tag="checkpoint")
    _, client = engine.load_checkpoint(folder, tag="checkpoint")
    assert client is not None
    losses += [_step(engine, step) for step in range(2, 4)]
    full = get_fp32_state_dict_from_zero_checkpoint(folder, "checkpoint") if engine.global_rank == 0 else {}
    stage = 3
    if engine.global_rank == 0:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum]):
            shard = torch.load(get_optim_files(f"{folder}/checkpoint")[0], weights_only=True)
        stage = shard["optimizer_state_dict"]["zero_stage"]
    result = {
        "losses": losses,
        "saved": saved,
        "client": {key: client[key] for key in ("epoch", "hparams")},
        "kind": isinstance(optimizer, DeepSpeedOptimizer),
        "full": {name: tuple(tensor.shape) for name, tensor in full.items()},
        "stage": int(stage),
        "model_file": Path(get_model_state_file(f"{folder}/checkpoint", 3)).exists(),
    }
    engine.destroy()
    return result


def test_strategy(tmp_path: Path) -> None:
    want = reference.train(models.blocks, models.batch, 4, WORLD)
    for rank, got in enumerate(run_ranks(strategy, WORLD, str(tmp_path))):
        assert got["losses"] == pytest.approx([losses[rank] for losses in want.losses], abs=1e-5)
        assert got["saved"] and got["client"] == {"epoch": 3, "hparams": {"a": 1}} and got["kind"]
        assert got["model_file"] and got["stage"] == 3
        if rank == 0:
            assert got["full"] == {name: tuple(tensor.shape) for name, tensor in want.params.items()}


def test_signatures_that_clients_inspect() -> None:
    from deepspeed import DeepSpeedEngine

    for name in ("save_checkpoint", "_zero3_consolidated_16bit_state_dict"):
        assert "exclude_frozen_parameters" in inspect.signature(getattr(DeepSpeedEngine, name)).parameters
    assert "is_boundary" in inspect.signature(DeepSpeedEngine.set_gradient_accumulation_boundary).parameters
    assert "scale_wrt_gas" in inspect.signature(DeepSpeedEngine.backward).parameters
