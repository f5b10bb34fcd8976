# SPDX-License-Identifier: Apache-2.0
"""Promise: events reach every writer that is on, on rank 0 only; a missing package is an error on every rank."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from deepspeed.errors import ConfigError
from deepspeed.monitor import monitor
from deepspeed.monitor.config import CometConfig, CSVConfig, MonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor.monitor import MonitorMaster
from tests.harness.skips import needs

EVENTS = [("Train/Samples/lr", 0.25, 8), ("Train/Samples/loss_scale", torch.tensor(4.0), 8)]


def csv_config(tmp_path) -> MonitorConfig:
    return MonitorConfig(csv_monitor=CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job"))


def test_csv_files(tmp_path):
    for x in (8, 16):
        master = MonitorMaster(csv_config(tmp_path))
        assert master.enabled
        master.write_events([(name, value, x) for name, value, _ in EVENTS])
        master.close()
    folder = tmp_path / "job"
    assert sorted(path.name for path in folder.iterdir()) == [
        "Train_Samples_loss_scale.csv",
        "Train_Samples_lr.csv",
    ]
    assert (folder / "Train_Samples_lr.csv").read_text().split() == ["step,lr", "8,0.25", "16,0.25"]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "_rank", lambda: 1)
    master = MonitorMaster(csv_config(tmp_path))
    master.write_events(EVENTS)
    assert master.enabled and not list(tmp_path.iterdir())


def test_nothing_on_is_not_enabled():
    master = MonitorMaster(MonitorConfig())
    master.write_events(EVENTS)
    assert not master.enabled and master.writers == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MonitorConfig(tensorboard=TensorBoardConfig(enabled=True)), "tensorboard.enabled"),
        (MonitorConfig(wandb=WandbConfig(enabled=True)), "wandb.enabled"),
        (MonitorConfig(comet=CometConfig(enabled=True)), "comet.enabled.*comet_ml"),
    ],
)
def test_a_missing_package_is_an_error_on_every_rank(config, words, rank, monkeypatch):
    monkeypatch.setattr(monitor, "_rank", lambda: rank)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=words):
        MonitorMaster(config)


class _Recorder:
    """Stands in for a run of a service: keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def fake(monkeypatch, module: str, function: str) -> tuple[_Recorder, dict]:
    run, given = _Recorder(), {}
    made = types.ModuleType(module)
    setattr(made, function, lambda **kwargs: given.update(kwargs) or run)
    monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return run, given


def test_wandb(monkeypatch):
    run, given = fake(monkeypatch, "wandb", "init")
    master = MonitorMaster(MonitorConfig(wandb=WandbConfig(enabled=True, team="t", group="g", project="p")))
    master.write_events(EVENTS)
    master.close()
    assert given == {"project": "p", "group": "g", "entity": "t"}
    assert run.calls == [
        ("log", ({"Train/Samples/lr": 0.25},), {"step": 8}),
        ("log", ({"Train/Samples/loss_scale": 4.0},), {"step": 8}),
        ("finish", (), {}),
    ]


def test_comet_logs_a_name_once_per_interval(monkeypatch):
    run, given = fake(monkeypatch, "comet_ml", "start")
    config = CometConfig(enabled=True, project="p", experiment_name="e", samples_log_interval=10)
    master = MonitorMaster(MonitorConfig(comet=config))
    for x in (0, 4, 10, 19, 20):
        master.write_events([("a", x, x)])
    assert given["project"] == "p" and run.calls[0] == ("set_name", ("e",), {})
    assert [call[1] for call in run.calls[1:]] == [("a", 0.0), ("a", 10.0), ("a", 20.0)]


def test_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboard", reason=needs("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    master = MonitorMaster(MonitorConfig(tensorboard=config))
    master.write_events(EVENTS)
    master.close()
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/lr")] == [(8, 0.25)]
