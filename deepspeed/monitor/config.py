# SPDX-License-Identifier: Apache-2.0
"""The sections `tensorboard`, `csv_monitor`, `wandb` and `comet`, and the object that holds all four."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.runtime.config_utils import ConfigSection, PositiveInt, acted

_MONITOR = "monitor"


class TensorBoardConfig(ConfigSection):
    """`tensorboard`: event files under output_path/job_name."""

    enabled: bool = acted(False, by=_MONITOR, doc="write TensorBoard events")
    output_path: str = acted("", by=_MONITOR, doc='folder; "" is ./runs')
    job_name: str = acted("DeepSpeedJobName", by=_MONITOR, doc="sub-folder")


class CSVConfig(ConfigSection):
    """`csv_monitor`: one CSV file per event name under output_path/job_name."""

    enabled: bool = acted(False, by=_MONITOR, doc="write CSV files")
    output_path: str = acted("", by=_MONITOR, doc='folder; "" is ./csv_monitor')
    job_name: str = acted("DeepSpeedJobName", by=_MONITOR, doc="sub-folder")


class WandbConfig(ConfigSection):
    """`wandb`: Weights & Biases."""

    enabled: bool = acted(False, by=_MONITOR, doc="log to Weights & Biases")
    group: str | None = acted(None, by=_MONITOR, doc="group of runs")
    team: str | None = acted(None, by=_MONITOR, doc="entity")
    project: str = acted("deepspeed", by=_MONITOR, doc="project")


class CometConfig(ConfigSection):
    """`comet`: Comet."""

    enabled: bool = acted(False, by=_MONITOR, doc="log to Comet")
    samples_log_interval: PositiveInt = acted(100, by=_MONITOR, doc="samples between two logged points of an event")
    project: str | None = acted(None, by=_MONITOR, doc="project")
    workspace: str | None = acted(None, by=_MONITOR, doc="workspace")
    api_key: str | None = acted(None, by=_MONITOR, doc="key; better given through the environment")
    experiment_name: str | None = acted(None, by=_MONITOR, doc="name of the experiment")
    experiment_key: str | None = acted(None, by=_MONITOR, doc="key of an experiment to continue")
    online: bool | None = acted(None, by=_MONITOR, doc="false logs to disk")
    mode: str | None = acted(None, by=_MONITOR, doc="get, create or get_or_create")


@dataclass(frozen=True)
class MonitorConfig:
    """The four monitor sections."""

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    csv_monitor: CSVConfig = field(default_factory=CSVConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    comet: CometConfig = field(default_factory=CometConfig)

    @property
    def enabled(self) -> bool:
        """Whether any monitor is on."""
        return any(part.enabled for part in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))
