# SPDX-License-Identifier: Apache-2.0
"""The sections `fp16`, `bf16` (also spelled `bfloat16`), `torch_autocast` and `data_types`."""

from __future__ import annotations

from deepspeed.runtime.config_utils import (
    ConfigSection,
    Dtype,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    acted,
    inert,
)

_SCALER = "loss scaler"


class DeepSpeedFP16Config(ConfigSection):
    """`fp16`: half-precision parameters with loss scaling."""

    enabled: bool = acted(False, by="engine", doc="half-precision parameters")
    auto_cast: bool = acted(False, by="engine (forward)", doc="cast floating inputs of forward to half precision")
    loss_scale: NonNegativeFloat = acted(0.0, by=_SCALER, doc="fixed scale; 0 scales dynamically")
    initial_scale_power: NonNegativeInt = acted(16, by=_SCALER, doc="the dynamic scale starts at 2 to this power")
    loss_scale_window: PositiveInt = acted(1000, by=_SCALER, doc="steps without overflow before the scale doubles")
    hysteresis: PositiveInt = acted(2, by=_SCALER, doc="overflows before the scale is halved")
    consecutive_hysteresis: bool = acted(False, by=_SCALER, doc="a good step refills the hysteresis")
    min_loss_scale: NonNegativeFloat = acted(1.0, by=_SCALER, doc="the scale never falls below this")
    fp16_master_weights_and_grads: bool = acted(False, by="refused if true", doc="half-precision master weights")

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts."""
        return self.loss_scale == 0


class DeepSpeedBF16Config(ConfigSection):
    """`bf16`: bfloat16 parameters with fp32 master weights."""

    enabled: bool = acted(False, by="engine", doc="bfloat16 parameters")
    check_grad_overflow: bool = acted(True, by="zero core (scaling)", doc="non-finite gradients skip the step")
    immediate_grad_update: bool = inert(False, why="stage 3 always reduces a gradient as soon as it is ready")
    bf16_master_weights_and_grads: bool = acted(False, by="refused if true", doc="bfloat16 master weights")
    bf16_optimizer_states: bool = acted(False, by="refused if true", doc="bfloat16 optimizer states")


class TorchAutocastConfig(ConfigSection):
    """`torch_autocast`: parameters stay fp32, the forward runs under `torch.autocast`."""

    enabled: bool = acted(False, by="engine (forward)", doc="run the forward under torch.autocast")
    dtype: Dtype = acted(None, by="engine (forward)", doc="autocast dtype; null is bf16 where the device has it")
    lower_precision_safe_modules: Names | None = inert(
        None, why="gathers stay in fp32, which is what the listed modules compute from anyway"
    )


class DataTypesConfig(ConfigSection):
    """`data_types`: dtypes that differ from the model's."""

    grad_accum_dtype: Dtype = acted(None, by="zero core (grads)", doc="gradient accumulation; null is the model's")
    param_dtype: Dtype = acted(None, by="checked against fp16/bf16", doc="must equal the dtype of the chosen mode")
    buffer_dtype: Dtype = acted(None, by="refused if given", doc="cast of buffers; they are left as they are")
    keep_in_fp32_modules: Names | None = acted(None, by="refused if given", doc="modules that stay in fp32")
