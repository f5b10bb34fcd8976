# SPDX-License-Identifier: Apache-2.0
"""Loss scalers: the factor that keeps half-precision gradients away from zero.

What must hold: all state is in plain attributes, whose names and class paths are those found in checkpoints of the
field (checkpoints may hold these objects pickled); every rank calls `update_scale` with the same vote, once a step.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.runtime.precision_config import DeepSpeedFP16Config


class LossScalerBase:
    """What both scalers share."""

    dynamic: bool

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the next backward."""
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in fp32 so that the product does not overflow."""
        return loss.float() * self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step: whether any gradient on any rank was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """All attributes, by name."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes that this scaler has; others are left out."""
        for name in vars(self):
            if name in state:
                setattr(self, name, state[name])


class LossScaler(LossScalerBase):
    """A fixed scale."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)
        self.dynamic = False


class DynamicLossScaler(LossScalerBase):
    """A scale that halves on overflow and doubles after a quiet while.

    Args:
        init_scale: the first scale.
        scale_window: good steps after which the scale doubles. The count starts one step after the last overflow.
        min_scale: the scale never falls below.
        delayed_shift: the hysteresis: that many overflows are needed before the scale halves for the first time. It is
            refilled where the scale doubles, or, with `consecutive_hysteresis`, by every good step.
        raise_error_at_min_scale: raise where an overflow asks for a scale below the minimum.
        dtype: the dtype of the gradients.
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype

    def update_scale(self, overflow: bool) -> None:
        """See the class.

        Raises:
            UsageError: the scale is at its minimum and gradients still overflow.
        """
        if overflow:
            self._shrink()
        else:
            self._grow()
        self.cur_iter += 1

    def _shrink(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
        elif self.cur_scale <= self.min_scale and self.raise_error_at_min_scale:
            raise UsageError(
                f"fp16: gradients overflow although the loss scale is at fp16.min_loss_scale {self.min_scale}; the "
                "loss has diverged: lower the learning rate, or use bf16"
            )
        else:
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        self.last_overflow_iter = self.cur_iter

    def _grow(self) -> None:
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        quiet = self.cur_iter - self.last_overflow_iter - 1
        if quiet > 0 and quiet % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor


def create_loss_scaler(config: DeepSpeedFP16Config, dtype: torch.dtype) -> LossScaler | DynamicLossScaler:
    """The scaler for parameters of `dtype`: a scale of 1 unless that is float16."""
    if dtype is not torch.float16:
        return LossScaler(1.0)
    if not config.dynamic:
        return LossScaler(config.loss_scale)
    return DynamicLossScaler(
        init_scale=2.0**config.initial_scale_power,
        scale_window=config.loss_scale_window,
        min_scale=config.min_loss_scale,
        delayed_shift=config.hysteresis,
        consecutive_hysteresis=config.consecutive_hysteresis,
        dtype=dtype,
    )
