# SPDX-License-Identifier: Apache-2.0
"""Adagrad on the kernels that torch ships."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import NotSupportedError

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad; the kernel follows the device of the parameters that it steps.

    Raises:
        NotSupportedError: `amsgrad` is true, or `fp32_optimizer_states` is false.
    """

    supports_device_scale = False

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise NotSupportedError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no amsgrad form; leave it false")
        if not fp32_optimizer_states:
            raise NotSupportedError("DeepSpeedCPUAdagrad(fp32_optimizer_states=False): states are fp32; leave it true")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
