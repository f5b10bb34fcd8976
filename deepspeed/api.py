# SPDX-License-Identifier: Apache-2.0
"""The top-level functions: ``initialize``, ``add_config_arguments``, ``OnDevice``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.errors import ConfigConflictError, NotSupportedError, UsageError
from deepspeed.not_built import not_built
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import COMPILED, DeepSpeedEngine
from deepspeed.runtime.engine_parts.build import OptimizerLike
from deepspeed.runtime.zero.checks import Agreement


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Shard a model and build its engine. Collective over all ranks.

    Args:
        args: a namespace or dict that may carry ``deepspeed_config`` (a path) and ``local_rank``.
        optimizer: a torch optimizer, or a callable that takes parameter groups and returns one; default: the
            configuration's ``optimizer`` section, or none.
        model_parameters: parameters, or group dicts, for the optimizer (default: all that require a gradient).
        training_data: a dataset; a loader over this rank's share is returned.
        lr_scheduler: a scheduler, or a callable that takes the torch optimizer and returns one.
        config: dict, path of a JSON file, or base64 of JSON; ``config_params`` is its older name.

    Returns:
        (engine, optimizer, data loader or None, scheduler or None). Without an optimizer the second is the sharding.

    Raises:
        UsageError: no model, or parameters that do not fit it; or ranks differ in versions, configuration, parameters
            or optimizer, which every rank is told with the first difference. ConfigError: see ``DeepSpeedConfig``.
    """
    if model is None:
        raise UsageError("deepspeed.initialize: model= is missing")
    if not isinstance(model, nn.Module):
        raise UsageError(f"deepspeed.initialize: model= must be an nn.Module, got {type(model).__name__}")
    if type(model).__name__ == "OptimizedModule":  # of a module that is imported with torch.compile
        raise UsageError(COMPILED)
    if mesh_param is not None:
        raise NotSupportedError("deepspeed.initialize: mesh_param (sequence parallelism) is not built; leave it out")
    if dist_init_required is not False or not comm.is_initialized():
        comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    with Agreement("deepspeed.initialize") as agreement:
        engine = DeepSpeedEngine(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            collate_fn=collate_fn,
            config=config,
            config_class=DeepSpeedConfig(_find_config(args, config, config_params), mpu),
            agreement=agreement,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _find_config(args: Any, config: Any, config_params: Any) -> Any:
    from_args = args.get("deepspeed_config") if isinstance(args, dict) else getattr(args, "deepspeed_config", None)
    if config is not None and config_params is not None:
        raise ConfigConflictError("deepspeed.initialize: config and config_params are both given; keep config")
    config = config if config is not None else config_params
    if config is not None and from_args is not None:
        raise ConfigConflictError(
            "deepspeed.initialize: a configuration is given both as config= and as args.deepspeed_config; keep one"
        )
    config = config if config is not None else from_args
    if config is None:
        raise UsageError(
            "deepspeed.initialize: a configuration is needed: config=<dict or path>, or --deepspeed_config"
        )
    return config


tp_model_init = not_built(
    "deepspeed.tp_model_init", "tensor parallelism", "shard with ZeRO stage 3 and leave out tp_size and autotp_size"
)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` (and their older names) to a parser; returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of a DeepSpeed configuration")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


class OnDevice(AbstractContextManager["OnDevice"]):
    """New tensors get ``dtype`` and ``device`` inside the block (``device="meta"`` allocates nothing)."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._before: torch.dtype | None = None

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled and self._before is not None:
            self.device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)
