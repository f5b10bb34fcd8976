# SPDX-License-Identifier: Apache-2.0
"""generate() on sharded weights gives what plain weights give, before and after a training step, with and without
hpZ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration import tiny

WORLD = 4


def _prompt(rank: int) -> torch.Tensor:
    return torch.tensor([list(tiny.TEXT[10 * rank : 10 * rank + 4])])


def _generate(model: Any, rank: int, synced: bool) -> list[int]:
    done = model.generate(
        _prompt(rank),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        max_new_tokens=6 + rank,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        synced_gpus=synced,
    )
    return done[0].tolist()


def _model() -> Any:
    import transformers

    torch.manual_seed(31)
    return transformers.AutoModelForCausalLM.from_config(tiny.config())


def _batch(rank: int) -> torch.Tensor:
    return torch.tensor([row["input_ids"] for row in tiny.samples(2, start=2 * rank)])


def plain() -> list[list[list[int]]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    before = [_generate(model.eval(), rank, False) for rank in range(WORLD)]
    for _ in range(3):
        optimizer.zero_grad()
        ids = torch.cat([_batch(rank) for rank in range(WORLD)])
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return [before, [_generate(model.eval(), rank, False) for rank in range(WORLD)]]


def sharded(hpz: int) -> list[list[int]]:
    """Runs on every rank; ranks generate texts of different lengths, as sampling with stop tokens does."""
    import deepspeed

    model = _model()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": hpz,
                "stage3_param_persistence_threshold": 0,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.01}},
        },
    )
    rank = engine.global_rank
    engine.eval()
    before = _generate(engine.module, rank, True)
    for _ in range(3):
        ids = _batch(rank)
        engine.train()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.eval()
    after = _generate(engine.module, rank, True)
    engine.destroy()
    return [before, after]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return run_ranks(plain, 1, init_group=False)[0]


@pytest.mark.parametrize("hpz", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_generate_equals_plain(hpz: int, expected: list[list[list[int]]]) -> None:
    assert expected[0] != expected[1]
    for rank, got in enumerate(run_ranks(sharded, WORLD, hpz, timeout=120)):
        for moment, name in enumerate(("before", "after")):
            want = expected[moment][rank]
            assert got[moment][: len(want)] == want, name
