# SPDX-License-Identifier: Apache-2.0
"""A rank of the test that trains across hosts: three steps, the losses and the gathers of each pass, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

HPZ = 2
STEPS = 3
ROWS = 4


def build() -> torch.nn.Module:
    """Four blocks with uneven shapes."""
    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(7, 15), torch.nn.Linear(15, 7)) for _ in range(4)))


def batch(step: int, rank: int) -> torch.Tensor:
    """The rows of one rank in one step."""
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def reference(ranks: int) -> list[float]:
    """Losses of the global batch in plain torch, one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(torch.cat([batch(step, rank) for rank in range(ranks)])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    import deepspeed

    rank = int(os.environ["RANK"])
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": HPZ,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    engine, *_ = deepspeed.initialize(model=build(), config=config)
    steps = []
    for step in range(STEPS):
        engine.communication_stats(reset=True)
        loss = engine(batch(step, rank)).square().mean()
        forward = engine.communication_stats(reset=True)
        engine.backward(loss)
        backward = engine.communication_stats(reset=True)
        engine.step()
        torch.distributed.all_reduce(loss := loss.detach() / torch.distributed.get_world_size())
        steps.append({"loss": loss.item(), "forward": forward, "backward": backward})
    Path(os.environ["DS_TEST_OUT"], f"steps{rank}").write_text(json.dumps(steps))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    main()
