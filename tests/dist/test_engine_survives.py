# SPDX-License-Identifier: Apache-2.0
"""Promise: exceptions leave the engine usable, and wrong calls give clear errors.

After an exception in a forward or a backward on every rank, training goes on as if the failed pass had not been.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import UsageError
from tests.dist.support import assert_tensors, full_params, initialize, settings, train
from tests.harness import models
from tests.harness.pool import run_ranks


class Boom(Exception):
    """What the tests raise."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom("in backward")


class Failing(nn.Module):
    """Raises where `self.where` says; the same parameters and results as `Blocks` else."""

    def __init__(self, recompute: str | None) -> None:
        super().__init__()
        self.inner = models.seeded(lambda: models.Blocks(recompute=recompute))
        self.where = ""
        self.inner.layers[1].register_forward_hook(self.act)

    def act(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise Boom("in forward")
        return FailsInBackward.apply(output) if self.where == "backward" else output

    def forward(self, *data: torch.Tensor) -> torch.Tensor:
        return self.inner(*data)


def failing_run(where: str | None, recompute: str | None, plain_backward: bool, hpz: int) -> tuple[list[float], dict]:
    engine = initialize(Failing(recompute), settings(hpz=hpz, zero={"stage3_max_reuse_distance": 0}))
    losses = train(engine, models.batch, range(2))[0]
    if where is not None:
        engine.module.where = where
        for grad in (True, False) if where == "forward" else (True,):
            with pytest.raises(Boom), torch.set_grad_enabled(grad):
                loss = engine(*models.batch(9, dist.get_rank()))
                loss.backward() if plain_backward else engine.backward(loss)
        engine.module.where = ""
    with torch.no_grad():
        losses.append(engine(*models.batch(5, dist.get_rank())).item())
    losses += train(engine, models.batch, range(2, 4))[0]
    live = engine.optimizer_model.fetcher.ledger.live
    assert not any(unit.users or unit.hold_until_flush for unit in engine.optimizer_model.units)
    return [*losses, float(live)], full_params(engine.module)


def failing_window(fails: bool, plain_backward: bool) -> tuple[list[float], dict]:
    """The second backward of a window of two fails: the window is dropped, and the next begins with its first."""
    engine = initialize(Failing(None), settings(accum=2))
    losses = train(engine, models.batch, range(1), accum=2)[0]
    if fails:
        for micro, where in enumerate(("", "backward")):
            engine.module.where = where
            loss = engine(*models.batch(9, dist.get_rank(), micro))
            if where:
                with pytest.raises(Boom):
                    loss.backward() if plain_backward else engine.backward(loss)
            else:
                engine.backward(loss)
                engine.step()
        engine.module.where = ""
    losses += train(engine, models.batch, range(1, 3), accum=2)[0]
    assert engine.global_steps == 3
    return losses, full_params(engine.module)


def test_a_window_whose_backward_failed_is_dropped() -> None:
    plain = run_ranks(failing_window, 2, False, False)
    for plain_backward in (False, True):
        for (wanted, weights), (losses, params) in zip(
            plain, run_ranks(failing_window, 2, True, plain_backward), strict=True
        ):
            assert losses == wanted, plain_backward
            assert_tensors(params, weights, 0, 0)


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_training_goes_on(recompute: str | None) -> None:
    plain = run_ranks(failing_run, 2, None, recompute, False, 1)
    for where, plain_backward, hpz in (("forward", False, 1), ("backward", False, 2), ("backward", True, 1)):
        for (wanted, weights), (losses, params) in zip(
            plain, run_ranks(failing_run, 2, where, recompute, plain_backward, hpz), strict=True
        ):
            assert losses == wanted, (where, plain_backward)
            assert_tensors(params, weights, 0, 0)


def wrong_calls() -> dict[str, str]:
    said: dict[str, str] = {}

    def note(name: str, call: Any, kind: type[BaseException]) -> None:
        with pytest.raises(kind) as caught:
            call()
        said[name] = str(caught.value)

    data = models.batch(0, dist.get_rank())
    engine = initialize(models.uneven(), settings())
    note("step without backward", engine.step, UsageError)
    loss = engine(*data)
    note("vector loss", lambda: engine.backward(torch.ones(3)), AssertionError)
    engine.backward(loss)
    engine.step()
    note("second step", engine.step, UsageError)
    engine.offload_states()
    note("step while offloaded", lambda: (engine.backward(engine(*data)), engine.step()), UsageError)
    engine.destroy()

    frozen = initialize(models.uneven(), settings(), None)
    loss = frozen(*data)
    note("engine.backward without optimizer", lambda: frozen.backward(loss), UsageError)
    note("loss.backward without optimizer", loss.backward, UsageError)
    note("step without optimizer", frozen.step, UsageError)
    note("optimizer.step without optimizer", frozen.optimizer.step, UsageError)
    with torch.no_grad():
        assert torch.isfinite(frozen(*data))
    frozen.destroy()
    frozen.destroy()
    return said


def test_wrong_calls_say_what_is_wrong() -> None:
    for said in run_ranks(wrong_calls, 2):
        assert "backward" in said["step without backward"]
        assert "scalar" in said["vector loss"]
        assert "backward" in said["second step"]
        assert "reload_states" in said["step while offloaded"]
        for name in ("engine.backward", "loss.backward", "step", "optimizer.step"):
            assert "optimizer" in said[f"{name} without optimizer"]


def no_sync_run(use: bool) -> tuple[list[float], dict]:
    """Case 12: `no_sync` around all but the last micro-batch."""
    engine = initialize(models.uneven(), settings())
    losses = []
    for step in range(3):
        for micro in range(4):
            last = micro == 3
            engine.set_gradient_accumulation_boundary(last)
            if use and not last:
                with engine.no_sync():
                    loss = engine(*models.batch(step, dist.get_rank(), micro))
                    engine.backward(loss / 4, scale_wrt_gas=False)
            else:
                loss = engine(*models.batch(step, dist.get_rank(), micro))
                engine.backward(loss / 4, scale_wrt_gas=False)
            if last:
                engine.step()
            losses.append(loss.item())
    return losses, full_params(engine.module)


def test_no_sync_accumulates_the_same_gradients() -> None:
    for (a, weights), (b, params) in zip(
        run_ranks(no_sync_run, 2, False), run_ranks(no_sync_run, 2, True), strict=True
    ):
        assert a == b
        assert_tensors(params, weights, 0, 0)
