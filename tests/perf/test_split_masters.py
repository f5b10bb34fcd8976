# SPDX-License-Identifier: Apache-2.0
"""Split masters behave as fp32 masters do: training, reading, writing, edits, checkpoints, offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import ConfigError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from tests.harness.pool import run_ranks


def _engine(split: bool | None, dtype: str = "bf16", sub_group_size: int = 40, lr: float = 1e-2) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(7, 15), nn.GELU(), nn.Linear(15, 3))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "split_master_weights": split,
            "sub_group_size": sub_group_size,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def _train(engine: Any, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed + torch.distributed.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 7, generator=generator).to(torch.bfloat16)
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _masters(engine: Any) -> list[torch.Tensor]:
    found = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return [value for value in found if value is not None]


def _trains_alike() -> None:
    split, plain = _engine(True), _engine(False)
    for sub in split.optimizer.master.sub_groups:
        assert sub.low is not None and sub.master.untyped_storage().nbytes() == 0
    for a, b in zip(_train(split, 6), _train(plain, 6), strict=True):
        assert abs(a - b) <= 2e-2 * abs(b), (a, b)
    for a, b in zip(_masters(split), _masters(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
        assert not torch.equal(a, a.to(torch.bfloat16).float())  # more than the shard holds
    for p in split.module.parameters():
        first = safe_get_full_optimizer_state(p, "exp_avg")
        assert first is not None and first.shape == p.ds_shape and bool(first.any())


def _reads_what_was_written() -> None:
    engine = _engine(True)
    _train(engine, 1)
    p = next(engine.module.parameters())
    value = torch.randn(p.ds_shape, generator=torch.Generator().manual_seed(3))
    safe_set_full_fp32_param(p, value)
    assert torch.equal(safe_get_full_fp32_param(p), value)
    with deepspeed.zero.GatheredParameters([p]):
        torch.testing.assert_close(p.detach().float(), value, rtol=2**-8, atol=0)
        before = p.detach().clone()
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
        with torch.no_grad():
            p[0, :3] = 0.5
    after = safe_get_full_fp32_param(p)
    assert bool((after[0, :3] == 0.5).all())
    same = torch.ones(p.ds_shape, dtype=torch.bool)
    same[0, :3] = before[0, :3] == 0.5
    assert torch.equal(after[same], value[same])
    engine.optimizer.refresh_fp32_params()
    assert torch.equal(safe_get_full_fp32_param(p), after.to(torch.bfloat16).float())


def _saves_and_loads(folder: str) -> None:
    engine = _engine(True)
    _train(engine, 2)
    engine.save_checkpoint(folder)
    expected = _masters(engine)
    further = _train(engine, 2, seed=50)
    for split in (True, False):
        other = _engine(split)
        other.load_checkpoint(folder)
        for a, b in zip(_masters(other), expected, strict=True):
            assert torch.equal(a, b)
        again = _train(other, 2, seed=50)
        if split:
            assert again == further
        else:
            assert all(abs(a - b) <= 2e-2 * abs(b) for a, b in zip(again, further, strict=True))


def _goes_to_the_host_and_back() -> None:
    engine = _engine(True)
    _train(engine, 2)
    expected = _masters(engine)
    engine.offload_states()
    engine.reload_states()
    assert all(torch.equal(a, b) for a, b in zip(_masters(engine), expected, strict=True))
    _train(engine, 1)


def test_training() -> None:
    run_ranks(_trains_alike, 2)


def test_reading_writing_and_edits() -> None:
    run_ranks(_reads_what_was_written, 2)


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(_saves_and_loads, 2, str(tmp_path))


def test_offloading() -> None:
    run_ranks(_goes_to_the_host_and_back, 2)


def _refuses_fp32() -> None:
    with pytest.raises(ConfigError, match="split_master_weights"):
        _engine(True, dtype="fp32")
    assert _engine(None).optimizer.master.sub_groups[0].low is None  # no kernel on a CPU


def test_refused_where_it_cannot_be() -> None:
    run_ranks(_refuses_fp32, 2)
