# SPDX-License-Identifier: Apache-2.0
"""Events to Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.monitor.config import WandbConfig
from deepspeed.monitor.monitor import Event


class WandbMonitor:
    """Logs into one run of the configured project."""

    def __init__(self, config: WandbConfig) -> None:
        import wandb

        self._run = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write_events(self, events: Sequence[Event]) -> None:
        """Log each event at its x."""
        for name, value, x in events:
            self._run.log({name: value}, step=x)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
