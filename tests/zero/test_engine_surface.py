# SPDX-License-Identifier: Apache-2.0
"""Promise: the engine, its optimizer and its scheduler have the methods and attributes that clients use."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from tests.dist.support import Heard, full_params, initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks


def engine_names() -> None:
    config = settings(accum=2, clip=0.5, hpz=2)
    engine = initialize(models.uneven(), config, reference.adam)
    world, rank = dist.get_world_size(), dist.get_rank()
    assert isinstance(engine, nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.config == config and engine.config.get("zero_optimization")["stage"] == 3
    assert all(key.startswith("module.") for key in engine.state_dict())
    assert engine.up is engine.module.up, "unknown attributes are the module's"
    with pytest.raises(AttributeError):
        _ = engine.nothing_of_this_name
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4 * world, 2)
    assert engine.gradient_accumulation_steps() == 2 and engine.get_batch_info() == (4 * world, 2, 2)
    assert engine.device == torch.device("cpu") and engine.local_rank == engine.global_rank == rank
    assert engine.world_size == engine.dp_world_size == world
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save()
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.is_compiled is False
    assert engine.get_global_grad_norm() is None and engine.was_step_applied() is False
    assert engine.get_lr() == [0.01] and engine.get_mom() == [(0.9, 0.999)] and engine.get_type() == [None]
    assert engine.global_steps == engine.micro_steps == engine.skipped_steps == engine.global_samples == 0
    for method, keyword in (
        ("save_checkpoint", "exclude_frozen_parameters"),
        ("_zero3_consolidated_16bit_state_dict", "exclude_frozen_parameters"),
        ("backward", "scale_wrt_gas"),
        ("load_checkpoint", "load_module_only"),
    ):
        assert keyword in inspect.signature(getattr(engine, method)).parameters
    assert engine.train() is engine and engine.training and engine.eval() is engine and not engine.module.training
    engine.train()
    boundaries = []
    for micro in range(4):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        loss = engine(*models.batch(0, rank, micro))
        returned = engine.backward(loss)
        assert returned.item() == pytest.approx(loss.item() / 2)
        engine.zero_grad()  # what clients call after every backward of a window must not lose it
        engine.step()
    assert boundaries == [False, True, False, True]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 8 * world)
    assert engine.was_step_applied() is True
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, torch.Tensor) and norm.dim() == 0 and norm.dtype == torch.float64 and norm.item() > 0
    engine.global_steps = 7
    assert engine.global_steps == 7
    engine.set_train_batch_size(2 * world)
    assert engine.gradient_accumulation_steps() == 1
    engine.set_gradient_accumulation_boundary(False)
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(None)
    assert engine.is_gradient_accumulation_boundary()
    assert engine.scale(torch.ones(())).item() == 1.0
    with engine.coalesce_grad_reduction(), engine.no_sync():
        pass
    engine.lr_scheduler = None
    train(engine, models.batch, range(1))


def optimizer_names() -> None:
    engine = initialize(models.frozen(), settings(), reference.adamw)
    optimizer = engine.optimizer
    assert isinstance(optimizer, DeepSpeedOptimizer) and not isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    assert type(optimizer.optimizer) is torch.optim.AdamW and optimizer.overflow is False
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.defaults["weight_decay"] == 0.1
    for flat in optimizer.fp32_partitioned_groups_flat:
        assert flat.dim() == 1 and flat.dtype == torch.float32
    live = [p for p in engine.module.parameters() if p.requires_grad]
    assert [p for group in optimizer.fp16_groups for p in group] == live
    assert all(
        s is p.ds_tensor
        for group, ps in zip(optimizer.fp16_partitioned_groups, optimizer.fp16_groups, strict=True)
        for s, p in zip(group, ps, strict=True)
    )
    assert optimizer.cur_scale == optimizer.loss_scale == 1.0 and optimizer.dtype == torch.float32
    assert optimizer.persistent_parameters == [] and optimizer.get_lr() == 0.01
    optimizer.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    with pytest.raises(AttributeError):
        _ = optimizer.nothing_of_this_name
    train(engine, models.batch, range(1))
    assert optimizer.state and "exp_avg" in next(iter(optimizer.state.values()))
    assert sum(g.numel() for group in optimizer.averaged_gradients.values() for g in group) > 0
    state = optimizer.state_dict()
    losses = train(engine, models.batch, range(1, 2))[0]
    del state, losses
    optimizer.refresh_fp32_params()
    optimizer.checkpoint_event_prologue()
    optimizer.checkpoint_event_epilogue()
    optimizer.empty_partition_cache()
    assert all(p.numel() == 0 for p in engine.module.parameters())


def returned_tuple() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.int64))
    config = settings(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 0}}
    model = models.uneven()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args={"local_rank": dist.get_rank()},
        model=model,
        model_parameters=(p for p in model.parameters()),
        training_data=data,
        config_params=config,
    )
    assert engine.optimizer is optimizer and engine.lr_scheduler is scheduler and engine.training_dataloader is loader
    for tokens, targets in loader:
        assert tokens.shape == (2, 5)
        engine.backward(engine(tokens, targets))
        engine.step()
    assert engine.global_steps == len(loader)
    assert scheduler.last_batch_iteration == len(loader) - 1
    for keywords in ({"config": settings()}, {"config": settings(), "optimizer": None, "model_parameters": []}):
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=models.uneven(), **keywords)
        assert isinstance(optimizer, deepspeed.zero.DeepSpeedZeRoOffload) and loader is None and scheduler is None
    with pytest.raises((AssertionError, RuntimeError)):
        deepspeed.initialize(model=None, config=settings())
    groups = [{"params": [model2.up.weight], "lr": 0.3} for model2 in [models.uneven()]]
    with pytest.raises(RuntimeError, match="no parameter of the"):
        deepspeed.initialize(model=models.uneven(), model_parameters=groups, config=config)


def groups_with_an_empty_one() -> tuple[list[float], list[list[float]], int]:
    """Case 13: LoRA gives an empty no-decay group; groups, rates and schedules stay aligned."""
    model = models.uneven()
    decay, rest = list(model.up.parameters()), [p for n, p in model.named_parameters() if not n.startswith("up")]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "lr": 0.02}, {"params": [], "lr": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0, lambda s: 0.5, lambda s: 0.1**s])
    engine, _, _, returned = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings()
    )
    assert returned is scheduler
    rates = []
    losses = []
    for step in range(3):
        losses += train(engine, models.batch, [step])[0]
        rates.append(engine.get_lr())
    assert len(engine.optimizer.param_groups) == len(scheduler.base_lrs) == 3
    return losses, rates, len(engine.optimizer.optimizer.param_groups)


def grouped_reference() -> list[list[float]]:
    model = models.uneven()
    decay, rest = list(model.up.parameters()), [p for n, p in model.named_parameters() if not n.startswith("up")]
    optimizer = torch.optim.AdamW([{"params": decay, "lr": 0.02}, {"params": rest, "weight_decay": 0.0}], lr=0.01)
    losses = []
    for step in range(3):
        optimizer.param_groups[1]["lr"] = 0.01 * 0.1**step
        optimizer.zero_grad()
        both = [model(*models.batch(step, rank)) for rank in range(2)]
        (sum(both) / 2).backward()
        optimizer.step()
        losses.append([loss.item() for loss in both])
    return losses


def frozen_later() -> dict[str, torch.Tensor]:
    """A parameter frozen after initialize gets a zero gradient; one left out of the optimizer stays as it is."""
    model = models.uneven()
    given = [p for name, p in model.named_parameters() if name != "down.weight"]
    engine = deepspeed.initialize(model=model, optimizer=reference.sgd(given), config=settings())[0]
    before = full_params(engine.module)
    train(engine, models.batch, range(1))
    engine.module.up.weight.requires_grad_(False)
    middle = full_params(engine.module)
    train(engine, models.batch, range(1, 3))
    after = full_params(engine.module)
    assert torch.equal(before["down.weight"], after["down.weight"])
    assert not torch.equal(before["up.weight"], middle["up.weight"])
    assert torch.equal(middle["up.weight"], after["up.weight"])
    assert not torch.equal(middle["head.weight"], after["head.weight"])
    grads = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
    assert set(grads) == {"down.weight"}, "left to the user, in full"
    engine.zero_grad()
    assert all(p.grad is None for p in engine.module.parameters())
    engine.module.up.weight.requires_grad_(True)
    train(engine, models.batch, range(3, 4))
    assert not torch.equal(after["up.weight"], full_params(engine.module)["up.weight"])
    return after


def unfrozen_later() -> None:
    """Said once, by name: a parameter that was frozen at initialize has no master and is not trained."""
    engine = initialize(models.frozen(), settings(), reference.sgd)
    before = full_params(engine.module)
    with Heard() as heard:
        train(engine, models.batch, range(1))
        assert not any("not trained" in text for text in heard.texts)
        engine.module.layers[0].requires_grad_(True)
        train(engine, models.batch, range(1, 3))
    said = [text for text in heard.texts if "not trained" in text]
    assert len(said) == 1 and "layers.0." in said[0] and "initialize" in said[0]
    after = full_params(engine.module)
    assert torch.equal(before["layers.0.up.weight"], after["layers.0.up.weight"])
    assert not torch.equal(before["layers.1.up.weight"], after["layers.1.up.weight"])


WORK = [engine_names, optimizer_names, returned_tuple, frozen_later, unfrozen_later]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_names(work: Any) -> None:
    run_ranks(work, 2)


def test_an_empty_group_keeps_its_place() -> None:
    wanted = grouped_reference()
    for rank, (losses, rates, groups) in enumerate(run_ranks(groups_with_an_empty_one, 2)):
        assert losses == pytest.approx([step[rank] for step in wanted], rel=1e-6)
        assert groups == 3
        assert rates == [pytest.approx([0.02, 0.25, 0.01 * 0.1 ** (step + 1)]) for step in range(3)]
