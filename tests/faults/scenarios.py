# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the fault tests do. Every function runs on a forked rank and returns JSON."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.zero.core import wire
from tests.harness import models
from tests.harness.faults import kill, watch


def config(precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    """A small configuration; keyword arguments go into ``zero_optimization``, ``top_*`` to the top level."""
    top = {key[4:]: zero.pop(key) for key in list(zero) if key.startswith("top_")}
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        **top,
    }
    if precision != "fp32":
        result[precision] = {"enabled": True}
    return result


def rank() -> int:
    return torch.distributed.get_rank()


def build(model: nn.Module, settings: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return deepspeed.initialize(model=model, config=config() if settings is None else settings, **kwargs)[0]


def fingerprint(engine: Any) -> str:
    """A hash of this rank's master weights."""
    digest = hashlib.sha256()
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        digest.update(flat.detach().numpy().tobytes())
    return digest.hexdigest()


def full_weights(engine: Any) -> str:
    """A hash of all gathered weights."""
    digest = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            digest.update(name.encode() + param.data.float().numpy().tobytes())
    return digest.hexdigest()


def idle(engine: Any) -> list[str]:
    """Parameters that still show weights, and the elements that are still gathered; empty where all is released."""
    sharded = engine.optimizer.sharded
    left = [name for name, p in sharded.params.items() if p.status.name != "NOT_AVAILABLE"]
    return left + ([f"{sharded.fetcher.ledger.live} elements"] if sharded.fetcher.ledger.live else [])


def step(engine: Any, number: int, micro: Callable[..., Any] = models.batch) -> float:
    loss = engine(*micro(number, rank()))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def note(name: str, text: str = "") -> None:
    """Leave a file in the test's folder, readable after this rank's death."""
    Path(os.environ["FAULT_FOLDER"], name).write_text(text)


# -- D1: a rank dies


def die(seam: str, at: int, victim: int, steps: int = 3, zero: dict[str, Any] | None = None) -> Any:
    """Train; the victim dies before its ``at``-th call of the wire's ``seam``."""
    watching: Any = contextlib.nullcontext()
    if rank() == victim:
        watching = watch(wire, seam, kill(at))
    with watching:
        engine = build(models.blocks(), config(**(zero or {})))
        for number in range(steps):
            step(engine, number)
    return "finished"


def die_before_initialize(victim: int) -> Any:
    if rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    build(models.blocks())
    return "finished"


def join_alone() -> Any:
    """A group of two ranks that the second never joins."""
    torch.distributed.destroy_process_group()
    address = f"file://{os.environ['FAULT_FOLDER']}/other"
    start = time.monotonic()
    try:
        deepspeed.init_distributed(
            "gloo", timeout=datetime.timedelta(seconds=2), init_method=address, rank=0, world_size=2
        )
    except deepspeed.errors.CollectiveTimeout as error:
        return [str(error), time.monotonic() - start]
    return ["none", 0.0]


def die_in_group_making(victim: int) -> Any:
    """The victim dies where ranks make hpZ groups."""
    from deepspeed.utils import groups

    with watch(groups, "hpz_group", kill(1)) if rank() == victim else contextlib.nullcontext():
        build(models.blocks(), config(zero_hpz_partition_size=2))
    return "finished"


def die_and_shut_down() -> Any:
    engine = build(models.blocks())
    step(engine, 0)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(engine, 1)
    except deepspeed.errors.CollectiveTimeout:
        if rank() == 2:
            raise
        torch.distributed.destroy_process_group()
    return "handled"


# -- D2, D3, D4: ranks disagree


class Uneven(nn.Module):
    """Layers of which the backward of some ranks needs fewer, so that ranks issue collectives of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 15)
        self.body = nn.Linear(15, 150)
        self.head = nn.Linear(150, models.VOCAB)
        self.cut = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens))
        hidden = hidden.detach() if self.cut else hidden
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, -2), targets.flatten())


def cut(odd: int) -> Any:
    """In step 1 the loss of rank ``odd`` does not depend on two modules of the other ranks'."""
    engine = build(models.seeded(Uneven), config(**NOTHING_AHEAD))
    step(engine, 0)
    note(f"before{rank()}", fingerprint(engine))
    engine.module.cut = rank() == odd
    try:
        step(engine, 1)
    finally:
        note(f"after{rank()}", fingerprint(engine))
    return "completed"


class Pair(nn.Module):
    """Two equal layers (each a unit) and a branch; ``order`` and ``skip`` say what a rank does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 15)
        self.first = nn.Linear(15, 15)
        self.second = nn.Linear(15, 15)
        self.head = nn.Linear(15, models.VOCAB)
        self.swap = self.skip = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        layers = [self.first, self.second]
        if self.swap:
            layers.reverse()
        if self.skip:
            layers.pop()
        for layer in layers:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, -2), targets.flatten())


def pair() -> nn.Module:
    return models.seeded(Pair)


NOTHING_AHEAD = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Gathers are issued where a module needs them, and nothing stays gathered."""


def swap(zero: dict[str, Any], odd: int) -> Any:
    """In step 1 rank ``odd`` uses two equal layers in the other order; the steps around it are sound."""
    engine = build(pair(), config(**zero))
    step(engine, 0)
    engine.optimizer.parameter_offload.param_coordinator._invalidate_trace()  # so that gathers follow the modules
    before, weights = fingerprint(engine), full_weights(engine)
    engine.module.swap = rank() == odd
    try:
        step(engine, 1)
        error = ["none", ""]
    except RuntimeError as caught:
        error = [type(caught).__name__, str(caught)]
    engine.module.swap = False
    result = {
        "error": error,
        "unchanged": fingerprint(engine) == before and full_weights(engine) == weights,
        "left": idle(engine),
    }
    for number in (2, 3):
        step(engine, number)
    return {**result, "end": full_weights(engine)}


def swap_reference() -> Any:
    """What ``swap`` should end with: its step 1 never happened."""
    engine = build(pair())
    for number in (0, 2, 3):
        step(engine, number)
    return full_weights(engine)


def swap_in_a_window(odd: int | None) -> Any:
    """Windows of two micro-batches. In the second one rank ``odd`` uses two equal layers in the other order."""
    engine = build(pair(), config(top_gradient_accumulation_steps=2, **NOTHING_AHEAD))
    caught = []
    for window in (0, 1, 2, 3) if odd is not None else (0, 2, 3):
        engine.module.swap = window == 1 and rank() == odd
        try:
            for micro in range(2):
                step(engine, 10 * window + micro)
        except deepspeed.errors.CollectiveMismatch:
            caught.append(window)
    return {"caught": caught, "steps": engine.global_steps, "end": full_weights(engine)}


def distrusted() -> Any:
    """A step turns out to be one that ranks disagree about while the next window is half done (as on a GPU, where
    nobody waits for the verdict); then a whole window."""
    engine = build(pair(), config(top_gradient_accumulation_steps=2, top_optimizer=SGD))
    loss = engine(*models.batch(0, rank()))
    engine.backward(loss)
    norms = []
    for late in (True, False):
        if late:
            engine.optimizer._distrust()
        for micro in range(2):
            engine.backward(engine(*models.batch(micro, rank())))
        engine.optimizer.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


SGD = {"type": "SGD", "params": {"lr": 0.0}}


def deviate(how: str, odd: int, zero: dict[str, Any]) -> Any:
    """In step 1 rank ``odd`` leaves a layer out ("skip"), or uses two in the other order ("swap")."""
    engine = build(pair(), config(**zero))
    step(engine, 0)
    note(f"before{rank()}", fingerprint(engine))
    setattr(engine.module, how, rank() == odd)
    try:
        step(engine, 1)
    finally:
        note(f"after{rank()}", fingerprint(engine))
    return weights(engine)


def wrong_size(odd: int, change: str) -> Any:
    """Rank ``odd`` gathers with a shard of another size or dtype."""
    engine = build(pair())
    step(engine, 0)
    note(f"before{rank()}", fingerprint(engine))
    original = wire.gather

    def other(outs: Any, ins: Any, channel: Any) -> Any:
        if change == "size":
            ins = [t[: max(1, t.numel() // 2)].clone() for t in ins]
            outs = [torch.empty(t.numel() * channel.size, dtype=t.dtype) for t in ins]
        else:
            ins = [t.double() for t in ins]
            outs = [t.double() for t in outs]
        return original(outs, ins, channel)

    if rank() == odd:
        wire.gather = other
    try:
        step(engine, 1)
    finally:
        note(f"after{rank()}", fingerprint(engine))
    return "completed"


# -- D5: a rank stalls


def stall(victim: int, seconds: float, where: str) -> Any:
    engine = build(models.blocks())
    step(engine, 0)
    if rank() == victim:
        if where == "forward":
            engine.module.layers[1].register_forward_pre_hook(lambda *_: time.sleep(seconds))
        else:
            time.sleep(seconds)
    note(f"start{rank()}", str(time.monotonic()))
    try:
        for number in range(1, 4):
            step(engine, number)
    finally:
        note(f"end{rank()}", str(time.monotonic()))
    return "completed"


def stall_before_initialize(victim: int, seconds: float) -> Any:
    if rank() == victim:
        time.sleep(seconds)
    build(models.blocks())
    return "completed"


# -- D6, D7: exceptions in users' code


def user_error(odd: int) -> Any:
    """A module raises on one rank; it must be left with nothing gathered."""
    engine = build(models.blocks())
    step(engine, 0)

    def fail(*_: Any) -> None:
        raise ValueError("from the user's module")

    if rank() == odd:
        engine.module.layers[1].up.register_forward_pre_hook(fail)
    try:
        step(engine, 1)
    except ValueError:
        note(f"left{rank()}", str(idle(engine)))
        raise
    return "completed"


class _Trips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, raised: type[BaseException]) -> Tensor:
        ctx.raised = raised
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ctx.raised("from the user's backward")


ERRORS = {"out of memory": MemoryError, "interrupt": KeyboardInterrupt}


def reuse(where: str, zero: dict[str, Any], accumulation: int, kind: str = "out of memory") -> Any:
    """Every rank runs out of memory in step 1, or is interrupted, catches it, and goes on."""
    raised = ERRORS[kind]
    engine = build(models.blocks(), config(top_gradient_accumulation_steps=accumulation, **zero))
    micro = 0

    def micro_step() -> None:
        nonlocal micro
        loss = engine(*models.batch(micro, rank()))
        engine.backward(loss)
        engine.step()
        micro += 1

    for _ in range(accumulation):
        micro_step()
    weights = full_weights(engine)
    layer = engine.module.layers[1]
    if where in ("forward", "evaluation"):

        def fail(*_: Any) -> None:
            raise raised("from the user's forward")

        handle = layer.up.register_forward_pre_hook(fail)
    elif where == "backward":
        handle = layer.register_forward_hook(lambda _m, _a, out: _Trips.apply(out, raised))
    else:
        handle = contextlib.nullcontext()
    try:
        if where != "none":
            with torch.set_grad_enabled(where != "evaluation"):
                loss = engine(*models.batch(99, rank()))
            engine.backward(loss)
        caught = "none"
    except raised as error:
        caught = str(error)
    if where != "none":
        handle.remove()
        engine.optimizer.zero_grad()
    left, same = idle(engine), full_weights(engine) == weights
    for _ in range(3 * accumulation):
        micro_step()
    return {"caught": caught, "left": left, "same": same, "end": full_weights(engine)}


# -- D8: ranks differ at the start

DIFFERENCES: dict[str, str] = {
    "shape": "parameter head.weight",
    "name": "parameter extra",
    "dtype": "parameter head.weight",
    "requires_grad": "parameter layers.0.up.bias",
    "config": "zero_optimization.stage3_prefetch_bucket_size",
    "hpz": "zero_optimization.zero_hpz_partition_size",
    "lr": "optimizer.params.lr",
    "client lr": "group 0 lr",
    "leaf": "module layers.0",
    "version": "deepspeed",
    "bad config": "zero_optimization.stage",
}


def differ(odd: int) -> Any:
    """Ranks differ in one thing after the other; each attempt must fail on all ranks, and the last one succeed."""
    result = {}
    for kind in DIFFERENCES:
        mine = rank() == odd
        model, settings, kwargs = models.blocks(), config(), {}
        if kind == "shape" and mine:
            model.head = nn.Linear(15, 14, bias=False)
        elif kind == "name" and mine:
            model.extra = nn.Parameter(torch.zeros(3))
        elif kind == "dtype" and mine:
            model.head = model.head.double()
        elif kind == "requires_grad" and mine:
            model.layers[0].up.bias.requires_grad_(False)
        elif kind == "config" and mine:
            settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 77
        elif kind == "hpz" and mine:
            settings["zero_optimization"]["zero_hpz_partition_size"] = torch.distributed.get_world_size()
        elif kind == "lr" and mine:
            settings["optimizer"]["params"]["lr"] = 0.5
        elif kind == "client lr":
            del settings["optimizer"]
            kwargs["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.5 if mine else 0.25)
        elif kind == "leaf" and mine:
            deepspeed.utils.set_z3_leaf_module(model.layers[0], True)
        elif kind == "bad config" and mine:
            settings["zero_optimization"]["stage"] = 9
        with _other_version(kind == "version" and mine):
            try:
                build(model, settings, **kwargs)
                result[kind] = ["none", ""]
            except Exception as error:
                result[kind] = [type(error).__name__, str(error)]
    settings = config()
    if rank() == odd:
        settings["steps_per_print"] = 5  # ranks may print differently
    engine = build(models.blocks(), settings)
    step(engine, 0)
    return result


@contextlib.contextmanager
def _other_version(enabled: bool) -> Iterator[None]:
    from deepspeed.runtime.zero import checks

    before = checks.__version__
    if enabled:
        checks.__version__ = "0.0.1"
    try:
        yield
    finally:
        checks.__version__ = before


def differ_in_init(odd: int) -> Any:
    try:
        with deepspeed.zero.Init(dtype=torch.bfloat16 if rank() == odd else torch.float32):
            models.blocks()
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def agreement_cost() -> Any:
    """Exchanges during a good ``initialize``."""
    with watch(wire, "exchange", note=lambda args, _: args[0].numel()) as seen:
        build(models.blocks())
    return seen.log


# -- D11: the group goes early


def destroy_early() -> Any:
    engine = build(models.blocks())
    step(engine, 0)
    loss = engine(*models.batch(1, rank()))
    unit = engine.optimizer.sharded.fetcher.units[1]
    engine.optimizer.sharded.fetcher.start(unit)
    torch.distributed.destroy_process_group()
    try:
        engine.backward(loss)
        outcome = "no error"
    except RuntimeError as error:
        outcome = type(error).__name__
    engine.destroy()
    return outcome


# -- D9, D10: unused parameters and unusual orders of calls


def experts(steps: int) -> Any:
    """Each rank uses another expert."""
    engine = build(models.conditional())
    losses = []
    for number in range(steps):
        losses.append(step(engine, number, models.batch_by_rank))
    return {"losses": losses, "weights": weights(engine)}


def weights(engine: Any) -> dict[str, Any]:
    """Gathered weights as nested lists."""
    result = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            result[name] = param.data.float().tolist()
    return result


class Calls:
    """The same calls on an engine, or on plain torch over all ranks' batches; each call returns what it saw."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.number = 0

    def train(self) -> Any:
        self.number += 1
        self.engine.backward(self.engine(*models.batch(self.number, rank())))
        return None

    def plain_backward(self) -> Any:
        self.number += 1
        self.engine(*models.batch(self.number, rank())).backward()
        return None

    def double(self) -> Any:
        """Backward twice through one graph."""
        self.number += 1
        loss = self.engine(*models.batch(self.number, rank()))
        self.engine.backward(loss, retain_graph=True)
        self.engine.backward(loss)
        return None

    def look(self) -> Any:
        self.number += 1
        self.engine.eval()
        with torch.no_grad():
            loss = float(self.engine(*models.batch(self.number, rank())))
        self.engine.train()
        return loss

    def forward_only(self) -> Any:
        self.number += 1
        return float(self.engine(*models.batch(self.number, rank())).detach())

    def two_forwards(self) -> Any:
        """Two graphs alive at once; the older is differentiated."""
        self.number += 2
        loss = self.engine(*models.batch(self.number - 1, rank()))
        self.engine(*models.batch(self.number, rank()))
        self.engine.backward(loss)
        return None

    def step(self) -> Any:
        try:
            self.engine.step()
            return "stepped"
        except deepspeed.errors.UsageError as error:
            return f"refused: {str(error)[:30]}"


CALLS = ("train", "plain_backward", "double", "look", "forward_only", "two_forwards", "step", "step")


def fuzz(names: list[str], accumulation: int, zero: dict[str, Any]) -> Any:
    calls = Calls(build(models.blocks(), config(top_gradient_accumulation_steps=accumulation, **zero)))
    seen = [getattr(calls, name)() for name in names]
    return {"seen": seen, "weights": weights(calls.engine), "left": idle(calls.engine)}


def vote_cost() -> Any:
    """Elements of every exchange of three steps."""
    engine = build(models.blocks())
    with watch(wire, "exchange", note=lambda args, _: args[0].numel()) as seen:
        for number in range(3):
            step(engine, number)
    return seen.log
