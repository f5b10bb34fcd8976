# SPDX-License-Identifier: Apache-2.0
"""An unchanged Trainer script on a machine without an accelerator: the Trainer knows every rank without `use_cpu`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.integration import tiny

WORLD = 2


def arguments(out: str, port: int) -> list[tuple[int, int, str, int]]:
    """Runs on every rank: (world size, process index, device, global batch) as the Trainer sees them."""
    import os

    import transformers

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", ACCELERATE_TORCH_DEVICE="cpu"
    )
    tiny.forget_clients()
    found = []
    for _ in range(2):  # the first makes the process group, the second finds it
        args = transformers.TrainingArguments(
            output_dir=out, per_device_train_batch_size=3, deepspeed=tiny.ds_config(), report_to="none"
        )
        batch = args.hf_deepspeed_config.config["train_batch_size"]
        found.append((args.world_size, args.process_index, str(args.device), batch))
    tiny.forget_clients()
    return found


@pytest.fixture
def port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_the_trainer_knows_every_rank_without_use_cpu(tmp_path: Path, port: int) -> None:
    found = run_ranks(arguments, WORLD, str(tmp_path), port, init_group=False, timeout=120)
    assert found == [2 * [(WORLD, rank, "cpu", 3 * WORLD)] for rank in range(WORLD)]
