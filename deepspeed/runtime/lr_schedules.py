# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: five of the package's own, and those of `torch.optim.lr_scheduler` by name.

What must hold:
- Each schedule is a closed formula of the iteration: `last_batch_iteration` is all of its state, and loading it puts
  the learning rates into the parameter groups. Iteration -1, the value after construction, is the one before the
  first `step()`.
- `rewind()` undoes the last `step()` exactly; the engine calls it where an optimizer step turns out to be skipped.

The formulas are given at each class; i is the iteration, n the effective warm-up: max(2, warmup_num_steps), or 0 for
a warmup_num_steps of 0, which integrations fill in where the user asked for none. Without a warm-up iteration -1 has
the rate that follows a warm-up, so no step is taken at the rate that a warm-up begins with.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.errors import ConfigError, UsageError
from deepspeed.runtime.config_sections import SchedulerConfig
from deepspeed.runtime.config_utils import check_params, nearest, warn_once

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "VALID_LR_SCHEDULES",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]

Rates = float | Sequence[float]


class _Schedule:
    """Base: keeps the iteration, writes rates into `optimizer.param_groups`, undoes, saves and loads."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        self._before: tuple[int, list[float] | None, list[float], list[Any]] | None = None

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were written last, one per parameter group.

        Raises:
            AssertionError: none have been written yet.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the given one, and write its rates."""
        betas = [group.get("betas") for group in self.optimizer.param_groups]
        self._before = (self.last_batch_iteration, self._last_lr, _group_rates(self.optimizer), betas)
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def rewind(self) -> None:
        """Undo the last `step()`: the iteration and every value it wrote.

        Raises:
            UsageError: there is no step to undo (only the last one can be).
        """
        if self._before is None:
            raise UsageError("rewind(): no step() to undo; only the last one can be undone")
        self.last_batch_iteration, self._last_lr, rates, betas = self._before
        self._put(rates)
        for group, value in zip(self.optimizer.param_groups, betas, strict=True):
            if value is not None:
                group["betas"] = value
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """`{"last_batch_iteration": i}`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved iteration, and write its rates."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._before = None
        if self.last_batch_iteration >= 0:
            self._write()

    def _write(self) -> None:
        self._last_lr = self._put(self.get_lr())

    def _put(self, rates: list[float]) -> list[float]:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rates

    def _per_group(self, name: str, value: Rates) -> list[float]:
        """One number per parameter group, from a scalar or a sequence of that length."""
        count = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)):
            if len(value) != count:
                raise ConfigError(f"scheduler.params.{name}: {count} values are expected (one per group), got {value}")
            return [_number(name, item) for item in value]
        return [_number(name, value)] * count


class LRRangeTest(_Schedule):
    """Raise the rate steadily to find where training diverges.

    rate(i) = min_lr * (1 + step_rate * t), t = (i + 1) / step_size, rounded down where `staircase`.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _count("lr_range_test_step_size", lr_range_test_step_size, least=1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        self._write()

    def get_lr(self) -> list[float]:
        """See the class."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * increase for rate in self.min_lr]


class OneCycle(_Schedule):
    """One cycle of the rate, up and down, and of the first beta, down and up; then a decay of both.

    With t = i + 1 and s going linearly from 0 to 1 in `first_step_size` steps and back to 0 in `second_step_size`
    (rounded down to multiples of 1 / stair_count where a stair count is given):
    rate = min_lr + s * (max_lr - min_lr), beta = max_mom - s * (max_mom - min_mom).
    After the cycle, with d = (t - cycle) / decay_step_size, 0 where that is 0:
    rate = min_lr / (1 + decay_lr_rate * d), beta = max_mom * (1 + decay_mom_rate * d).

    The construction writes `min_lr` and `min_mom`. Betas are left alone where the groups have none.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lr = self._per_group("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.first_size = _count("cycle_first_step_size", cycle_first_step_size, least=1)
        self.second_size = (
            self.first_size
            if cycle_second_step_size is None
            else _count("cycle_second_step_size", cycle_second_step_size, least=1)
        )
        self.first_stairs = _count("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stairs = (
            self.first_stairs
            if cycle_second_stair_count is None
            else _count("cycle_second_stair_count", cycle_second_stair_count)
        )
        self.decay_step_size = _count("decay_step_size", decay_step_size)
        self.min_mom = _number("cycle_min_mom", cycle_min_mom)
        self.max_mom = _number("cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            warn_once("scheduler.params.cycle_momentum: the optimizer has no betas; only the learning rate is cycled")
        if last_batch_iteration == -1:
            self._put(self.min_lr)
            self._put_momentum(self.min_mom)

    def get_lr(self) -> list[float]:
        """See the class."""
        scale, decay = self._position()
        if decay > 0:
            return [low / (1 + self.decay_lr_rate * decay) for low in self.min_lr]
        return [low + scale * (high - low) for low, high in zip(self.min_lr, self.max_lr, strict=True)]

    def get_mom(self) -> float | None:
        """The first beta at the current iteration; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        scale, decay = self._position()
        return self.max_mom * (1 + self.decay_mom_rate * decay) - scale * (self.max_mom - self.min_mom)

    def _position(self) -> tuple[float, float]:
        """How far up the cycle (0 to 1), and how far past it (in decay steps)."""
        done = self.last_batch_iteration + 1
        past = done - self.first_size - self.second_size
        if past > 0:
            return 0.0, past / self.decay_step_size if self.decay_step_size else 0.0
        if done <= self.first_size:
            scale, stairs = done / self.first_size, self.first_stairs
        else:
            scale, stairs = 1 - (done - self.first_size) / self.second_size, self.second_stairs
        return (math.floor(scale * stairs) / stairs if stairs else scale), 0.0

    def _write(self) -> None:
        super()._write()
        momentum = self.get_mom()
        if momentum is not None:
            self._put_momentum(momentum)

    def _put_momentum(self, momentum: float) -> None:
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (momentum, *group["betas"][1:])


class WarmupLR(_Schedule):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr` (None: the group's own rate), then keep it.

    rate(i) = min + (max - min) * g(i); g is log(i + 1) / log(n) or, where `warmup_type` is "linear", i / n, and 1 from
    i = n on.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lr = (
            _group_rates(optimizer) if warmup_max_lr is None else self._per_group("warmup_max_lr", warmup_max_lr)
        )
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self._write()

    def get_lr(self) -> list[float]:
        """See the class."""
        before_warmup = self.last_batch_iteration < 0 < self.warmup_num_steps
        factor = 0.0 if before_warmup else self._factor(max(0, self.last_batch_iteration))
        return [low + (high - low) * factor for low, high in zip(self.min_lr, self.max_lr, strict=True)]

    def _factor(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return _warmup_factor(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line down to `warmup_min_lr`.

    From i = n on, g(i) = max(0, (total - i) / max(1, total - n)).
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _count("total_num_steps", total_num_steps, least=1)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_short(self.total_num_steps, self.warmup_num_steps)

    def _factor(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._factor(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Scale each group's own rate: warm up, then half a cosine down to `cos_min_ratio`.

    ratio(i) = min_ratio + (1 - min_ratio) * g(i) for i < n, with g as in `WarmupLR`; from i = n on
    cos_min + (1 - cos_min) * (1 + cos(pi * p)) / 2 with p = min(1, (i - n + 1) / max(1, total - n)).
    The ratio after construction is 0, or 1 without a warm-up.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _count("total_num_steps", total_num_steps, least=1)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = _group_rates(optimizer)
        _warn_short(self.total_num_steps, self.warmup_num_steps)
        self._write()

    def get_lr(self) -> list[float]:
        """See the class."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The factor on each group's own rate at the current iteration."""
        iteration, warmup = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0 < warmup:
            return 0.0
        if 0 <= iteration < warmup:
            factor = _warmup_factor(iteration, warmup, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * factor
        progress = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


_OWN: dict[str, type[_Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_OWN)
"""The class names of the package's own schedules."""


def build_scheduler(config: SchedulerConfig, optimizer: Any) -> Any:
    """Build the schedule that `scheduler` asks for, over an object with `param_groups`.

    A type that is not one of `VALID_LR_SCHEDULES` is looked up in `torch.optim.lr_scheduler`, whose classes want a
    real `torch.optim.Optimizer`.

    Raises:
        ConfigError: the type is not known, or a parameter is unknown, missing, "auto", or wrong.
    """
    cls: Any = _OWN.get(config.type)
    if cls is None:
        cls = getattr(torch.optim.lr_scheduler, config.type, None)
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler)):
            raise ConfigError(
                f"scheduler.type: {config.type!r} is neither one of {', '.join(VALID_LR_SCHEDULES)} nor a class of "
                f"torch.optim.lr_scheduler. {nearest(config.type, VALID_LR_SCHEDULES)}"
            )
    check_params("scheduler.params", cls, config.params)
    try:
        return cls(optimizer, **config.params)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: {config.type} refuses {config.params}: {error}") from error


def _group_rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"scheduler.params.{name}: a finite number is expected, got {value!r}")
    return float(value)


def _count(name: str, value: Any, least: int = 0) -> int:
    number = _number(name, value)
    if number != int(number) or number < least:
        raise ConfigError(f"scheduler.params.{name}: an integer of at least {least} is expected, got {value!r}")
    return int(number)


def _warmup_steps(value: Any) -> int:
    count = _count("warmup_num_steps", value)
    return max(2, count) if count else 0


def _warmup_type(value: str) -> str:
    if value not in ("log", "linear"):
        warn_once(f"scheduler.params.warmup_type: {value!r} is neither 'log' nor 'linear'; 'log' is used")
        return "log"
    return value


def _warmup_factor(iteration: int, steps: int, kind: str) -> float:
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def _warn_short(total: int, warmup: int) -> None:
    if total < warmup:
        warn_once(f"scheduler.params.total_num_steps: {total} is less than the warm-up of {warmup} steps")
