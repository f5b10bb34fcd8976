# SPDX-License-Identifier: Apache-2.0
"""Training runs on ranks: one engine per case, and the plain-torch run that it must equal. Module-level functions."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.support import LIMITS, Run, full_params, initialize, settings
from tests.dist.support import train as train_engine
from tests.gpu import place
from tests.harness import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}  # what reference.adamw does


@dataclass(frozen=True)
class Case:
    """One run. `fused`: the configured AdamW with its one-pass kernel, else torch's own Adam on flat shards."""

    model: str = "uneven"
    batch: str = "batch"
    dtype: str = "fp32"
    accum: int = 1
    clip: float = 0.0
    hpz: int = 1
    steps: int = 10
    limits: str = "no persistence"
    fused: bool = True
    zero: tuple[tuple[str, Any], ...] = ()


@dataclass
class Compared:
    """A rank's run beside the reference; tensors on the host."""

    run: Run
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    worst_param: float = 0.0
    worst_name: str = ""


def engine_of(case: Case) -> Any:
    """The engine of a case."""
    extra: dict[str, Any] = {"bf16": {"enabled": True}} if case.dtype == "bf16" else {}
    if case.fused:
        extra["optimizer"] = ADAMW
    config = settings(
        hpz=case.hpz, accum=case.accum, clip=case.clip, zero={**LIMITS[case.limits], **dict(case.zero)}, **extra
    )
    model = place.build(case.model)
    if not case.fused:
        return initialize(model, config, reference.adam)
    return initialize(model, config, None, model_parameters=[p for p in model.parameters() if p.requires_grad])


def on_host(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.cpu() for name, param in params.items()}


def run_case(case: Case) -> Run:
    """Train one case; leaves nothing behind."""
    engine = engine_of(case)
    losses, norms = train_engine(engine, place.batches(case.batch), range(case.steps), case.accum)
    run = Run(losses, norms, on_host(full_params(engine.module)), engine.communication_stats())
    engine.destroy()
    del engine
    gc.collect()
    return run


def run_cases(cases: list[Case], exact: bool = False) -> list[Run]:
    """Several cases in one launch; `exact`: with deterministic kernels."""
    if exact:
        place.exact()
    return [run_case(case) for case in cases]


def compare_cases(cases: list[Case]) -> list[Compared]:
    """Several cases, each beside plain torch on this rank's device with the batches of all ranks."""
    compared = []
    for case in cases:
        run = run_case(case)
        world, rank, dtype = dist.get_world_size(), dist.get_rank(), DTYPES[case.dtype]
        wanted = reference.train(
            lambda case=case: place.build(case.model),
            place.batches(case.batch),
            case.steps,
            world,
            case.accum,
            case.clip,
            reference.adamw if case.fused else reference.adam,
            dtype,
            None if case.dtype == "fp32" else dtype,
        )
        found = Compared(run, [step[rank] for step in wanted.losses], wanted.norms)
        for name, param in wanted.params.items():
            worst = (run.params[name].float() - param.cpu().float()).abs().max().item()
            if worst > found.worst_param:
                found.worst_param, found.worst_name = worst, name
        run.params = {}
        compared.append(found)
    return compared


def worst(got: list[float], wanted: list[float]) -> float:
    """Largest relative difference."""
    assert len(got) == len(wanted)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(got, wanted, strict=True))
