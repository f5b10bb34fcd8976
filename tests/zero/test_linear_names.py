# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import from `zero.linear` and `zero.utils` exist and do what torch does."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.runtime.zero import utils
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, LinearModuleForZeroStage3


def test_linear_is_torchs() -> None:
    torch.manual_seed(0)
    layer = LinearModuleForZeroStage3(7, 5)
    assert isinstance(layer, nn.Linear)
    x = torch.randn(3, 7, requires_grad=True)
    again = LinearFunctionForZeroStage3.apply(x, layer.weight, layer.bias)
    assert torch.equal(again, layer(x))
    assert torch.equal(LinearFunctionForZeroStage3.apply(x, layer.weight), nn.functional.linear(x, layer.weight))
    again.sum().backward()
    assert x.grad is not None and layer.weight.grad is not None


def test_an_ordinary_parameter_is_not_sharded() -> None:
    import deepspeed

    layer = nn.Linear(7, 5)
    assert not utils.is_zero_param(layer.weight)
    assert not utils.is_zero_param("weight")
    deepspeed.zero.Init(
        layer, config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    assert utils.is_zero_param(layer.weight)
