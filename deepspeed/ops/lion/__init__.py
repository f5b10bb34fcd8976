# SPDX-License-Identifier: Apache-2.0
"""Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.errors import ConfigError, NotSupportedError

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class _Lion(torch.optim.Optimizer):
    """x = x * (1 - lr * decay) - lr * sign(b1 * m + (1 - b1) * g), then m = b2 * m + (1 - b2) * g.

    `m` is kept as `exp_avg`, in the dtype and on the device of the parameter. Gradients are left as they are.
    """

    supports_device_scale = False

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        if lr < 0:
            raise ConfigError(f"lr: must not be negative, got {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas: two numbers in [0, 1) are expected, got {betas}")
        if weight_decay < 0:
            raise ConfigError(f"weight_decay: must not be negative, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            grads = [param.grad for param in params]
            momenta = [self.state[param]["exp_avg"] for param in params]
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            directions = torch._foreach_lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(directions)
            if decay:
                torch._foreach_mul_(params, 1 - lr * decay)
            torch._foreach_add_(params, directions, alpha=-lr)
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
        return loss


class FusedLion(_Lion):
    """Lion on the accelerator. `set_grad_none` is accepted for the signature's sake."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(_Lion):
    """Lion for states in host memory.

    Raises:
        NotSupportedError: `fp32_optimizer_states` is false.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise NotSupportedError("DeepSpeedCPULion(fp32_optimizer_states=False): states are fp32; leave it true")
        super().__init__(model_params, lr, betas, weight_decay)
