# SPDX-License-Identifier: Apache-2.0
"""Named wall-clock timers and samples per second. All times that users see are milliseconds.

What must hold: a timer that is read includes all device work that was queued while it ran, so start and stop wait for
the device; a disabled timer never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.utils.logging import log_dist, logger

FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_GLOBAL_TIMER = "step"

Clock = Callable[[], float]


def _now() -> float:
    """Seconds, read when the device has nothing left to do."""
    get_accelerator().synchronize()
    return time.perf_counter()


class Timer:
    """Time between pairs of start and stop, summed until reset."""

    def __init__(self, name: str, clock: Clock = _now) -> None:
        self.name = name
        self._clock = clock
        self._started: float | None = None
        self._total = 0.0
        self._records: list[float] = []

    @property
    def started(self) -> bool:
        return self._started is not None

    def start(self) -> None:
        """Raises UsageError if the timer is running."""
        if self._started is not None:
            raise UsageError(f"timer {self.name!r} is running already")
        self._started = self._clock()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Add the time since start (with `reset`: keep only that); with `record` note it for `mean`.

        Raises UsageError if the timer is not running.
        """
        if self._started is None:
            raise UsageError(f"timer {self.name!r} is not running")
        passed = self._clock() - self._started
        self._started = None
        self._total = passed if reset else self._total + passed
        if record:
            self._records.append(passed * 1e3)

    def reset(self) -> None:
        self._started, self._total = None, 0.0
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far; a running timer is read and goes on running."""
        now = self._clock() if self._started is not None else 0.0
        total = self._total + (now - self._started if self._started is not None else 0.0)
        if reset:
            self._total = 0.0
            if self._started is not None:
                self._started = now
        return total * 1e3

    def mean(self) -> float:
        """Mean of the recorded intervals in milliseconds, 0 if there are none."""
        return sum(self._records) / len(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("fwd").start()`."""

    def __init__(self, clock: Clock = _now) -> None:
        self._clock = clock
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        if name not in self.timers:
            self.timers[name] = Timer(name, self._clock)
        return self.timers[name]

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    @staticmethod
    def memory_usage() -> str:
        """One line: device memory allocated and its peak."""
        device = get_accelerator()
        now, peak = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        return f"mem (GiB): allocated {now:.4f}, peak {peak:.4f}"

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        """Log the named timers (those that exist) in ms, divided by `normalizer`, on `ranks` (default rank 0)."""
        if normalizer <= 0:
            raise ValueError(f"normalizer is {normalizer}; it must be positive")
        known = [name for name in names if name in self.timers]
        parts = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        text = "time (ms) | " + " | ".join(parts)
        if memory_breakdown:
            text += " | " + self.memory_usage()
        log_dist(text, ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean recorded interval in ms of each named timer that exists, divided by `normalizer`."""
        if normalizer <= 0:
            raise ValueError(f"normalizer is {normalizer}; it must be positive")
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class _NoTimer(Timer):
    def start(self) -> None:
        pass

    def stop(self, reset: bool = False, record: bool = False) -> None:
        pass

    def elapsed(self, reset: bool = True) -> float:
        return 0.0


class NoopTimer(SynchronizedWallClockTimer):
    """Has every timer and measures nothing."""

    _shared = _NoTimer("none")

    def __call__(self, name: str) -> Timer:
        return self._shared


class ThroughputTimer:
    """Samples per second over whole steps, from `start_step` on (the first steps warm caches up).

    `config` is the `timers.throughput` section (fields `enabled`, `synchronized`) or None for the defaults.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.enabled = bool(config.enabled) if config is not None else True
        synchronized = bool(config.synchronized) if config is not None else True
        self._clock: Clock = _now if synchronized else time.perf_counter
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._timed_steps = 0
        self._step_time = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """A micro-batch begins."""
        if self.enabled and self.global_step_count >= self.start_step:
            self._started = self._clock()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch ends; with `global_step` an optimizer step does too, and a line may be due."""
        if not self.enabled:
            return
        if self._started is not None:
            self._step_time += self._clock() - self._started
            self._started = None
        if not global_step:
            return
        timed = self.global_step_count >= self.start_step
        self.global_step_count += 1
        if timed:
            self.total_elapsed_time += self._step_time
            self._timed_steps += 1
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
        self._step_time = 0.0

    def _report(self) -> None:
        now = self.batch_size / self._step_time if self._step_time else float("inf")
        text = f"step {self.global_step_count}: {self.avg_samples_per_sec():.3f} samples/s on average, {now:.3f} now"
        if self.monitor_memory:
            text += ", " + SynchronizedWallClockTimer.memory_usage()
        self.logging(text)

    def avg_samples_per_sec(self) -> float:
        """Samples per second over the timed steps; -inf before there is one."""
        if not self._timed_steps or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * self._timed_steps / self.total_elapsed_time
