# SPDX-License-Identifier: Apache-2.0
"""The optimizer that the configuration asks for.

What must hold: every optimizer built here is element-wise, since it steps flat 1-D shards of parameters; one that
looks at the shape or the norm of a whole parameter would silently compute something else, and is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import ConfigError, DeepSpeedError, UnsupportedConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config_sections import OptimizerConfig
from deepspeed.runtime.config_utils import check_params, nearest

__all__ = ["build_optimizer"]

_WHOLE_PARAMETER = "it needs whole parameters, and shards are flat slices; use AdamW"
REFUSED = {
    "lamb": _WHOLE_PARAMETER,
    "muon": _WHOLE_PARAMETER,
    "muadam": "width-scaled rates are not built; set lr per parameter group and use Adam",
    "muadamw": "width-scaled rates are not built; set lr per parameter group and use AdamW",
    "musgd": "width-scaled rates are not built; set lr per parameter group and use SGD",
    "adafactor": _WHOLE_PARAMETER,
    "lbfgs": "it re-evaluates the loss inside its step; use AdamW",
    "sparseadam": "gradients are dense; use Adam",
    "onebitadam": "compressed communication is not built; use Adam",
    "onebitlamb": "compressed communication is not built; use AdamW",
    "zerooneadam": "compressed communication is not built; use Adam",
}
"""Optimizer type in lower case -> why it is refused and what to use."""

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def build_optimizer(
    config: OptimizerConfig, param_groups: Iterable[Any], device_type: str, offload: bool
) -> torch.optim.Optimizer:
    """Build the optimizer of the section `optimizer`.

    Args:
        config: `type` (case-insensitive: adam, adamw, adagrad, lion, or a class of torch.optim) and `params`. For the
            Adams, `params` may hold `torch_adam` (use torch's own class) and `adam_w_mode` (default true, so that
            "Adam" decouples its weight decay too; "AdamW" always does).
        param_groups: parameters or group dicts, as for any torch optimizer.
        device_type: "cpu", "cuda", ...: where the step runs without offload.
        offload: master weights and states live in host memory.

    Raises:
        UnsupportedConfigError: the type is known and not built.
        ConfigError: the type is not known, or a parameter is unknown, "auto", or wrong.
    """
    name = config.type.lower()
    params = {key: _plain(value) for key, value in config.params.items()}
    if name in REFUSED:
        raise UnsupportedConfigError(f"optimizer.type: {config.type!r} is not supported: {REFUSED[name]}")
    if "max_grad_norm" in params:
        raise ConfigError(
            f"optimizer.params.max_grad_norm: {params['max_grad_norm']} has no effect here; set the top-level "
            "gradient_clipping"
        )
    cls: Any
    if name in ("adam", "adamw"):
        cls, params = _adam(name, params, device_type, offload)
    elif name == "adagrad":
        cls = DeepSpeedCPUAdagrad
    elif name == "lion":
        cls = DeepSpeedCPULion if offload else FusedLion
    else:
        cls = _torch_class(config.type)
    check_params("optimizer.params", cls, params)
    try:
        optimizer: torch.optim.Optimizer = cls(param_groups, **params)
    except DeepSpeedError as error:
        raise ConfigError(f"optimizer.params: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {cls.__name__} refuses {params}: {error}") from error
    return optimizer


def _adam(name: str, params: dict[str, Any], device_type: str, offload: bool) -> tuple[Any, dict[str, Any]]:
    params.pop("legacy_fusion", None)
    torch_adam = params.pop("torch_adam", False)
    adam_w_mode = params.pop("adam_w_mode", params.pop("adamw_mode", True)) or name == "adamw"
    if torch_adam or not (offload or device_type in _FUSED_DEVICES):
        if not params.pop("bias_correction", True):
            raise ConfigError("optimizer.params.bias_correction: torch.optim always corrects the bias; remove the key")
        params.pop("fp32_optimizer_states", None)
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam), params
    if offload:
        return DeepSpeedCPUAdam, {**params, "adamw_mode": adam_w_mode}
    if not params.pop("fp32_optimizer_states", True):
        raise UnsupportedConfigError("optimizer.params.fp32_optimizer_states: states are fp32; remove the key")
    return FusedAdam, {**params, "adam_w_mode": adam_w_mode}


def _torch_class(type_name: str) -> Any:
    classes = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    cls = classes.get(type_name.lower())
    if cls is None:
        valid = ["Lion", *(item.__name__ for lower, item in classes.items() if lower not in REFUSED)]
        raise ConfigError(f"optimizer.type: {type_name!r} is not known. {nearest(type_name, valid)}")
    return cls


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
