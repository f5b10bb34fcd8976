# SPDX-License-Identifier: Apache-2.0
"""Promise H3: the names that the change is known by exist and lie on the path.

`Init._partition(.., has_been_updated)` hands the flag to `_partition_param_sec`, which rewrites the secondary at once;
`load_checkpoint` calls `invalidate_secondary_tensor`; `ds_secondary_tensor` is None where there is no valid copy.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.runtime.zero.partition_parameters import Init
from tests.dist.support import initialize, settings, train
from tests.harness import models
from tests.harness.pool import run_ranks


def flags_seen(under_init: bool) -> dict[str, list[bool]]:
    """The flag of every call of `_partition_param_sec` while leaving a context, by modifier rank."""
    config = settings(hpz=2)
    if under_init:
        with Init(config_dict_or_path=config):
            module = models.uneven()
    else:
        engine = initialize(models.uneven(), config)
        module = engine.module
    seen: dict[str, list[bool]] = {}
    real = Init._partition_param_sec
    for name, modifier in (("read", None), ("write", 0), ("write on 3", 3)):
        calls: list[bool] = []

        def spy(params: Any, has_been_updated: bool = False, calls: list[bool] = calls) -> None:
            calls.append(has_been_updated)
            real(params, has_been_updated)

        with mock.patch.object(Init, "_partition_param_sec", staticmethod(spy)):
            with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=modifier):
                pass
        seen[name] = calls
        if modifier is not None:
            assert all(p.ds_secondary_tensor is not None for p in module.parameters())
    return seen


def no_gather_across_after_a_write() -> dict[str, int]:
    """The full weights were at hand on every rank: the next forward stays inside its group."""
    engine = initialize(models.uneven(), settings(hpz=2))
    with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for param in engine.module.parameters():
            param.data.mul_(0.5)
    engine.communication_stats(reset=True)
    with torch.no_grad():
        engine(*models.batch(0, dist.get_rank()))
    return engine.communication_stats()


def states_of_the_secondary() -> list[list[bool]]:
    """Whether each parameter has a valid copy: at the start, after a forward, a step, a forward."""
    engine = initialize(models.uneven(), settings(hpz=2))
    params = list(engine.module.parameters())
    found = [[p.ds_secondary_tensor is not None for p in params]]
    loss = engine(*models.batch(0, dist.get_rank()))
    found.append([p.ds_secondary_tensor is not None for p in params])
    engine.backward(loss)
    engine.step()
    found.append([p.ds_secondary_tensor is not None for p in params])
    with torch.no_grad():
        engine(*models.batch(1, dist.get_rank()))
    found.append([p.ds_secondary_tensor is not None for p in params])
    for p in params:
        world, size = 4, p.ds_secondary_tensor_group_size
        assert size == 2 and p.ds_secondary_tensor_num_of_groups == 2
        assert p.ds_secondary_tensor.numel() == p.ds_tensor.numel() * world // size
        assert p.ds_zero_param_process_group is not None
    return found


def calls_while_loading() -> tuple[int, bool]:
    engine = initialize(models.uneven(), settings(hpz=2))
    folder = [tempfile.mkdtemp(prefix="hpz-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0])
    train(engine, models.batch, range(1))
    real = engine.optimizer.invalidate_secondary_tensor
    with mock.patch.object(engine.optimizer, "invalidate_secondary_tensor", side_effect=real) as spy:
        engine.load_checkpoint(folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return spy.call_count, all(p.ds_secondary_tensor is None for p in engine.module.parameters())


def test_the_flag_is_handed_on() -> None:
    for under_init in (False, True):
        for seen in run_ranks(flags_seen, 4, under_init):
            assert seen["read"] and not any(seen["read"])
            assert seen["write"] and all(seen["write"])
            assert seen["write on 3"] and all(seen["write on 3"])


def test_a_write_refreshes_the_secondary_at_once() -> None:
    for stats in run_ranks(no_gather_across_after_a_write, 4):
        assert stats["gathers_across"] == 0
        assert stats["gathers_inside"] > 0


def test_secondary_is_none_unless_valid() -> None:
    for start, forward, step, again in run_ranks(states_of_the_secondary, 4):
        assert not any(start) and all(forward) and not any(step) and all(again)


def test_loading_invalidates() -> None:
    for calls, none_left in run_ranks(calls_while_loading, 4):
        assert calls >= 1 and none_left
