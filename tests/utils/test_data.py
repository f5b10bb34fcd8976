# SPDX-License-Identifier: Apache-2.0
"""Data loaders see every sample and never end; the helpers move, seed and report."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.runtime.utils import move_to_device, see_memory_usage, set_random_seed
from tests.harness.skips import needs

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Record:
    x: torch.Tensor
    name: str


def _loaders(world: int, **kwargs: Any) -> list[DeepSpeedDataLoader]:
    data = TensorDataset(torch.arange(12))
    return [
        DeepSpeedDataLoader(data, 2, data_parallel_world_size=world, data_parallel_rank=rank, **kwargs)
        for rank in range(world)
    ]


def test_ranks_together_see_each_sample_and_epochs_differ() -> None:
    epochs = []
    loaders = _loaders(3)
    assert [len(loader) for loader in loaders] == [2, 2, 2]
    for _ in range(2):
        seen = [[int(i) for (batch,) in loader for i in batch] for loader in loaders]
        assert sorted(sum(seen, [])) == list(range(12))
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    for loader in loaders:
        loader.set_epoch(0)
    assert [[int(i) for (batch,) in loader for i in batch] for loader in loaders] == epochs[0]


def test_timer_is_started_at_each_batch() -> None:
    class Timer:
        starts = 0

        def start(self) -> None:
            self.starts += 1

    timer = Timer()
    [loader] = _loaders(1, tput_timer=timer)
    next(loader)
    assert timer.starts == 1


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_iterable_data_is_read_as_it_is() -> None:
    loader = DeepSpeedDataLoader(Stream(), 2, data_parallel_world_size=2, data_parallel_rank=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_repeating_loader_tells_the_epoch() -> None:
    [loader] = _loaders(1)
    forever = RepeatingLoader(loader)
    assert len(forever) == 6
    drawn = [next(forever)[0].tolist() for _ in range(18)]
    epochs = [drawn[0:6], drawn[6:12], drawn[12:18]]
    assert all(sorted(sum(epoch, [])) == list(range(12)) for epoch in epochs)
    assert epochs[1] != epochs[2] and forever.epoch == 2
    plain = RepeatingLoader(DataLoader(TensorDataset(torch.arange(2))))
    assert [int(next(plain)[0]) for _ in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="no batch"):
        next(RepeatingLoader([]))


def test_move_keeps_the_structure() -> None:
    t = torch.ones(2)
    moved = move_to_device(
        {"list": [t, 3], "pair": Pair(t, "s"), "tuple": (t,), "record": Record(t, "n"), "od": OrderedDict(k=t)}, "meta"
    )
    assert moved["list"][0].is_meta and moved["list"][1] == 3
    assert isinstance(moved["pair"], Pair) and moved["pair"].a.is_meta and moved["pair"].b == "s"
    assert moved["tuple"][0].is_meta and moved["record"].x.is_meta and moved["record"].name == "n"
    assert isinstance(moved["od"], OrderedDict) and moved["od"]["k"].is_meta
    assert not t.is_meta
    kept = move_to_device([t, t.int()], "meta", criterion_func=lambda x: x.dtype is torch.int32)
    assert not kept[0].is_meta and kept[1].is_meta


def test_move_follows_transformers_batches() -> None:
    transformers = pytest.importorskip("transformers", reason=needs("transformers"))
    batch = transformers.BatchEncoding({"input_ids": torch.ones(1, 2)})
    assert move_to_device(batch, "meta")["input_ids"].is_meta


def test_seed_fixes_every_generator() -> None:
    numpy = pytest.importorskip("numpy", reason=needs("numpy"))

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    set_random_seed(2**32 + 5)
    first = draw()
    assert draw() != first
    set_random_seed(2**32 + 5)
    assert draw() == first


def test_memory_is_reported_only_when_forced(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("quiet")
    see_memory_usage("loud", force=True)
    out = capsys.readouterr().out
    assert "quiet" not in out and "loud" in out and "GiB" in out
