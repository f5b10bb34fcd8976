# SPDX-License-Identifier: Apache-2.0
"""Who is named after a failed wait: two or three pulses over one store in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.zero.core import pulse as module
from deepspeed.runtime.zero.core.param import Place, ShardGroups
from deepspeed.runtime.zero.core.pulse import Pulse
from deepspeed.runtime.zero.core.wire import Channel


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.1)


class Job:
    """Ranks of one engine."""

    def __init__(self, size: int, timeout: float = 0.0) -> None:
        store = dist.HashStore()
        self.places = [Place() for _ in range(size)]
        for place in self.places:
            place.names = ["embed", "layers.0"]
            place.mix(0)
        self.pulses = [Pulse(store, "engine", rank, size, self.places[rank], timeout) for rank in range(size)]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        for one in job.pulses:
            one.stop()


def test_a_dead_rank_is_named(jobs: list[Job]) -> None:
    job = Job(3)
    jobs.append(job)
    job.pulses[2].stop()
    assert job.pulses[0].fail("gathering embed").startswith("Rank 2 gave no sign of life for ")


def test_a_rank_that_is_behind_is_named_with_its_place(jobs: list[Job]) -> None:
    job = Job(3)
    jobs.append(job)
    for rank in (0, 2):
        job.places[rank].mix(1)
    time.sleep(0.25)
    text = job.pulses[0].fail("gathering layers.0")
    assert text.startswith("Rank 1 is alive but behind: step 1, after 1 collectives, the last the gather of embed;")
    assert "this rank: step 1, after 2 collectives, the last the gather of layers.0" in text


def test_ranks_that_failed_as_well_are_no_culprits(jobs: list[Job]) -> None:
    job = Job(3)
    jobs.append(job)
    job.pulses[1].fail("gathering embed")
    job.pulses[1].stop()
    job.pulses[2].stop()
    text = job.pulses[0].fail("gathering embed")
    assert text.startswith("Rank 2 gave no sign of life") and "Rank 1" not in text


def test_a_rank_that_never_came_is_named(jobs: list[Job]) -> None:
    job = Job(1)
    jobs.append(job)
    job.pulses[0].size = 3
    assert job.pulses[0].fail("comparing").startswith("Ranks [1, 2] did not come here.")


def test_the_answer_is_given_once_and_then_at_once(jobs: list[Job]) -> None:
    job = Job(2)
    jobs.append(job)
    first = job.pulses[0].fail("gathering embed")
    start = time.monotonic()
    assert job.pulses[0].fail("gathering layers.0") == first and time.monotonic() - start < 0.05


def test_a_store_that_is_gone_only_makes_the_message_poorer(jobs: list[Job]) -> None:
    job = Job(2)
    jobs.append(job)

    class Gone:
        def __getattr__(self, name: str) -> object:
            raise dist.DistNetworkError("connection refused")

    job.pulses[0].store = Gone()
    assert "does not answer" in job.pulses[0].fail("gathering embed")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    warnings: list[str] = []
    monkeypatch.setattr(module.logger, "warning", warnings.append)
    return warnings


def test_who_is_behind_is_said_before_the_timeout_ends_the_process(jobs: list[Job], said: list[str]) -> None:
    job = Job(3, timeout=0.6)
    jobs.append(job)
    for rank in (0, 2):
        job.places[rank].mix(1)
    time.sleep(1.5)
    assert len(said) == 1 and said[0].startswith("rank 0 has issued no collective for ")
    assert "Rank 1 is alive but behind" in said[0]


def test_who_is_dead_is_said_before_the_timeout_ends_the_process(jobs: list[Job], said: list[str]) -> None:
    """A dead rank may have issued as many collectives as the rest: it is its silence that tells."""
    job = Job(3, timeout=0.6)
    jobs.append(job)
    job.pulses[0].stop()
    time.sleep(1.5)
    assert len(said) == 1 and said[0].startswith("rank 1 has issued no collective for ")
    assert "Rank 0 gave no sign of life" in said[0] and "behind" not in said[0]


def test_nothing_is_said_while_every_rank_waits_alike(jobs: list[Job], said: list[str]) -> None:
    """A long pause on the device, or between steps, is nobody's fault."""
    jobs.append(Job(2, timeout=0.3))
    time.sleep(1.2)
    assert not said


def test_a_pulse_ends_with_its_engine() -> None:
    place = Place()
    one = Pulse(dist.HashStore(), "engine", 0, 1, place, 0.0)
    thread = one.thread
    del place
    thread.join(2.0)
    assert not thread.is_alive()


def test_an_error_without_a_pulse_still_says_what_was_waited_for() -> None:
    groups = ShardGroups(Channel(None, 1, 0, (0,)))
    text = str(groups.lost("gathering embed", RuntimeError("closed")))
    assert text.startswith("rank 0, step 1: gathering embed failed or timed out.")
    assert "DEEPSPEED_TIMEOUT" in text and text.endswith("Cause: closed")


def test_running_out_of_memory_is_not_blamed_on_other_ranks() -> None:
    groups, full = ShardGroups(Channel(None, 1, 0, (0,))), torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        groups.lost("gathering embed", full)
    assert caught.value is full
