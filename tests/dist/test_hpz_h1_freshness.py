# SPDX-License-Identifier: Apache-2.0
"""Promise H1: no gather ever returns bytes of a secondary shard that is older than the primary.

The truth is read from the primary shards by a plain `torch.distributed` call inside every forward, after random
sequences of writes. Forgetting to invalidate is tried, too: every function that declares a copy invalid does nothing.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.zero.core.param import ShardedParam
from tests.dist.support import initialize, settings, train
from tests.harness import models
from tests.harness.pool import RankError, run_ranks


def truth(param: Any) -> Tensor:
    """The newest weights, put together from every rank's primary shard."""
    pieces = [torch.empty_like(param.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, param.ds_tensor.contiguous())
    return torch.cat(pieces)[: param.ds_numel].view(param.ds_shape)


def compare(module: nn.Module, _args: Any) -> None:
    for name, param in module.named_parameters(recurse=False):
        assert torch.equal(param.detach(), truth(param)), f"{name} is not what the primary shards hold"


def write_gathered(engine: Any, step: int, draw: random.Random) -> None:
    params = [p for p in engine.module.parameters() if draw.random() < 0.5]
    with deepspeed.zero.GatheredParameters(params, modifier_rank=step % 4), torch.no_grad():
        for param in params:
            param.add_(0.01 * step)


def write_directly(engine: Any, step: int, draw: random.Random) -> None:
    for param in engine.module.parameters():
        if draw.random() < 0.5:
            deepspeed.utils.safe_set_full_fp32_param(param, torch.full(param.ds_shape, 0.001 * step))


def train_a_step(engine: Any, step: int, draw: random.Random) -> None:
    train(engine, models.batch, [step], accum=draw.choice((1, 2)), boundary=True)


def read(engine: Any, step: int, draw: random.Random) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())[step % 3 :: 2]):
        pass


def evaluate(engine: Any, step: int, draw: random.Random) -> None:
    with torch.no_grad():
        engine(*models.batch(step, dist.get_rank()))


def release(engine: Any, step: int, draw: random.Random) -> None:
    engine.empty_partition_cache()


WRITES = (write_gathered, write_directly, train_a_step, read, evaluate, release)


def random_sequence(seed: int, limits: dict[str, int]) -> int:
    engine = initialize(models.uneven(), settings(hpz=2, zero=limits))
    for module in engine.module.modules():
        if module is not engine.module:
            module.register_forward_pre_hook(compare)
    draw = random.Random(seed)
    for step in range(30):
        draw.choice(WRITES)(engine, step, draw)
        evaluate(engine, step, draw)
    served = engine.communication_stats()["gathers_inside"]
    engine.destroy()
    return served


def forgetful(seed: int) -> int:
    with mock.patch.object(ShardedParam, "drop_secondary", lambda self: None):
        return random_sequence(seed, {})


def gullible(seed: int) -> int:
    """A secondary that is taken for valid whenever it exists: what upstream did."""

    class AlwaysEqual(int):
        """A version that equals every other once a copy was made."""

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    original = type(initialize(models.uneven(), settings(hpz=2)).module.up.weight._sharded.unit).refresh_secondaries

    def refresh(unit: Any, params: list[ShardedParam]) -> None:
        original(unit, params)
        for p in params:
            p.secondary_version = AlwaysEqual(p.version)

    with mock.patch("deepspeed.runtime.zero.core.unit.ShardedUnit.refresh_secondaries", refresh):
        return random_sequence(seed, {})


@pytest.mark.parametrize("seed", [1, 2])
def test_gathers_return_the_newest_weights(seed: int) -> None:
    limits = {} if seed == 1 else {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
    served = run_ranks(random_sequence, 4, seed, limits)
    assert all(count > 20 for count in served), "the secondary shards served nothing, so this test saw nothing"


def test_forgetting_to_invalidate_is_harmless() -> None:
    run_ranks(forgetful, 4, 3)


def test_the_comparison_notices_a_stale_copy() -> None:
    """Without versions the same sequence fails: the promise is kept by them and not by luck."""
    with pytest.raises(RankError, match="not what the primary shards hold"):
        run_ranks(gullible, 4, 1)
