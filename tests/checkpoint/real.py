# SPDX-License-Identifier: Apache-2.0
"""The real engine on the golden model, for tests that are about training after a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch loads it at the first optimizer step; here, so that forked ranks find it loaded
import torch.distributed as dist

import deepspeed
import deepspeed.api  # here, so that forked ranks find it loaded
from tests.checkpoint import golden_model as gm


def engine(variant: str = "fp32", *, seed: int = 7, zero: dict[str, Any] | None = None, **top: Any) -> Any:
    """An engine of a variant of the golden model; `zero` and `top` are merged into its configuration."""
    spec, config = gm.VARIANTS[variant], gm.config(variant)
    config["zero_optimization"].update(zero or {})
    config.update(top)
    config.setdefault("checkpoint", {"wait_timeout": 20})
    model = gm.build(seed, **spec["model"])
    trained = gm.param_groups(model, 0.01) if spec["groups"] else [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def serving(variant: str = "fp32", *, seed: int = 7, zero: dict[str, Any] | None = None) -> Any:
    """An engine without an optimizer."""
    config = gm.config(variant)
    config["zero_optimization"].update(zero or {})
    for key in ("optimizer", "scheduler"):
        config.pop(key, None)
    model = gm.build(seed, **gm.VARIANTS[variant]["model"])
    return deepspeed.initialize(model=model, config=config)[0]


def mean(loss: torch.Tensor) -> float:
    """Loss averaged over the ranks."""
    value = loss.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(eng: Any, *steps: int) -> list[float]:
    """One optimizer step on each of these batches; the mean losses."""
    losses = []
    for step in steps:
        eng.train()
        loss = eng(*gm.batch(step, dist.get_rank()))
        eng.backward(loss)
        eng.step()
        losses.append(mean(loss))
    return losses


def train_global(eng: Any, *steps: int) -> list[float]:
    """As `train`, on a global batch of four micro-batches whatever the world size (1, 2 or 4)."""
    losses = []
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in steps:
        total = 0.0
        for micro in range(4 // world):
            loss = eng(*gm.batch(step, rank + micro * world))
            eng.backward(loss)
            eng.step()
            total += mean(loss)
        losses.append(total / (4 // world))
    return losses


def evaluate(eng: Any) -> float:
    """Mean loss on a fixed batch, without gradients."""
    eng.eval()
    with torch.no_grad():
        return mean(eng(*gm.batch(999, dist.get_rank())))


def weights(eng: Any) -> dict[str, torch.Tensor]:
    """Every parameter gathered, by name."""
    found = {}
    for name, param in eng.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters(param):
            found[name] = param.detach().clone()
    return found


@contextmanager
def gathered(eng: Any, name: str) -> Iterator[torch.nn.Parameter]:
    """One parameter gathered for writing from rank 0."""
    param = dict(eng.module.named_parameters())[name]
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        yield param


def same(ours: dict[str, torch.Tensor], path_or_dict: Any) -> None:
    """Exact equality of two sets of full weights."""
    other = path_or_dict
    if isinstance(other, (str, Path)):
        other = torch.load(other, weights_only=True)
    for name, tensor in ours.items():
        assert torch.equal(tensor.cpu(), other[name].to(tensor.dtype)), name
