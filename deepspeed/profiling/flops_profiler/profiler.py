# SPDX-License-Identifier: Apache-2.0
"""A profile of one forward, counted by `torch.utils.flop_counter`.

What must hold: the count is that of matrix products, convolutions and attention, 2 operations for each
multiply-accumulate; parameters count in full, also while they are sharded (`ds_numel`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import NotSupportedError, UsageError

__all__ = ["FlopsProfiler", "get_model_profile"]

_TOTAL = "Global"


class FlopsProfiler:
    """Counts what runs between `start_profile` and `stop_profile`.

    Args:
        model: the module (or an engine) whose forward is profiled.
        recompute_fwd_factor: forwards that a backward recomputes; it scales nothing but the printed estimate.
    """

    def __init__(self, model: torch.nn.Module, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._counts: dict[str, int] = {}
        self._start = self._duration = 0.0

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start counting.

        Raises:
            NotSupportedError: modules are to be left out.
            UsageError: counting has been started already.
        """
        if ignore_list:
            raise NotSupportedError("start_profile(ignore_list=...): leaving modules out is not built; pass None")
        if self.started:
            raise UsageError("start_profile(): the profile has been started already; call stop_profile() first")
        self.started = True
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        get_accelerator().synchronize()
        self._start = time.perf_counter()

    def stop_profile(self) -> None:
        """Stop counting and keep the result. Nothing happens where counting is not on."""
        if self._counter is None:
            return
        get_accelerator().synchronize()
        self._duration = time.perf_counter() - self._start
        self._counter.__exit__(None, None, None)
        self._counts = {name: sum(ops.values()) for name, ops in self._counter.get_flop_counts().items()}
        self._counter = None
        self.started = False

    def end_profile(self) -> None:
        """Stop counting and forget the result."""
        self.stop_profile()
        self._counts = {}
        self._duration = 0.0

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations."""
        flops = self._counts.get(_TOTAL, 0)
        return _with_unit(flops, "FLOPS") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates: half the operations."""
        macs = self._counts.get(_TOTAL, 0) // 2
        return _with_unit(macs, "MACs") if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters, sharded or not."""
        params = sum(getattr(param, "ds_numel", param.numel()) for param in self.model.parameters())
        return _with_unit(params, "") if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds between start and stop."""
        return f"{self._duration * 1e3:.2f} ms" if as_string else self._duration

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or append it to a file.

        Args:
            profile_step: the step it belongs to, for the headline.
            module_depth: deepest level of modules that is printed; -1 prints all.
            top_modules: how many modules are listed per level where `detailed` is false.
            detailed: print every module instead of the top ones.
            output_file: path of a file to append to; None prints to standard output.
        """
        total = self._counts.get(_TOTAL, 0)
        lines = [
            f"Profile of step {profile_step}",
            f"  parameters {self.get_total_params(True)}",
            f"  forward    {self.get_total_flops(True)}, {self.get_total_macs(True)}, {self.get_total_duration(True)}",
            f"  with backward, estimated: {_with_unit(total * (3 + self.recompute_fwd_factor), 'FLOPS')}",
        ]
        by_level: dict[int, list[tuple[str, int]]] = {}
        for name, count in self._counts.items():
            level = name.count(".")
            if name != _TOTAL and (module_depth < 0 or level <= module_depth):
                by_level.setdefault(level, []).append((name, count))
        if detailed:
            rows = sorted(row for level in by_level.values() for row in level)
        else:
            rows = [
                row for level in sorted(by_level) for row in sorted(by_level[level], key=lambda r: -r[1])[:top_modules]
            ]
        lines += [
            f"  {name}: {_with_unit(count, 'FLOPS')} ({100 * count / max(1, total):.1f} %)" for name, count in rows
        ]
        text = "\n".join(lines)
        if output_file is None:
            print(text)
        else:
            with Path(output_file).open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def get_model_profile(
    model: torch.nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Profile one forward (or one `generate`) of a model, in eval mode and without gradients.

    Args:
        input_shape: shape of a tensor of ones that is the only input, where neither `args` nor `kwargs` are given.
        warm_up: runs before the one that is counted.
        as_string: return numbers with units, as text.
        mode: "forward" or "generate".

    Returns:
        Floating-point operations, multiply-accumulates, parameters.

    Raises:
        UsageError: no input is given, or the mode is not known.
        NotSupportedError: `ignore_modules` is given.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f"get_model_profile(mode={mode!r}): use 'forward' or 'generate'")
    args, kwargs = list(args), dict(kwargs or {})
    if input_shape is not None and not args and not kwargs:
        first = next(model.parameters(), None)
        device = first.device if first is not None else None
        args = [torch.ones(tuple(input_shape), dtype=first.dtype if first is not None else None, device=device)]
    if not args and not kwargs:
        raise UsageError("get_model_profile(): give the model's input as input_shape, args or kwargs")
    run: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                run(*args, **kwargs)
            profiler.start_profile(ignore_modules)
            try:
                run(*args, **kwargs)
            finally:
                profiler.stop_profile()
    finally:
        model.train(was_training)
    if print_profile:
        profiler.print_model_profile(
            module_depth=module_depth, top_modules=top_modules, detailed=detailed, output_file=output_file
        )
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _with_unit(number: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.2f} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()
