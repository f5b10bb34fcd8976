# SPDX-License-Identifier: Apache-2.0
"""Promise: a parameter that no rank used in a whole step is left alone, as plain torch leaves one whose ``grad`` is None.

Neither weight decay nor moments nor step counts touch it, with every optimizer that is accepted; when it is used again,
its bias correction goes on where its own count stands. One that a single rank used is stepped on all.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.universal import convert
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime.zero.core import wire
from deepspeed.runtime.zero.core.scaling import idle_everywhere, packed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
    set_z3_leaf_modules,
)
from tests.dist.support import assert_tensors, full_params, settings
from tests.harness.faults import watch
from tests.harness.pool import run_ranks

# Which experts the ranks use: by step, micro-batch and rank (of 3). Expert 0 pauses, 1 is one rank's, 2 begins late,
# 3 is never used.
SCHEDULE = [
    [["0", "01"], ["", "1"], ["0", ""]],
    [["", ""], ["", "1"], ["", ""]],
    [["1", ""], ["2", ""], ["", "2"]],
    [["0", "0"], ["0", "2"], ["", "0"]],
    [["", ""], ["", ""], ["", ""]],
    [["12", "0"], ["", ""], ["1", "2"]],
]
STEPS = 20


class Experts(nn.ModuleList):
    def forward(self, x: torch.Tensor, chosen: str) -> torch.Tensor:
        for index in chosen:
            x = x + self[int(index)](x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 7)
        self.experts = Experts(
            nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 7)) for width in (5, 1, 11, 2)
        )
        self.outer = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor, chosen: str) -> torch.Tensor:
        return self.outer(self.experts(torch.tanh(self.inner(x)), chosen)).pow(2).mean()


def build() -> Model:
    torch.manual_seed(5)
    return Model()


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.9, dampening=0.4),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.9, dampening=0.4, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, weight_decay=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, weight_decay=0.1, t0=2),
    "Lion": lambda p: FusedLion(p, lr=1e-2, weight_decay=0.1),
}


def plain(name: str, world: int) -> dict[str, torch.Tensor]:
    """Weights after each step of one process that holds all the data."""
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        use = SCHEDULE[step % len(SCHEDULE)]
        for rank in range(world):
            for micro in range(2):
                (model(batch(step, micro, rank), use[rank][micro]) / (2 * world)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {key: p.detach() for key, p in model.named_parameters()}


def start(optimizer: Any, **top: Any) -> Any:
    model = build()
    set_z3_leaf_modules(model, [Experts])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings(accum=2, **top))[0]


def train(engine: Any, steps: range) -> None:
    rank = dist.get_rank()
    for step in steps:
        for micro in range(2):
            x = batch(step, micro, rank).to(next(iter(engine.module.parameters())).dtype)
            engine.backward(engine(x, SCHEDULE[step % len(SCHEDULE)][rank][micro]))
            engine.step()


def every_optimizer(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        engine = start(OPTIMIZERS[name])
        train(engine, range(STEPS))
        found[name] = full_params(engine.module)
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_optimizer_is_torch_s(world: int) -> None:
    """To the last bit in one process; the sums of several ranks and the ends of fused kernels round otherwise."""
    found = run_ranks(every_optimizer, world, list(OPTIMIZERS), timeout=200)
    for name in OPTIMIZERS:
        fused = name.startswith("fused")
        wanted = plain("SGD, momentum" if name == "fused SGD" else name, world)
        for ours in found:
            exact = world == 1 and not fused
            assert_tensors(ours[name], wanted, *((0, 0) if exact else (1e-6, 3e-7)))
            assert torch.equal(ours[name]["experts.3.0.weight"], build().experts[3][0].weight), "never used"


# -- every way that a step is run

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, split masters": {"bf16": {"enabled": True}, "zero": {"split_master_weights": True}},
    "bf16, offloaded": {"bf16": {"enabled": True}, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}},
    "hpZ": {"zero": {"zero_hpz_partition_size": 1}},
    "small sub-groups": {"zero": {"sub_group_size": 40}},
}
"""fp16 begins with a loss scale that overflows, so the first steps are skipped."""


def snapshot(engine: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Master weights and moments of the parameters below ``prefix``, in full."""
    found = {}
    for name, param in engine.module.named_parameters():
        if name.startswith(prefix):
            found[name] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq") if engine.global_steps else ():
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
    return found


def left_alone(ways: dict[str, dict[str, Any]], fused: bool) -> None:
    for way, top in ways.items():
        engine = start(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=fused), **top)
        never = snapshot(engine, "experts.3")
        train(engine, range(24))  # ends before a step that uses expert 0
        assert engine.skipped_steps < 20, way
        train(engine, range(24, 25))
        paused, stepped = snapshot(engine, "experts.0"), snapshot(engine, "experts.1")
        train(engine, range(25, 26))
        assert engine.was_step_applied(), way
        after = snapshot(engine, "experts.3")
        assert_tensors({key: after[key] for key in never}, never, 0, 0)
        assert all(not value.any() for key, value in after.items() if key not in never), f"{way}: moments of the unused"
        if dist.get_world_size() == 2:  # in step 25 only expert 1 is used, and by rank 1 alone
            assert_tensors(snapshot(engine, "experts.0"), paused, 0, 0)
            now = snapshot(engine, "experts.1")
            assert all(not torch.equal(now[key], stepped[key]) for key in stepped), way
        engine.destroy()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own"])
def test_left_alone_in_every_precision(fused: bool) -> None:
    ways = {way: top for way, top in WAYS.items() if fused or "split" not in way}
    run_ranks(left_alone, 2, ways, fused, timeout=120)


def given_gradient() -> None:
    engine = start(OPTIMIZERS["AdamW"])
    expert = engine.module.experts[3][0].weight
    for micro in range(2):
        engine.backward(engine(batch(0, micro, 0), "0"))
        if micro:
            safe_set_full_grad(expert, torch.ones(expert.ds_shape))
        engine.step()
    before = build().experts[3][0].weight
    after = full_params(engine.module)["experts.3.0.weight"]
    torch.testing.assert_close(after, before * (1 - 1e-3) - 1e-2, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_the_user_sets_counts() -> None:
    run_ranks(given_gradient, 2)


def unknown_optimizer() -> list[str]:
    class Mine(torch.optim.AdamW):
        pass

    Mine.__module__ = "somebody.optim"
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.runtime.zero.core.master.warning_once", said.append)
        engine = start(lambda p: Mine(p, lr=1e-2, weight_decay=0.1), zero_allow_untested_optimizer=True)
        train(engine, range(2))
    return said


def test_an_optimizer_that_cannot_be_cut_says_so() -> None:
    for said in run_ranks(unknown_optimizer, 2):
        assert "Mine is not known to work on slices of its state, so it steps them with zeros" in said[0]


def votes() -> list[int]:
    """Collectives of a step in which parameters were idle, and of one without."""
    engine = start(OPTIMIZERS["fused AdamW"])
    train(engine, range(6))
    found = []
    for chosen in (["0", "1"], ["0123", "0123"]):
        for micro in range(2):
            engine.backward(engine(batch(0, micro, 0), chosen[micro]))
            with ExitStack() as stack:
                names = ("gather", "reduce_scatter", "broadcast", "exchange")
                seen = [stack.enter_context(watch(wire, name)) for name in names]
                engine.step()
        found.append(sum(one.calls for one in seen))
    return found


def test_no_collective_of_its_own() -> None:
    idle, none = run_ranks(votes, 2)[0]
    assert idle == none == 1, "the vote"


@pytest.mark.parametrize("count", [0, 1, 47, 48, 49, 200])
def test_bits_of_the_vote(count: int) -> None:
    generator = random.Random(count)
    ranks = [{i for i in range(count) if generator.random() < 0.6} for _ in range(3)]
    words = [packed(idle, count) for idle in ranks]
    assert all(float(int(word)) == word and word < 1 << 53 for row in words for word in row)
    assert idle_everywhere(words) == set.intersection(*ranks)


# -- checkpoints


def saves(folder: str, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        engine = start(OPTIMIZERS[name])
        train(engine, range(8))
        engine.save_checkpoint(f"{folder}/{name}")
        train(engine, range(8, STEPS))
        found[name] = full_params(engine.module)
        engine.destroy()
    return found


def loads(folder: str, names: list[str], top: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        engine = start(OPTIMIZERS[name], **top)
        train(engine, range(2))  # counts of its own, which the load replaces
        engine.load_checkpoint(f"{folder}/{name}")
        train_as(engine, range(8, STEPS), 2)
        found[name] = full_params(engine.module)
        engine.destroy()
    return found


def train_as(engine: Any, steps: range, world: int) -> None:
    """Train on the data of ``world`` ranks, cut over those there are: one rank takes the micro-batches of all."""
    if dist.get_world_size() == world:
        return train(engine, steps)
    engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * 2 * world)
    for step in steps:
        for rank in range(world):
            for micro in range(2):
                engine.backward(engine(batch(step, micro, rank), SCHEDULE[step % len(SCHEDULE)][rank][micro]))
                engine.step()


def in_process() -> None:
    """What ``optimizer.state_dict`` gave goes into another engine of the same process."""
    for name in ("fused AdamW", "NAdam"):
        first = start(OPTIMIZERS[name])
        train(first, range(8))
        state = copy.deepcopy(first.optimizer.state_dict())
        train(first, range(8, 14))
        second = start(OPTIMIZERS[name])
        train(second, range(3))
        second.optimizer.load_state_dict(state)
        train(second, range(8, 14))
        assert_tensors(full_params(second.module), full_params(first.module), 0, 0)


def test_counts_are_in_the_state_dict() -> None:
    run_ranks(in_process, 2)


CHECKPOINTED = ["fused AdamW", "AdamW", "SGD, momentum", "NAdam", "SGD", "Adagrad"]


def test_counts_are_in_the_checkpoint(tmp_path: Path) -> None:
    wanted = run_ranks(saves, 2, str(tmp_path), CHECKPOINTED, timeout=120)[0]
    for world, top, exact in ((2, {}, True), (2, {"zero": {"sub_group_size": 40}}, False), (1, {}, False)):
        for found in run_ranks(loads, world, str(tmp_path), CHECKPOINTED, top, timeout=120):
            for name in CHECKPOINTED:
                assert_tensors(found[name], wanted[name], *((0, 0) if exact else (1e-6, 3e-7)))
    for name in CHECKPOINTED:
        for tag in (tmp_path / name).glob("global_step*"):
            convert(tag, tmp_path / name / "universal")
    universal = {"checkpoint": {"load_universal": True}}
    for found in run_ranks(loads, 1, str(tmp_path), CHECKPOINTED, universal, timeout=120):
        for name in CHECKPOINTED:
            assert_tensors(found[name], wanted[name], 1e-6, 3e-7)
