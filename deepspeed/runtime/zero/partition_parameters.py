# SPDX-License-Identifier: Apache-2.0
"""Public names for sharding and gathering parameters (import path of the field)."""

from __future__ import annotations

from typing import Any

from torch import nn

from .core.param import ZeroParamStatus, ZeroParamType
from .core.parameter import ZeroParameter
from .gathered import GatheredParameters
from .init_context import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]


def is_zero_param(parameter: Any) -> bool:
    """Whether ``parameter`` is sharded."""
    return isinstance(parameter, ZeroParameter)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` uses ``parameter`` of another module. Never needed: such uses are noticed.

    Raises:
        RuntimeError: ``parameter`` is no ``nn.Parameter``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter: an nn.Parameter is expected, got {type(parameter).__name__}")
    module.__dict__.setdefault("_external_params", {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take a declaration back.

    Raises:
        RuntimeError: it was not made.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"unregister_external_parameter: an nn.Parameter is expected, got {type(parameter).__name__}"
        )
    if module.__dict__.get("_external_params", {}).pop(id(parameter), None) is None:
        raise RuntimeError("unregister_external_parameter: the parameter was not registered for this module")
