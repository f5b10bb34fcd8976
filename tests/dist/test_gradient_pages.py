# SPDX-License-Identifier: Apache-2.0
"""Gradient shards live in pages that appear one by one: how many there are changes nothing, for any way of stepping."""

from __future__ import annotations

import pytest
import torch

from tests.harness import models
from tests.harness.pool import run_ranks

OPTIMIZERS = [
    {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    {"type": "Lion", "params": {"lr": 1e-3}},
]


def _train(page_numel: int, section: dict, bf16: bool) -> tuple[list[float], int, torch.Tensor]:
    import deepspeed
    from deepspeed.runtime.zero.core import grads
    from deepspeed.utils import safe_get_full_grad

    before, grads.PAGE_NUMEL = grads.PAGE_NUMEL, page_numel
    try:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": section,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        model = models.blocks()
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    finally:
        grads.PAGE_NUMEL = before
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(4):
        for micro in range(2):
            loss = engine(*models.batch(step, rank, micro))
            engine.backward(loss)
            if step == 3 and micro == 1:
                gradient = safe_get_full_grad(model.layers[1].up.weight).clone()
            engine.step()
            losses.append(loss.item())
    pages = sum(len(each) for each in optimizer.grad_shards.pages)
    engine.destroy()
    return losses, pages, gradient


@pytest.mark.parametrize("bf16", [False, True])
def test_many_pages_train_as_one(bf16: bool) -> None:
    for section in OPTIMIZERS:
        for one, many in zip(
            run_ranks(_train, 2, 1 << 24, section, bf16), run_ranks(_train, 2, 8, section, bf16), strict=True
        ):
            assert one[1] == 1 and many[1] >= 3
            # not to the last bit: a kernel's vector loop rounds differently from the loop over its rest (FMA), and
            # pages move the rests
            assert one[0] == pytest.approx(many[0], rel=1e-6)
            torch.testing.assert_close(one[2], many[2], rtol=1e-5, atol=1e-7)
