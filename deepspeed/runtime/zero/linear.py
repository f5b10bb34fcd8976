# SPDX-License-Identifier: Apache-2.0
"""A linear layer and function under the names that scripts import; both are torch's.

What autograd saves of a gathered weight holds no memory: a unit's storage is freed and refilled in place (`core.unit`).
So nothing of torch has to be replaced, and these names exist only for code that asks for them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3"]


class LinearFunctionForZeroStage3:
    """``torch.nn.functional.linear`` with the calling convention of an autograd function."""

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``(..., in), (out, in), (out) -> (..., out)``; differentiable by autograd."""
        return functional.linear(input, weight, bias)


class LinearModuleForZeroStage3(nn.Linear):
    """``torch.nn.Linear``."""
