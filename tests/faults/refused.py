# SPDX-License-Identifier: Apache-2.0
"""Configurations that `initialize` refuses, tried one after the other on the same ranks."""

from __future__ import annotations

from typing import Any

import torch

import deepspeed
from tests.faults.scenarios import build, config, step
from tests.harness import models

Z = "zero_optimization"
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    # name -> (top-level keys, "zero" ones under Z; class; what the message holds)
    "hpz 3 of 4": (
        {Z: {"zero_hpz_partition_size": 3}},
        "ConfigError",
        ["zero_hpz_partition_size", "3", "4", "1, 2, 4"],
    ),
    "hpz 8 of 4": ({Z: {"zero_hpz_partition_size": 8}}, "ConfigError", ["zero_hpz_partition_size", "8", "4"]),
    "hpz 0": ({Z: {"zero_hpz_partition_size": 0}}, "ConfigError", ["zero_hpz_partition_size", "0", "4"]),
    "batch triple": (
        {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
        "BatchConfigError",
        ["train_batch_size", "9", "2", "4", "8"],
    ),
    "batch divisor": ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": None}, "BatchConfigError", ["6", "4"]),
    "two precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "ConfigConflictError", ["fp16", "bf16"]),
}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    f"{Z}.stage": {Z: {"stage": 2}},
    f"{Z}.offload_param.device": {Z: {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
    f"{Z}.offload_optimizer.device": {Z: {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
    f"{Z}.zero_quantized_weights": {Z: {"zero_quantized_weights": True}},
    f"{Z}.zero_quantized_gradients": {Z: {"zero_quantized_gradients": True}},
    f"{Z}.mics_shard_size": {Z: {"mics_shard_size": 2}},
    "autotuning": {"autotuning": {"enabled": True}},
    "compression_training": {"compression_training": {"weight_quantization": {"enabled": True}}},
    "optimizer.type": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
}


def _settings(keys: dict[str, Any]) -> dict[str, Any]:
    settings = config()
    for key, value in keys.items():
        if key == Z:
            settings[Z].update(value)
        elif value is None:
            settings.pop(key, None)
        else:
            settings[key] = value
    return settings


def attempts() -> Any:
    """Class, bases and text of the error of each attempt; then a sound engine must still build and train."""
    result = {}
    for name, keys in [*((n, c[0]) for n, c in CONTRADICTIONS.items()), *UNSUPPORTED.items()]:
        try:
            build(models.blocks(), _settings(keys))
            result[name] = ["none", [], ""]
        except Exception as error:
            bases = [cls.__name__ for cls in type(error).__mro__]
            result[name] = [type(error).__name__, bases, str(error)]
    step(build(models.blocks()), 0)
    return result


def init_attempts() -> Any:
    """The same for `zero.Init`."""
    result = []
    for kwargs in ({"zero_quantized_weights": True}, {"remote_device": "nvme"}):
        try:
            with deepspeed.zero.Init(dtype=torch.float32, **kwargs):
                models.blocks()
            result.append("none")
        except deepspeed.errors.NotSupportedError as error:
            result.append(str(error))
    return result


class Complex(torch.nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(torch.full((3,), 1 + 2j), requires_grad=trained)
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, _tokens: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return (self.turn * self.scale).abs().sum()


def complex_parameters() -> Any:
    """The error for one that is trained, and the loss with one that is not."""
    try:
        build(Complex(True))
        said = "none"
    except deepspeed.errors.ConfigError as error:
        said = str(error)
    return [said, step(build(Complex(False)), 0)]
