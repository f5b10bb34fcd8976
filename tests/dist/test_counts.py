# SPDX-License-Identifier: Apache-2.0
"""Promise: what a block costs on the host and on the wire, counted under the `fake` process group (row 73, hot path).

Beside the plain model a further block costs at most 200 Python calls for forward and backward, one gather call per pass
and one reduce-scatter call; nothing is concatenated, and copies happen only for padding and hpZ secondaries.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.runtime.zero.core import wire
from tests.dist.support import LIMITS, initialize, reference, settings
from tests.harness import models
from tests.harness.faults import watch
from tests.harness.pool import run_ranks

WORLD = 4


@contextmanager
def fake_world(hpz: int) -> Iterator[None]:
    """Four ranks of which only this one exists: collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def python_calls(work: Callable[[], None]) -> int:
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def build(depth: int, even: bool) -> torch.nn.Module:
    """Blocks whose parameters all divide by the world, or none of whose do."""
    width, inner = (16, 8) if even else (15, 7)
    return models.seeded(lambda: models.Blocks(depth=depth, width=width, inner=inner))


def measure(depth: int, hpz: int, even: bool, engine_too: bool = True) -> dict[str, Any]:
    model: Any = build(depth, even)
    backward: Callable[[torch.Tensor], Any] = lambda loss: loss.backward()  # noqa: E731
    engine = None
    if engine_too:
        engine = initialize(model, settings(hpz=hpz, zero=LIMITS["nothing stays"]), reference.sgd)
        model, backward = engine, engine.backward
    data = models.batch(0, 0)
    for _ in range(2):  # the first passes record the order of units
        backward(model(*data))
        if engine is not None:
            engine.step()
        else:
            model.zero_grad()
    found: dict[str, Any] = {}

    def step() -> None:
        backward(model(*data))

    found["calls"] = python_calls(step)
    if engine is not None:
        engine.step()
    with watch(wire, "gather") as gathers, watch(wire, "reduce_scatter") as reductions, Operators() as operators:
        step()
    found.update(gathers=gathers.calls, reductions=reductions.calls, operators=dict(operators.seen))
    if engine is not None:
        found["units"] = len(engine.optimizer_model.units)
        engine.destroy()
    return found


def counted(hpz: int, even: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    with fake_world(hpz):
        return (
            measure(4, hpz, even),
            measure(8, hpz, even),
            measure(4, hpz, even, engine_too=False),
            measure(8, hpz, even, engine_too=False),
        )


@pytest.mark.parametrize("hpz", [1, 2])
@pytest.mark.parametrize("even", [True, False])
def test_the_cost_of_a_block(hpz: int, even: bool) -> None:
    (result,) = run_ranks(counted, 1, hpz, even, init_group=False, env={"WORLD_SIZE": str(WORLD)})
    short, long, plain_short, plain_long = result
    blocks = long["units"] - short["units"]
    assert blocks == 4

    def extra(name: str) -> float:
        return (long[name] - short[name]) / blocks

    def operators(name: str) -> float:
        mine = long["operators"].get(name, 0) - short["operators"].get(name, 0)
        return (mine - plain_long["operators"].get(name, 0) + plain_short["operators"].get(name, 0)) / blocks

    calls = extra("calls") - (plain_long["calls"] - plain_short["calls"]) / blocks
    assert calls <= 200, f"{calls} Python calls a block"
    assert extra("gathers") == 2 and extra("reductions") == 1
    assert operators("cat") == 0
    if even:
        assert operators("copy_") == 0
        assert operators("_foreach_copy_") == (1 if hpz == 2 else 0), "secondaries in one call a unit"
        assert operators("constant_pad_nd") == 0
