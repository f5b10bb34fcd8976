# SPDX-License-Identifier: Apache-2.0
"""Promise: hpZ is a cache that nobody can read stale (H1, H2, H4), on NCCL as on gloo.

The same script of everything that writes weights runs with and without hpZ, in the same layout. After each write, an
evaluation, k micro-batches with recomputation and a step must give the same bits, and the weights that a forward sees
must be those of a plain module that was given the fp32 masters.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param
from tests.dist.support import full_params
from tests.gpu import place
from tests.gpu.train import Case, engine_of

Event = Callable[[Any, str], None]
MODEL = "blocks_non_reentrant"


def _param(engine: Any, name: str = "layers.1.up.weight") -> Any:
    return dict(engine.module.named_parameters())[name]


def _modifier(engine: Any, folder: str) -> None:
    param = _param(engine)
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.mul_(0.5 if dist.get_rank() == 0 else 3.0)


def _partition(engine: Any, folder: str) -> None:
    param = _param(engine, "layers.0.down.weight")
    param.all_gather()
    with torch.no_grad():
        param.data.mul_(1.5)
    param.partition(has_been_updated=True)


def _load_state_dict(engine: Any, folder: str) -> None:
    state = {name: value * 0.9 for name, value in full_params(engine.module).items()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.load_state_dict(state)


def _initialise_again(engine: Any, folder: str) -> None:
    param = _param(engine, "embed.weight")
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        torch.manual_seed(3)
        torch.nn.init.normal_(param, std=0.3)


def _set_full(engine: Any, folder: str) -> None:
    param = _param(engine, "norm.weight")
    safe_set_full_fp32_param(param, torch.linspace(0.5, 1.5, param.ds_numel, device=place.device()))


def _set_local(engine: Any, folder: str) -> None:
    for param in engine.module.parameters():
        local = safe_get_local_fp32_param(param)
        if local is not None:
            safe_set_local_fp32_param(param, local * 1.1)


def _reload_states(engine: Any, folder: str) -> None:
    engine.offload_states()
    engine.reload_states()


def _load(engine: Any, folder: str, **options: Any) -> None:
    path, _ = engine.load_checkpoint(folder, **options)
    assert path is not None


def _merge(sign: float, engine: Any, folder: str) -> None:
    """What merging and unmerging a LoRA adapter does to a base weight."""
    param = _param(engine, "layers.2.up.weight")
    rows = torch.arange(param.ds_shape[0], device=place.device()).float().unsqueeze(1) / 50
    columns = torch.arange(param.ds_shape[1], device=place.device()).float().unsqueeze(0) / 70
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.add_((sign * (rows @ columns)).to(param.dtype))


def _swap_average(engine: Any, folder: str) -> None:
    """EMA weights swapped in, evaluated, swapped out."""
    params = list(engine.module.parameters())
    mine = full_params(engine.module)
    for factor in (0.7, 1.0):
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for name, param in engine.module.named_parameters():
                param.copy_(mine[name] * factor)
        if factor != 1.0:
            _evaluate(engine)


EVENTS: dict[str, Event] = {
    "step": lambda engine, folder: None,
    "gathered, modifier rank": _modifier,
    "partition(has_been_updated)": _partition,
    "load_state_dict": _load_state_dict,
    "initialised again": _initialise_again,
    "safe_set_full": _set_full,
    "safe_set_local": _set_local,
    "reload_states": _reload_states,
    "load_checkpoint": _load,
    "load_checkpoint, weights and no moments": functools.partial(_load, load_optimizer_states=False),
    "load_checkpoint, module only": functools.partial(_load, load_module_only=True),
    "LoRA merge": functools.partial(_merge, 1.0),
    "LoRA unmerge": functools.partial(_merge, -1.0),
    "EMA swap": _swap_average,
}


def _evaluate(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(*place.batches()(999, dist.get_rank()))
    engine.train()
    return float(loss)


def _plain_loss(engine: Any) -> float:
    """The same evaluation by an unsharded module that holds the same weights."""
    plain = place.build(MODEL)
    weights = full_params(engine.module)
    plain.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    plain.eval()
    with torch.no_grad():
        return float(plain(*place.batches()(999, dist.get_rank())))


def _script(case: Case, folder: str) -> dict[str, list[float]]:
    """By event: evaluation, k losses, the gradient norm, evaluation after the step; and what a plain module says."""
    place.exact()
    engine = engine_of(case)
    rank, seen, step = dist.get_rank(), {}, 0
    for index, (name, event) in enumerate(EVENTS.items()):
        event(engine, folder)
        numbers = [_evaluate(engine), _plain_loss(engine)]
        for micro in range(case.accum):
            loss = engine(*place.batches()(step, rank, micro))
            engine.backward(loss)
            engine.step()
            numbers.append(float(loss.detach()))
        step += 1
        numbers += [float(engine.get_global_grad_norm()), _evaluate(engine), _plain_loss(engine)]
        seen[name] = numbers
        if index == 0:
            engine.save_checkpoint(folder)
    engine.destroy()
    return seen


def _both(cases: list[Case], folder: str) -> list[dict[str, list[float]]]:
    return [_script(case, f"{folder}/{index}") for index, case in enumerate(cases)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", place.worlds(2, 4))
def test_every_write_is_seen(world: int, dtype: str) -> None:
    cases = [
        Case(model=MODEL, dtype=dtype, hpz=hpz, accum=2, clip=0.5, limits=limits)
        for limits in ("nothing stays", "no reuse")
        for hpz in sorted({1, 2, world})
    ]
    groups = len({1, 2, world})
    with tempfile.TemporaryDirectory(prefix="hpz-") as folder:
        results = place.launch(_both, world, cases, str(Path(folder)), limit=80)
    problems = []
    for rank, scripts in enumerate(results):
        for index, (case, seen) in enumerate(zip(cases, scripts, strict=True)):
            without = scripts[index - index % groups]
            for event, numbers in seen.items():
                where = f"rank {rank}, hpZ {case.hpz}, {case.limits}, {event}: {numbers}"
                if numbers != without[event]:
                    problems.append(f"{where}; without hpZ {without[event]}")
                for found, plain in (numbers[:2], numbers[-2:]):
                    if not abs(found - plain) <= 1e-6 * abs(plain):
                        problems.append(f"{where}: a plain module with the same weights says {plain}, not {found}")
    assert not problems, "\n".join(problems[:6])


def _count(micro_batches: int, hpz: int) -> dict[str, int]:
    """Gathers of one optimizer step, after two that warmed up."""
    engine = engine_of(
        Case(model=MODEL, dtype="bf16", hpz=hpz, accum=micro_batches, zero=(("stage3_max_reuse_distance", 0),))
    )
    for step in range(3):
        engine.communication_stats(reset=True)
        for micro in range(micro_batches):
            engine.backward(engine(*place.batches()(step, dist.get_rank(), micro)))
            engine.step()
    stats = {**engine.communication_stats(), "units": len(engine.optimizer.sharded.fetcher.units), "k": micro_batches}
    engine.destroy()
    return stats


def _counts(hpz: int) -> list[dict[str, int]]:
    return [_count(micro, hpz) for micro in (1, 2, 4)]


@place.needs(4)
def test_each_weight_crosses_groups_once_per_step() -> None:
    """Whatever the number of micro-batches, and with recomputation (H4). The last unit of a forward stays for the
    backward, which begins with it."""
    for stats in place.launch(_counts, 4, 2)[0]:
        assert stats["gathers_across"] == stats["units"], stats
        assert stats["gathers_inside"] >= (2 * stats["k"] - 1) * (stats["units"] - 1), stats


@place.needs(2)
def test_within_one_group_nothing_crosses() -> None:
    for stats in place.launch(_counts, 2, 2)[0]:
        assert stats["gathers_across"] == 0, stats
        assert stats["gathers_inside"] >= 2 * stats["k"] * (stats["units"] - 1), stats
