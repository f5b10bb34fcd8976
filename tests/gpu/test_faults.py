# SPDX-License-Identifier: Apache-2.0
"""Promise, on NCCL: a dead rank, a stalled rank and ranks that disagree end in bounded time, and never in a step.

NCCL's watchdog ends a process whose collective timed out, often before Python hears of it; so an abort counts as an
end, and what is promised is: soon, non-zero, nothing stepped, and the log says who is missing.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.errors import CollectiveMismatch
from deepspeed.runtime.zero.core import wire
from tests.dist.support import LIMITS, initialize, settings
from tests.gpu import place
from tests.gpu.train import ADAMW
from tests.harness import models
from tests.harness.faults import kill, watch
from tests.harness.pool import FreshResult

TIMEOUT = 8.0
GRACE = 30.0  # how long torch's watchdog may take to see a timeout and end the process
LIMIT = 75.0


class Pair(nn.Module):
    """Two equal layers, each a unit; `swap` says in which order this rank uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, models.VOCAB)
        self.swap = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in (self.second, self.first) if self.swap else (self.first, self.second):
            hidden = torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, -2).float(), targets.flatten())


def _engine(model: nn.Module, limits: str = "default") -> Any:
    config = settings(clip=0.5, zero=LIMITS[limits], bf16={"enabled": True}, optimizer=ADAMW)
    model = model.to(place.device())
    return initialize(model, config, None, model_parameters=list(model.parameters()))


def _step(engine: Any, step: int) -> float:
    loss = engine(*place.batches()(step, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied()
    return float(loss.detach())


def _fingerprint(engine: Any) -> str:
    digest = hashlib.sha256()
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        digest.update(flat.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _leave(folder: str, name: str) -> None:
    Path(folder, f"{name}{dist.get_rank()}").write_text(str(time.time()))


def _die(folder: str, seam: str, victim: int) -> str:
    """Step 0 is sound; the victim dies before its second call of `seam` in step 1."""
    engine = _engine(models.blocks())
    _step(engine, 0)
    place.synchronize()
    dist.barrier()
    _leave(folder, "sound")
    if dist.get_rank() == victim:
        with watch(wire, seam, kill(2)):
            _step(engine, 1)
    for step in (1, 2):
        _step(engine, step)
        _leave(folder, f"stepped-{step}-")
    return "finished"


def _stall(folder: str, victim: int, seconds: float) -> str:
    engine = _engine(models.blocks())
    _step(engine, 0)
    place.synchronize()
    dist.barrier()
    _leave(folder, "sound")
    if dist.get_rank() == victim:
        time.sleep(seconds)
        os._exit(7)  # it has seen nothing of the failure, so how it would end is not what is asked here
    for step in (1, 2):
        _step(engine, step)
        _leave(folder, f"stepped-{step}-")
    return "finished"


def _swap(folder: str, odd: int) -> dict[str, Any]:
    """In step 1 rank `odd` uses two equal layers in the other order; the steps after it are sound again.

    The recorded order is forgotten before, since gathers that follow it agree, and such a step is sound.
    """
    engine = _engine(models.seeded(Pair), "no persistence")
    _step(engine, 0)
    engine.optimizer.parameter_offload.param_coordinator._invalidate_trace()
    before = _fingerprint(engine)
    engine.module.swap = dist.get_rank() == odd
    error = ["none", ""]
    try:
        _step(engine, 1)
    except CollectiveMismatch as caught:
        error = [type(caught).__name__, str(caught)]
    engine.module.swap = False
    unchanged = _fingerprint(engine) == before
    _step(engine, 2)
    loss = _step(engine, 3)
    reference = _engine(models.seeded(Pair), "no persistence")
    for step in (0, 2, 3):
        wanted = _step(reference, step)
    result = {"error": error, "unchanged": unchanged, "loss": loss, "wanted": wanted}
    result["same"] = _fingerprint(engine) == _fingerprint(reference)
    return result


SCENARIOS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gather": (_die, ("gather", 1)),
    "reduce_scatter": (_die, ("reduce_scatter", 1)),
    "stall": (_stall, (1, TIMEOUT + GRACE)),
    "swap": (_swap, (1,)),
}


class Outcome:
    """How the ranks of a scenario ended, when the sound part was over, and what was left in its folder."""

    def __init__(self, name: str) -> None:
        fn, args = SCENARIOS[name]
        with tempfile.TemporaryDirectory(prefix="gpu-faults-") as folder:
            self.ended: list[FreshResult] = place.launch_fresh(fn, 2, folder, *args, group=TIMEOUT, limit=LIMIT)
            end = time.time()
            self.left = {path.name: float(path.read_text()) for path in Path(folder).iterdir()}
        self.seconds = end - max([at for name, at in self.left.items() if name.startswith("sound")], default=end)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future[Outcome]]]:
    """All scenarios at once, since they mostly wait; one after the other where there is no device."""
    with ThreadPoolExecutor(1 if place.ON_CPU else len(SCENARIOS)) as threads:
        yield {name: threads.submit(Outcome, name) for name in SCENARIOS}


def _assert_ended(outcome: Outcome, survivor: int, what: str) -> str:
    """The survivor ended in time, not well, without a step; returns all it said."""
    one = outcome.ended[survivor]
    said = f"{one.error_type or ''} {one.error_text}\n{one.log}"
    tail = f"exit {one.returncode}, {outcome.seconds:.0f} s, {sorted(outcome.left)}\n{said[-3000:]}"
    assert "sound0" in outcome.left, f"{what}: the sound part failed\n{tail}"
    assert one.returncode not in (0, -signal.SIGKILL), f"{what}: {tail}"
    assert f"stepped-1-{survivor}" not in outcome.left, f"{what}: a step without the other rank: {tail}"
    place.note(
        f"{what}: survivor ended with {one.returncode} ({one.error_type or 'no exception'}); all over after "
        f"{outcome.seconds:.0f} s, group timeout {TIMEOUT:.0f} s"
    )
    return said


@pytest.mark.parametrize("seam", ["gather", "reduce_scatter"])
@place.needs(2)
def test_a_dead_rank_ends_the_others(outcomes: dict[str, Future[Outcome]], seam: str) -> None:
    """D1."""
    outcome = outcomes[seam].result()
    assert outcome.ended[1].returncode == -signal.SIGKILL
    said = _assert_ended(outcome, 0, f"D1, death before a {seam}")
    assert outcome.seconds <= TIMEOUT + GRACE, f"{outcome.seconds:.0f} s\n{said[-3000:]}"


@place.needs(2)
def test_a_stalled_rank_is_named(outcomes: dict[str, Future[Outcome]]) -> None:
    """D5: before the watchdog ends the process, the log says which rank is behind and where."""
    outcome = outcomes["stall"].result()
    said = _assert_ended(outcome, 0, "D5, stall")
    assert outcome.ended[1].returncode == 7
    assert "ank 1 is alive but behind" in said, said[-3000:]


@place.needs(2)
def test_equal_shapes_in_another_order_are_noticed(outcomes: dict[str, Future[Outcome]]) -> None:
    """D2: NCCL gathers wrong data without a word; the vote refuses the step on every rank, and training goes on."""
    outcome = outcomes["swap"].result()
    for one in outcome.ended:
        assert one.returncode == 0, f"rank {one.rank} ended with {one.returncode}\n{one.error_text}\n{one.log[-3000:]}"
        kind, text = one.value["error"]
        assert kind == "CollectiveMismatch" and "first" in text and "second" in text, one.value
        assert one.value["unchanged"] and one.value["same"] and one.value["loss"] == one.value["wanted"], one.value
