# SPDX-License-Identifier: Apache-2.0
"""Progress lines, timers, monitors, the one-shot profile and the comms logger of one engine."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.core.param import Traffic
from deepspeed.utils.logging import log_dist
from deepspeed.utils.timer import SynchronizedWallClockTimer

PHASES = ("forward", "backward", "step")


class Reporter:
    """Says what an engine does; nothing here touches training."""

    def __init__(self, config: DeepSpeedConfig, traffic: Traffic) -> None:
        self.config, self.traffic = config, traffic
        self.monitor = MonitorMaster(config.monitor)
        self.timers = SynchronizedWallClockTimer()
        steps = config.steps_per_print
        self.print_every = int(steps) if steps is not None and math.isfinite(steps) else 0
        self._since: tuple[float, int] | None = None  # when samples were last counted, and how many there were
        comm.configure(config)
        self._reported = traffic.as_dict()
        if config.disable_python_gc:
            gc.disable()
        if config.dump_state:
            config.print()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase under ``wall_clock_breakdown``, and log memory around it under ``memory_breakdown``."""
        if self.config.memory_breakdown:
            see_memory_usage(f"before {name}", force=True)
        if not self.config.wall_clock_breakdown:
            yield
        else:
            timer = self.timers(name)
            timer.start()
            try:
                yield
            finally:
                timer.stop()
        if self.config.memory_breakdown:
            see_memory_usage(f"after {name}", force=True)

    def step_done(self, engine: Any) -> None:
        """An optimizer step ended."""
        config = self.config
        self._record_traffic()
        if config.disable_python_gc:
            gc.collect(0)
        if self.monitor.enabled:
            self.monitor.write_events(self._events(engine))
        if self.print_every and engine.global_steps % self.print_every == 0:
            rates = ", ".join(f"{rate:.3e}" for rate in engine.get_lr())
            speed = self._speed(engine.global_samples)
            log_dist(f"step {engine.global_steps}, skipped {engine.skipped_steps}, lr [{rates}]{speed}", ranks=[0])
        if config.wall_clock_breakdown:
            self.timers.log(PHASES, normalizer=engine.gradient_accumulation_steps())

    def _speed(self, samples: int) -> str:
        """Samples per second since the last progress line, in words. Waits for the device here and at no other step."""
        throughput = self.config.timers.throughput
        if not throughput.enabled:
            return ""
        if throughput.synchronized:
            get_accelerator().synchronize()
        now, since = time.perf_counter(), self._since
        self._since = (now, samples)
        return f", {(samples - since[1]) / (now - since[0]):.2f} samples/s" if since is not None else ""

    def _events(self, engine: Any) -> list[tuple[str, Any, int]]:
        samples = engine.global_samples
        events: list[tuple[str, Any, int]] = [("Train/Samples/lr", engine.get_lr()[0], samples)]
        if self.config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", engine.optimizer.cur_scale, samples))
        if self.config.wall_clock_breakdown:
            for name in PHASES:
                if self.timers.has_timer(name):
                    elapsed = self.timers(name).elapsed(reset=False)
                    events.append((f"Train/Samples/elapsed_time_ms_{name}", elapsed, samples))
        return events

    def _record_traffic(self) -> None:
        """Hand what went over the wire since the last step to the comms logger."""
        if not comm.comms_logger.LOGGER.enabled:
            return
        now, before = self.traffic.as_dict(), self._reported
        self._reported = now
        for op, place, calls, nbytes in (
            ("all_gather", "inside hpZ group", "gathers_inside", "gather_bytes_inside"),
            ("all_gather", "across groups", "gathers_across", "gather_bytes_across"),
            ("reduce_scatter", "across groups", "reductions", "reduce_bytes"),
        ):
            count = now[calls] - before[calls]
            if count:
                comm.comms_logger.record(op, place, now[nbytes] - before[nbytes], count)

    def close(self) -> None:
        """Flush and close what is open."""
        self.monitor.close()
        if self.config.disable_python_gc:
            gc.enable()
