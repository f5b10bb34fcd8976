# SPDX-License-Identifier: Apache-2.0
"""`MonitorMaster` hands events to every writer that is switched on; `Monitor` is what a writer implements.

What must hold: only rank 0 writes. A package that a writer needs and does not find is an error on every rank, so that
no rank goes on alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from deepspeed.errors import ConfigError
from deepspeed.monitor.config import MonitorConfig

__all__ = ["Event", "Monitor", "MonitorMaster"]

Event = tuple[str, Any, int]
"""Name, value (a number or a tensor of one element), position on the x axis (samples)."""


class Monitor(Protocol):
    """One place that events go to."""

    def write_events(self, events: Sequence[Event]) -> None:
        """Write the events, in order."""

    def close(self) -> None:
        """Write what is buffered, and let go of files and connections."""


class MonitorMaster:
    """Writes events to TensorBoard, CSV files, Weights & Biases and Comet, as configured.

    Raises:
        ConfigError: a monitor is switched on and its package is not installed.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.enabled = config.enabled
        self.writers: list[Monitor] = []
        for key, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
            if getattr(config, key).enabled and importlib.util.find_spec(package) is None:
                raise ConfigError(f"{key}.enabled: true, but {package} is not installed; install it or set it to false")
        if not self.enabled or _rank() != 0:
            return
        if config.tensorboard.enabled:
            from deepspeed.monitor.tensorboard import TensorBoardMonitor

            self.writers.append(TensorBoardMonitor(config.tensorboard))
        if config.csv_monitor.enabled:
            from deepspeed.monitor.csv_monitor import CSVMonitor

            self.writers.append(CSVMonitor(config.csv_monitor))
        if config.wandb.enabled:
            from deepspeed.monitor.wandb import WandbMonitor

            self.writers.append(WandbMonitor(config.wandb))
        if config.comet.enabled:
            from deepspeed.monitor.comet import CometMonitor

            self.writers.append(CometMonitor(config.comet))

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Hand `(name, value, x)` triples to every writer; nothing happens on ranks other than 0."""
        if self.writers:
            events = [(name, float(value), int(x)) for name, value, x in event_list]
            for writer in self.writers:
                writer.write_events(events)

    def close(self) -> None:
        """Close every writer."""
        for writer in self.writers:
            writer.close()
        self.writers = []


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
