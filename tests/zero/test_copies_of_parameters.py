# SPDX-License-Identifier: Apache-2.0
"""`nn.Parameter(sharded parameter)` is a plain parameter with memory of its own; so weight norm can be put on a sharded
layer, and speech models that do so train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.zero.core.parameter import ReleasedZeroParameter, ZeroParameter
from tests.harness import run_ranks
from tests.zero.squares import train_plain, train_sharded

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def sharded_linear() -> nn.Linear:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        return nn.Linear(7, 5)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_made_of_a_sharded_one_is_plain(requires_grad: bool) -> None:
    layer = sharded_linear()
    with deepspeed.zero.GatheredParameters(layer.weight):
        copy = nn.Parameter(layer.weight, requires_grad)
        assert type(layer.weight) is ZeroParameter and layer.weight.ds_shape == (5, 7)
        expected = layer.weight.clone()
    assert type(copy) is nn.Parameter and copy.is_leaf and copy.requires_grad is requires_grad
    assert not hasattr(copy, "ds_id")
    assert isinstance(layer.weight, ReleasedZeroParameter) and layer.weight.numel() in (0, 35)
    assert torch.equal(copy, expected)
    assert type(layer.weight.detach()) is torch.Tensor


def test_a_refused_copy_leaves_the_parameter_as_it_was() -> None:
    layer = nn.Linear(7, 5)
    layer.register_parameter("steps", nn.Parameter(torch.arange(5), requires_grad=False))
    deepspeed.zero.Init(layer, config_dict_or_path=CONFIG)
    with deepspeed.zero.GatheredParameters(layer.steps):
        with pytest.raises(RuntimeError, match="floating point"):
            nn.Parameter(layer.steps)
        assert type(layer.steps) is ZeroParameter
        assert torch.equal(nn.Parameter(layer.steps, requires_grad=False), torch.arange(5))


def _norm_on(layer: nn.Conv1d) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer, name="weight", dim=2)


def weight_norm() -> list[float]:
    """Runs on every rank: weight norm put on a layer under zero.Init, as speech models do; losses of three steps."""
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        conv = nn.Conv1d(4, 6, 3)
        with deepspeed.zero.GatheredParameters(conv.weight, modifier_rank=0):
            conv = _norm_on(conv)
        model = nn.Sequential(conv, nn.Flatten(), nn.Linear(36, 1))
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    assert conv.weight.shape == (6, 4, 3)  # computed from two released parameters
    return train_sharded(model, CONFIG, _parts())


def _parts() -> torch.Tensor:
    return torch.randn(4, 3, 4, 8, generator=torch.Generator().manual_seed(1))


def plain() -> list[list[float]]:
    torch.manual_seed(3)
    return train_plain(nn.Sequential(_norm_on(nn.Conv1d(4, 6, 3)), nn.Flatten(), nn.Linear(36, 1)), _parts())


def test_weight_norm_on_a_sharded_layer_trains_as_on_a_plain_one() -> None:
    expected = plain()
    for rank, got in enumerate(run_ranks(weight_norm, 4, timeout=120)):
        assert got == pytest.approx([losses[rank] for losses in expected], rel=1e-5)
