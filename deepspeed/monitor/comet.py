# SPDX-License-Identifier: Apache-2.0
"""Events to Comet."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.monitor.config import CometConfig
from deepspeed.monitor.monitor import Event


class CometMonitor:
    """Logs into one experiment, at most one point of an event name every `samples_log_interval` samples."""

    def __init__(self, config: CometConfig) -> None:
        import comet_ml

        self._interval = config.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment = comet_ml.start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)

    def write_events(self, events: Sequence[Event]) -> None:
        """Log the events that are due."""
        for name, value, x in events:
            if name not in self._last or x - self._last[name] >= self._interval:
                self._last[name] = x
                self._experiment.log_metric(name, value, step=x)

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()
