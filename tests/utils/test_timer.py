# SPDX-License-Identifier: Apache-2.0
"""Timers against a clock that the test moves by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.errors import UsageError
from deepspeed.utils import timer as timer_module
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_intervals_add_up_until_reset() -> None:
    clock = Clock()
    timers = SynchronizedWallClockTimer(clock)
    timer = timers("fwd")
    for seconds in (0.5, 0.25):
        timer.start()
        clock.now += seconds
        timer.stop(record=True)
        clock.now += 10
    assert timer.mean() == 375.0
    assert timer.elapsed(reset=False) == 750.0
    assert timer.elapsed() == 750.0
    assert timer.elapsed() == 0.0
    assert timers.has_timer("fwd") and not timers.has_timer("bwd")
    assert timers.get_mean(["fwd", "absent"], normalizer=3) == {"fwd": 125.0}
    assert timer.mean() == 0.0


def test_a_running_timer_can_be_read() -> None:
    clock = Clock()
    timer = SynchronizedWallClockTimer(clock)("x")
    timer.start()
    clock.now += 1
    assert timer.elapsed() == 1000.0
    clock.now += 2
    assert timer.elapsed() == 2000.0
    timer.stop()
    assert not timer.started


def test_wrong_order_is_an_error() -> None:
    timer = SynchronizedWallClockTimer(Clock())("x")
    with pytest.raises(UsageError, match="'x'"):
        timer.stop()
    timer.start()
    with pytest.raises(UsageError, match="running"):
        timer.start()


def test_log_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    timers = SynchronizedWallClockTimer(clock)
    timers("fwd").start()
    clock.now += 0.5
    timers("fwd").stop()
    timers.log(["fwd", "absent"], normalizer=2, memory_breakdown=True)
    out = capsys.readouterr().out
    assert "fwd: 250.00" in out and "absent" not in out and "mem (GiB)" in out
    with pytest.raises(ValueError):
        timers.log(["fwd"], normalizer=0)


def test_noop_measures_nothing() -> None:
    timers = NoopTimer()
    timers("a").start()
    timers("a").start()
    timers("a").stop()
    assert timers("a").elapsed() == 0.0


def test_throughput_counts_whole_steps_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr(timer_module, "_now", clock)
    timer = ThroughputTimer(batch_size=8, start_step=1, steps_per_output=2, logging_fn=lines.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for step_seconds in (5.0, 1.0, 3.0):
        for micro in range(2):
            timer.start()
            clock.now += step_seconds / 2
            timer.stop(global_step=micro == 1)
    assert timer.global_step_count == 3
    assert timer.avg_samples_per_sec() == 8 * 2 / 4.0
    assert len(lines) == 1 and "step 2" in lines[0] and "8.000" in lines[0]


def test_throughput_can_be_off() -> None:
    timer = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), batch_size=8)
    timer.start()
    timer.stop(global_step=True)
    assert timer.global_step_count == 0
