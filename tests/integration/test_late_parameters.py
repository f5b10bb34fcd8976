# SPDX-License-Identifier: Apache-2.0
"""Parameters that join a sharded module after zero.Init: adapters, copies, replaced embeddings.

What is known to be fresh must stay so: with hpZ, a module whose old parameter has a valid secondary and whose new one
has none must not lose the old one's weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks


class Grown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) * self.late).sum()  # type: ignore[operator]


def grow(hpz: int, frozen: bool) -> dict[str, Any]:
    """Runs on every rank."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 0.0}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Grown()
    model.base.weight.requires_grad_(not frozen)
    model.base.late = nn.Parameter(torch.full((3,), 2.0))
    model.late = nn.Parameter(torch.full((7,), 3.0))
    with deepspeed.zero.GatheredParameters(list(model.base.parameters())):
        before = model.base.weight.detach().clone()
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    seen = []
    for _ in range(2):
        loss = engine(torch.ones(1, 5))
        engine.backward(loss)
        engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            seen.append(
                [model.base.weight.detach().clone(), model.base.late.detach().clone(), model.late.detach().clone()]
            )
    engine.destroy()
    return {"before": before, "seen": seen}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("hpz", [1, 2, 4])
def test_old_and_new_parameters_keep_their_weights(hpz: int, frozen: bool) -> None:
    results = run_ranks(grow, 4, hpz, frozen)
    for got in results:
        assert torch.equal(got["before"], results[0]["before"]) and got["before"].abs().sum() > 0
        for weight, inner, outer in got["seen"]:
            assert torch.equal(weight, got["before"])
            assert torch.equal(inner, torch.full((3,), 2.0)) and torch.equal(outer, torch.full((7,), 3.0))
