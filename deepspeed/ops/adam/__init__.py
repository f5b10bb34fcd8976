# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW on the fused kernels that torch ships for the device.

What must hold: a step works on parameters of any shape that are swapped in after construction (the sharded optimizer
puts flat fp32 shards into the groups for the time of a step), and honours `grad_scale` and `found_inf` on the device
where the kernel is fused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import ConfigError, NotSupportedError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _Adam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, with the weight decay decoupled or not."""

    supports_device_scale = True
    """`grad_scale` and `found_inf`, set on the optimizer as device tensors, are honoured inside the kernel."""

    def __init__(self, params: Iterable[Any], decoupled: bool, bias_correction: bool, **options: Any) -> None:
        if not bias_correction:
            raise NotSupportedError(
                f"{type(self).__name__}(bias_correction=False): the kernels always correct the bias; leave it true"
            )
        if len(options["betas"]) != 2:
            raise ConfigError(f"betas: two numbers are expected, got {options['betas']}")
        super().__init__(params, fused=True, decoupled_weight_decay=decoupled, **options)


class FusedAdam(_Adam):
    """AdamW, or Adam with coupled weight decay where `adam_w_mode` is false, as one fused kernel.

    `set_grad_none` is accepted for the signature's sake: gradients are always dropped by `zero_grad()`.

    Raises:
        NotSupportedError: `amsgrad` is true (also a RuntimeError), or `bias_correction` is false.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise NotSupportedError("FusedAdam(amsgrad=True): use DeepSpeedCPUAdam or torch.optim.AdamW for amsgrad")
        super().__init__(params, adam_w_mode, bias_correction, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPUAdam(_Adam):
    """AdamW, or Adam with coupled weight decay where `adamw_mode` is false, for states in host memory.

    The kernel follows the device of the parameters that it steps.

    Raises:
        NotSupportedError: `fp32_optimizer_states` or `bias_correction` is false.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise NotSupportedError("DeepSpeedCPUAdam(fp32_optimizer_states=False): states are fp32; leave it true")
        super().__init__(
            model_params,
            adamw_mode,
            bias_correction,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
