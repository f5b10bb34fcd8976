# SPDX-License-Identifier: Apache-2.0
"""Promise: the scale moves as users know it, and its state is in attributes with the names that checkpoints hold."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, create_loss_scaler
from deepspeed.runtime.precision_config import DeepSpeedFP16Config


def scaler(**changes) -> DynamicLossScaler:
    options = {"init_scale": 16, "scale_window": 3, "min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": False}
    return DynamicLossScaler(**{**options, **changes})


def run(made: DynamicLossScaler, steps: str) -> list[float]:
    """x is a step that overflows."""
    seen = []
    for step in steps:
        made.update_scale(step == "x")
        seen.append(made.loss_scale)
    return seen


# As observed on release 0.19.8.
@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({}, "xx.....x..x.....", [16, 8, 8, 8, 8, 16, 16, 16, 16, 16, 8, 8, 8, 8, 16, 16]),
        (
            {},
            "x.x.x.x.....x...xx......",
            [16, 16, 8, 8, 4, 4, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 2, 1, 1, 1, 1, 2, 2, 2],
        ),
        (
            {"consecutive_hysteresis": True},
            "x.x.x.x.....x...xx......",
            [16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 32, 32, 32, 32, 32, 32, 32, 16, 16, 16, 16, 32, 32, 32],
        ),
        ({"init_scale": 4, "delayed_shift": 1}, "xx", [2, 1]),
    ],
)
def test_known_sequences(changes, steps, expected):
    assert run(scaler(**changes), steps) == expected


def test_at_the_minimum_an_overflow_raises_or_stays():
    made = scaler(init_scale=2, delayed_shift=1)
    assert run(made, "x") == [1]
    with pytest.raises(UsageError, match="fp16.min_loss_scale"):
        made.update_scale(True)
    assert run(scaler(init_scale=2, delayed_shift=1, raise_error_at_min_scale=False), "xxx") == [1, 1, 1]


def test_state_moves_to_another_scaler():
    first, second = scaler(), scaler(init_scale=2, scale_window=9)
    run(first, "x..x.")
    second.load_state_dict({**first.state_dict(), "foreign": 1})
    assert vars(second) == vars(first) and run(second, "...x.") == run(first, "...x.")


def test_names_of_attributes_are_those_of_checkpoints():
    assert set(vars(scaler())) == {
        "cur_scale",
        "dynamic",
        "cur_iter",
        "last_overflow_iter",
        "scale_factor",
        "scale_window",
        "min_scale",
        "delayed_shift",
        "cur_hysteresis",
        "consecutive_hysteresis",
        "raise_error_at_min_scale",
        "dtype",
    }
    assert vars(LossScaler(4.0)) == {"cur_scale": 4.0, "dynamic": False}


def test_which_scaler_a_configuration_gets():
    for dtype in (torch.float32, torch.bfloat16):
        assert create_loss_scaler(DeepSpeedFP16Config(), dtype).loss_scale == 1.0
    fixed = create_loss_scaler(DeepSpeedFP16Config(enabled=True, loss_scale=128), torch.float16)
    fixed.update_scale(True)
    assert isinstance(fixed, LossScaler) and fixed.loss_scale == 128 and not fixed.dynamic
    config = DeepSpeedFP16Config(
        enabled=True, initial_scale_power=5, loss_scale_window=7, hysteresis=3, min_loss_scale=2
    )
    made = create_loss_scaler(config, torch.float16)
    assert isinstance(made, DynamicLossScaler) and made.dynamic
    assert (made.loss_scale, made.scale_window, made.delayed_shift, made.min_scale) == (32, 7, 3, 2)


def test_backward_scales_gradients_and_not_the_loss():
    weights = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    loss = (weights * 3).sum()
    LossScaler(1024.0).backward(loss)
    assert weights.grad is not None and weights.grad.tolist() == [3072, 3072] and loss.item() == 6
