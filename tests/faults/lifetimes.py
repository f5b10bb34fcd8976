# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the lifetime tests do: engines that come and go in one process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import torch

import deepspeed
from deepspeed.runtime.zero.core import wire
from deepspeed.runtime.zero.core.param import ShardedParam
from deepspeed.runtime.zero.core.unit import ShardedUnit
from tests.faults.scenarios import build, config, full_weights, rank, step
from tests.harness import models
from tests.harness.faults import delay, watch

KINDS = ("plain", "hpz", "init", "bf16", "frozen", "no optimizer", "checks")


def _build(kind: str) -> Any:
    zero: dict[str, Any] = {"zero_hpz_partition_size": 2} if kind == "hpz" else {}
    zero["enable_sanity_checks"] = kind == "checks"
    settings = config("bf16" if kind == "bf16" else "fp32", **zero)
    if kind == "init":
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = models.blocks()
    else:
        model = models.frozen() if kind == "frozen" else models.blocks()
    if kind == "no optimizer":
        del settings["optimizer"]
    return build(model, settings)


def _watch(engine: Any) -> dict[str, Any]:
    """Weak references to what an engine is made of."""
    optimizer = engine.optimizer
    watched = {"engine": engine, "module": engine.module, "optimizer": optimizer, "sharded": optimizer.sharded}
    p = next(iter(optimizer.sharded.params.values()))
    watched.update(param=p.param, shard=p.shard)
    if hasattr(optimizer, "master"):
        watched.update(master=optimizer.master, torch_optimizer=optimizer.optimizer)
        watched["flat"] = optimizer.fp32_partitioned_groups_flat[0]
    return {name: weakref.ref(value) for name, value in watched.items()}


def five_builds(kind: str, destroy: bool) -> Any:
    """What is alive after each of five engines was used and dropped; live tensor elements; threads."""
    alive, elements, threads = [], [], []
    for number in range(5):
        engine = _build(kind)
        if kind == "no optimizer":
            with torch.no_grad():
                engine(*models.batch(number, rank()))
        else:
            step(engine, 0)
            step(engine, 1)
        references = _watch(engine)
        if destroy:
            engine.destroy()
            engine.destroy()
        del engine
        gc.collect()
        parts = [type(item).__name__ for item in gc.get_objects() if isinstance(item, (ShardedParam, ShardedUnit))]
        alive.append([name for name, reference in references.items() if reference() is not None] + parts)
        elements.append(_elements())
        threads.append(sum(thread.name.startswith("deepspeed pulse") for thread in threading.enumerate()))
    return {"alive": alive, "elements": elements, "threads": threads}


def _elements() -> int:
    """Elements of every tensor alive; gloo's thread may hold those of its last collectives a moment longer."""
    end = time.monotonic() + 2.0
    while True:
        gc.collect()
        found = sum(t.numel() for t in gc.get_objects() if isinstance(t, torch.Tensor) and not t.is_sparse)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def destroyed_while_held() -> Any:
    """An engine that is destroyed but still referenced keeps the weights, and frees masters, states and copies."""
    engine = build(models.blocks(), config("bf16", zero_hpz_partition_size=2))
    step(engine, 0)
    step(engine, 1)
    weights = full_weights(engine)
    optimizer = engine.optimizer
    state = weakref.ref(next(iter(next(iter(optimizer.state.values())).values())))
    engine.destroy()
    gc.collect()
    sharded = optimizer.sharded
    return {
        "weights": full_weights(engine) == weights,
        "state": state() is None,
        "masters": sum(flat.untyped_storage().nbytes() for flat in optimizer.fp32_partitioned_groups_flat),
        "secondaries": [name for name, p in sharded.params.items() if p.secondary is not None],
        "live": sharded.fetcher.ledger.live,
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in engine.module.modules()),
    }


def rebuilt() -> Any:
    """The module of a destroyed engine gets a new one, and trains on."""
    engine = build(models.blocks())
    step(engine, 0)
    weights = full_weights(engine)
    module = engine.module
    engine.destroy()
    again = build(module)
    same = full_weights(again) == weights
    return {"same": same, "losses": [step(again, number) for number in (1, 2)]}


class Early(models.Blocks):
    """Blocks that may end after the first of them: then gathers of the others are ahead and not used."""

    early = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.early:
            return super().forward(tokens, targets)
        return self.layers[0](self.embed(tokens)).mean()


def dropped_after_a_short_pass() -> Any:
    """An engine whose last evaluation ended early is dropped; rank 1 is slow to issue its gathers. Then another trains.

    Returns:
        gathers in flight after the evaluation, and the losses of the second engine.
    """
    settings = config(stage3_max_reuse_distance=0)
    engine = build(models.seeded(Early), settings)
    with torch.no_grad():
        engine(*models.batch(0, rank()))
        engine(*models.batch(0, rank()))
        engine.module.early = True
        with watch(wire, "gather", delay(0.2 * rank())):
            engine(*models.batch(0, rank()))
    flying = [str(unit) for unit in engine.optimizer.sharded.units if unit.handle is not None]
    del engine
    gc.collect()
    another = build(models.blocks(), settings)
    return [flying, [step(another, number) for number in range(2)]]
