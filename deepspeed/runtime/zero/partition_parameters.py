# SPDX-License-Identifier: Apache-2.0
"""Public names for sharding and gathering parameters (import path of the field)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator

from .core.param import ZeroParamStatus, ZeroParamType
from .core.parameter import ZeroParameter
from .gathered import GatheredParameters
from .init_context import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

# torch's own constructors, which no `Init` replaces: clients compare with them to find out which one is wrapped.
_orig_torch_arange = torch.arange
_orig_torch_empty = torch.empty
_orig_torch_eye = torch.eye
_orig_torch_full = torch.full
_orig_torch_ones = torch.ones
_orig_torch_randn = torch.randn
_orig_torch_tensor = torch.tensor
_orig_torch_zeros = torch.zeros


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """``fn``, a constructor of tensors, as it behaves while an ``Init`` is open.

    ``Init`` does not call this, so what a client puts in its place has no effect: ``Init`` sets torch's default dtype
    and device and wraps no constructor. A dtype that is given is kept, by ``Init`` and by this function, which is what
    clients replace it for (transformers does, so that tables of positions stay fp32).

    Args:
        target_fp_dtype: of a floating-point result whose dtype is not given.
        target_device: where the result is made unless ``device=`` is given; None: where torch would.
    """

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        keep = kwargs.get("dtype") is not None or not made.is_floating_point()
        return made if keep else made.to(target_fp_dtype)

    return construct


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
