# SPDX-License-Identifier: Apache-2.0
"""The harness keeps its promises: results in rank order, failures with rank and traceback, hangs end, pools recover."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankError, run_fresh, run_ranks


def rank_sum(scale: float) -> tuple[int, int, float, str]:
    value = torch.full((3,), float(dist.get_rank()) * scale)
    dist.all_reduce(value)
    os.environ["LEFT_BEHIND"] = "1"
    return dist.get_rank(), dist.get_world_size(), value.sum().item(), os.environ["LOCAL_RANK"]


def env_is_clean() -> bool:
    return "LEFT_BEHIND" not in os.environ


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise KeyError("broken here")
    dist.barrier()


def one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stall() -> None:
    time.sleep(60)


def big_tensor() -> torch.Tensor:
    return torch.arange(300_000)


@pytest.mark.parametrize("world", [1, 2, 4, 3])
def test_results_in_rank_order_at_every_world_size(world: int) -> None:
    total = 3 * 2.0 * sum(range(world))
    assert run_ranks(rank_sum, world, 2.0) == [(r, world, total, str(r)) for r in range(world)]
    assert run_ranks(env_is_clean, world) == [True] * world


def test_tensors_come_back_whole() -> None:
    for tensor in run_ranks(big_tensor, 2):
        assert torch.equal(tensor, torch.arange(300_000))


def test_failure_names_rank_and_line_while_others_hang_and_the_pool_recovers() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="broken here") as caught:
        run_ranks(one_fails, 2, timeout=40)
    assert time.monotonic() - start < 20
    assert caught.value.failures[1][0] == "KeyError"
    assert "one_fails" in str(caught.value)
    assert run_ranks(rank_sum, 2, 1.0)[1][2] == 3.0


def test_hang_ends_and_shows_where() -> None:
    with pytest.raises(RankError, match="in stall") as caught:
        run_ranks(stall, 1, timeout=6)
    assert caught.value.failures[0][0] == "NoAnswer"


def test_fresh_processes_report_exit_codes() -> None:
    survivor, killed = run_fresh(one_dies, 2, timeout=40, group_timeout=5)
    assert killed.returncode == -signal.SIGKILL
    assert survivor.returncode == 1
    assert survivor.error_type is not None
