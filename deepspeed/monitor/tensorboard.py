# SPDX-License-Identifier: Apache-2.0
"""Events as TensorBoard files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deepspeed.monitor.config import TensorBoardConfig
from deepspeed.monitor.monitor import Event


class TensorBoardMonitor:
    """Writes to output_path/job_name; output_path "" is "runs"."""

    def __init__(self, config: TensorBoardConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.log_dir = os.path.join(config.output_path or "runs", config.job_name)
        self._writer = SummaryWriter(log_dir=self.log_dir)

    def write_events(self, events: Sequence[Event]) -> None:
        """Write the events, in order, and flush."""
        for name, value, x in events:
            self._writer.add_scalar(name, value, x)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
