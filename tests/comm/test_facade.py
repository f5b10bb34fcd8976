# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm computes what torch.distributed computes, adopts foreign groups, and counts only when asked."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from tests.harness import run_ranks


def collectives() -> dict[str, Any]:
    import deepspeed.comm as dist

    dist.init_distributed(verbose=False)  # adopts the harness' group
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2,), float(rank + 1))
    reduced = mine.clone()
    dist.all_reduce(reduced)
    largest = mine.clone()
    pending = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
    assert pending is not None and pending.wait() is not None
    listed = [torch.empty(2) for _ in range(world)]
    dist.all_gather(listed, mine)
    flat = torch.empty(2 * world)
    dist.all_gather_into_tensor(flat, mine)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, flat.clone())
    several = [torch.empty(2 * world), torch.empty(2 * world)]
    dist.all_gather_coalesced(several, [mine, mine * 2])
    both = [mine.clone(), mine.clone() * 10]
    dist.all_reduce_coalesced(both)
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.arange(world, dtype=torch.float32) + 10 * rank)
    if rank == 0:
        dist.send(mine, dst=1)
    elif rank == 1:
        dist.recv(sent, src=0)
    pair = dist.new_group([0, 1])
    dist.barrier()
    return {
        "reduced": reduced.tolist(),
        "largest": largest.tolist(),
        "listed": torch.cat(listed).tolist(),
        "flat": flat.tolist(),
        "scattered": scattered.tolist(),
        "several": torch.cat(several).tolist(),
        "both": torch.cat(both).tolist(),
        "sent": sent.tolist(),
        "objects": objects,
        "swapped": swapped.tolist(),
        "pair": dist.get_all_ranks_from_group(pair),
        "same_group": dist.get_world_group() is torch_dist.group.WORLD,
        "passthrough": dist.get_process_group_ranks is torch_dist.get_process_group_ranks,
        "local_rank": dist.get_local_rank(),
    }


def test_collectives_equal_arithmetic() -> None:
    world = 3
    flat = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    for rank, got in enumerate(run_ranks(collectives, world)):
        assert got["reduced"] == [6.0, 6.0]
        assert got["largest"] == [3.0, 3.0]
        assert got["listed"] == got["flat"] == flat
        assert got["scattered"] == [3.0 * (rank + 1)] * 2
        assert got["several"] == flat + [2 * x for x in flat]
        assert got["both"] == [6.0, 6.0, 60.0, 60.0]
        assert got["sent"] == ([1.0, 1.0] if rank == 1 else [2.0, 2.0])
        assert got["objects"] == [{"rank": r} for r in range(world)]
        assert got["swapped"] == [10.0 * r + rank for r in range(world)]
        assert got["pair"] == [0, 1]
        assert got["same_group"] and got["passthrough"]
        assert got["local_rank"] == rank


def counting() -> dict[str, Any]:
    import deepspeed.comm as dist
    from deepspeed.comm.comms_logger import LOGGER
    from deepspeed.utils import groups

    LOGGER.reset()
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    silent = dict(LOGGER.totals)
    dist.configure({"comms_logger": {"enabled": True}})
    pair = groups.hpz_group(4, 2)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=pair)
    dist.all_gather_into_tensor(torch.empty(16), tensor, group=pair)
    LOGGER.record("gather", "hpz", 100, 3)
    text = LOGGER.summary()
    dist.log_summary(show_straggler=True)
    counts = {key: (total.calls, total.nbytes) for key, total in LOGGER.totals.items()}
    by_group = {name: (total.calls, total.nbytes) for name, total in LOGGER.by_group().items()}
    LOGGER.configure(prof_all=False, prof_ops=["broadcast"])
    dist.all_reduce(tensor)
    unprofiled = LOGGER.totals[("all_reduce", "world")].calls
    LOGGER.configure({"enabled": False})
    LOGGER.configure(prof_all=True, prof_ops=[])
    LOGGER.reset()
    return {"silent": silent, "counts": counts, "by_group": by_group, "text": text, "unprofiled": unprofiled}


def test_logger_counts_by_operation_and_group() -> None:
    for got in run_ranks(counting, 4):
        assert got["silent"] == {}
        assert got["counts"] == {
            ("all_reduce", "world"): (1, 32),
            ("all_reduce", "hpz"): (1, 32),
            ("all_gather_into_tensor", "hpz"): (1, 64),
            ("gather", "hpz"): (3, 100),
        }
        assert got["by_group"] == {"world": (1, 32), "hpz": (5, 196)}
        assert "all_reduce" in got["text"] and "hpz" in got["text"]
        assert got["unprofiled"] == 1


def shared_groups() -> dict[str, Any]:
    import deepspeed.comm as dist
    from deepspeed.errors import ConfigError
    from deepspeed.utils import groups

    first, second = groups.hpz_group(4, 2), groups.hpz_group(4, 2)
    refused = ""
    try:
        groups.hpz_group(4, 3)
    except ConfigError as exc:
        refused = str(exc)
    return {
        "shared": first is second,
        "ranks": dist.get_all_ranks_from_group(first),
        "whole": groups.hpz_group(4, 4) is dist.get_world_group(),
        "off": groups.hpz_group(4, 1),
        "refused": refused,
        "timeout": groups._timeout(first) == groups._timeout(dist.get_world_group()),
        "dp": (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()),
    }


def test_hpz_groups_are_shared_and_end_with_the_default_group() -> None:
    for _ in range(2):  # the second run has a new default group in the same processes
        for rank, got in enumerate(run_ranks(shared_groups, 4, timeout=37)):
            assert got["shared"] and got["whole"] and got["off"] is None and got["timeout"]
            assert got["ranks"] == ([0, 1] if rank < 2 else [2, 3])
            assert "zero_hpz_partition_size" in got["refused"] and "3" in got["refused"] and "4" in got["refused"]
            assert got["dp"] == (rank, 4)


def init_with_file(path: str) -> tuple[int, int, float]:
    import deepspeed.comm as dist

    rank = int(os.environ["RANK"])
    dist.init_distributed(init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    dist.init_distributed()  # idempotent
    value = torch.ones(1)
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


def test_init_method(tmp_path: Any) -> None:
    got = run_ranks(init_with_file, 2, str(tmp_path / "store"), init_group=False)
    assert got == [(0, 2, 2.0), (1, 2, 2.0)]


def init_alone() -> dict[str, Any]:
    import deepspeed.comm as dist

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_distributed(dist_init_required=False)
    before = dist.is_initialized()
    dist.init_distributed(auto_mpi_discovery=False)
    return {
        "before": before,
        "world": dist.get_world_size(),
        "local": os.environ["LOCAL_RANK"],
        "port": "MASTER_PORT" in os.environ,
    }


def test_a_process_that_nobody_launched_is_a_job_of_one_without_a_port() -> None:
    assert run_ranks(init_alone, 1, init_group=False) == [{"before": False, "world": 1, "local": "0", "port": False}]


def bad_inits() -> list[str]:
    import deepspeed.comm as dist
    from deepspeed.errors import UsageError

    said = []
    cases: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
        ({"RANK": "0"}, {}),
        ({"WORLD_SIZE": "4"}, {}),
        ({"RANK": "0", "WORLD_SIZE": "4"}, {}),
        ({}, {"rank": 2, "world_size": 2}),
        ({"DEEPSPEED_TIMEOUT": "soon"}, {}),
    )
    for env, kwargs in cases:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "DEEPSPEED_TIMEOUT"):
            os.environ.pop(name, None)
        os.environ.update(env)
        try:
            dist.init_distributed(**kwargs)
            said.append("no error")
        except UsageError as exc:
            said.append(str(exc))
    return said


def test_incomplete_information_is_refused_by_name() -> None:
    [said] = run_ranks(bad_inits, 1, init_group=False)
    for text, word in zip(said, ("WORLD_SIZE", "RANK", "MASTER_ADDR", "world_size", "DEEPSPEED_TIMEOUT"), strict=True):
        assert word in text and text != "no error"


@pytest.mark.parametrize(
    ("env", "expected"), [({}, timedelta(minutes=10)), ({"DEEPSPEED_TIMEOUT": "0.5"}, timedelta(seconds=30))]
)
def test_default_timeout(env: dict[str, str], expected: timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.comm.init import default_timeout

    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert default_timeout() == expected
