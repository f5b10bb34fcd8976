# SPDX-License-Identifier: Apache-2.0
"""Events as CSV files, one per event name.

What must hold: a file starts with one header line, `step,<last part of the name>`; a restarted run appends.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.monitor import Event


class CSVMonitor:
    """Writes to output_path/job_name/<name with / as _>.csv; output_path "" is "csv_monitor"."""

    def __init__(self, config: CSVConfig) -> None:
        self.log_dir = Path(config.output_path or "csv_monitor") / config.job_name
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, events: Sequence[Event]) -> None:
        """Append one line per event."""
        for name, value, x in events:
            path = self.log_dir / f"{name.replace('/', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([x, value])

    def close(self) -> None:
        """Nothing is kept open."""
