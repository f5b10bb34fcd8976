# SPDX-License-Identifier: Apache-2.0
"""What the tests of training share: configurations, the loop that trains an engine, and comparisons.

Everything that runs on ranks is a module-level function: the pool calls it by name. One launch runs many cases.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.utils import logger
from tests.harness import models, reference

Losses = list[float]
LIMITS: dict[str, dict[str, int]] = {
    "default": {},
    "nothing stays": {
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    },
    "no persistence": {"stage3_param_persistence_threshold": 0},
    "no prefetch": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
    "no reuse": {"stage3_param_persistence_threshold": 20, "stage3_max_reuse_distance": 0},
    "tight": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 600, "reduce_bucket_size": 1},
}
"""Settings that may change when something is gathered and never what is computed."""


@dataclass(frozen=True)
class Case:
    """One training run. `model` and `batch` name functions of `harness.models`, `optimizer` one of the reference."""

    model: str = "uneven"
    batch: str = "batch"
    world: int = 2
    hpz: int = 1
    accum: int = 1
    clip: float = 0.0
    boundary: bool = False
    plain_backward: bool = False
    limits: str = "no persistence"
    steps: int = 10
    optimizer: str = "adam"
    extra: tuple[tuple[str, Any], ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()


@dataclass
class Run:
    """What a rank saw: its loss per step (mean over micro-batches), the norms, the full weights at the end."""

    losses: Losses
    norms: Losses
    params: dict[str, Tensor]
    stats: dict[str, int] = field(default_factory=dict)


class Heard(logging.Handler):
    """Collects messages of the package's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Heard:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logger.removeHandler(self)


def settings(
    *, hpz: int = 1, accum: int = 1, clip: float = 0.0, zero: dict[str, Any] | None = None, **extra: Any
) -> dict[str, Any]:
    """A stage 3 configuration in which no parameter stays gathered."""
    section = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": hpz, **(zero or {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": clip,
        "zero_optimization": section,
        **extra,
    }


def initialize(model: nn.Module, config: dict[str, Any], optimizer: Any = reference.adam, **more: Any) -> Any:
    """The engine alone; `optimizer` is a callable on parameters, or None for an engine that does not train."""
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer, **more)[0]


def full_params(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter in full, by every name it has. Collective."""
    named = dict(module.named_parameters(remove_duplicate=False))
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Every averaged gradient in full. Collective."""
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(param) for name, param in module.named_parameters()}


def train(
    engine: Any,
    batch: Callable[[int, int, int], Any],
    steps: Iterable[int],
    accum: int = 1,
    boundary: bool = False,
    plain_backward: bool = False,
) -> tuple[Losses, Losses]:
    """Losses (mean over micro-batches) and gradient norms of `steps` on this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses, norms = [], []
    for step in steps:
        micro_losses = []
        for micro in range(accum):
            if boundary:
                engine.set_gradient_accumulation_boundary(is_boundary=micro == accum - 1)
            loss = engine(*batch(step, rank, micro))
            micro_losses.append(loss.detach().float())
            if plain_backward:
                loss.backward()  # one micro-batch of its window, as engine.backward(loss) is
            elif boundary:
                engine.backward(loss / accum, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            if not boundary or micro == accum - 1:
                engine.step()
        losses.append(torch.stack(micro_losses).mean().item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def run_case(case: Case) -> Run:
    """Train one case on this rank and leave nothing behind."""
    config = settings(
        hpz=case.hpz,
        accum=1 if case.boundary else case.accum,
        clip=case.clip,
        zero={**LIMITS[case.limits], **dict(case.zero)},
        **dict(case.extra),
    )
    engine = initialize(getattr(models, case.model)(), config, getattr(reference, case.optimizer))
    losses, norms = train(
        engine, getattr(models, case.batch), range(case.steps), case.accum, case.boundary, case.plain_backward
    )
    run = Run(losses, norms, full_params(engine.module), engine.communication_stats())
    engine.destroy()
    return run


def run_cases(cases: Sequence[Case]) -> list[Run]:
    """Several cases, one after the other, in one launch."""
    return [run_case(case) for case in cases]


@functools.cache
def expected(model: str, batch: str, steps: int, world: int, accum: int, clip: float, optimizer: str) -> Any:
    """The reference of a case."""
    return reference.train(
        getattr(models, model),
        getattr(models, batch),
        steps,
        world,
        accum,
        clip,
        getattr(reference, optimizer),
    )


def expected_of(case: Case) -> Any:
    return expected(case.model, case.batch, case.steps, case.world, case.accum, case.clip, case.optimizer)


def assert_close(got: Sequence[float], wanted: Sequence[float], relative: float, what: str = "") -> None:
    """Every number within `relative` of its reference, and finite."""
    assert len(got) == len(wanted), f"{what}: {len(got)} values, wanted {len(wanted)}"
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert abs(a - b) <= relative * max(abs(b), 1e-12), f"{what}: value {index} is {a!r}, wanted {b!r}"


def assert_tensors(got: dict[str, Any], wanted: dict[str, Any], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Same names, close values; `rtol=atol=0` for equality to the last bit."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name] is not None, name
        torch.testing.assert_close(
            got[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_matches(case: Case, runs: Sequence[Run], relative: float = 1e-6) -> None:
    """The runs of all ranks equal the reference: loss of each step on each rank, norm of each step, weights."""
    wanted = expected_of(case)
    for rank, run in enumerate(runs):
        assert_close(run.losses, [step[rank] for step in wanted.losses], relative, f"{case}, loss of rank {rank}")
        assert_close(run.norms, wanted.norms, 1e-5, f"{case}, norm on rank {rank}")
        assert_tensors(run.params, wanted.params)


def assert_identical(a: Run, b: Run) -> None:
    """Two runs agree to the last bit."""
    assert a.losses == b.losses
    assert a.norms == b.norms
    assert_tensors(a.params, b.params, 0, 0)
