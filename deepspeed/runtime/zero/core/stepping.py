# SPDX-License-Identifier: Apache-2.0
"""How an optimizer's arithmetic is run over the flat tensors of sub-groups.

Three ways, fastest first; the optimizer's ``state`` has the layout of torch in all of them:

- ``OnePass``: Adam and AdamW in one kernel that reads the reduced gradient as it is and writes the shard
  (``deepspeed.ops.fused_step``), on CUDA, and wherever masters are split;
- ``Sliced``: Adam and AdamW on torch's fused kernel, slice by slice, so that the fp32 copy of the gradient is small;
- ``Own``: any other optimizer's own ``step`` on a few sub-groups at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from deepspeed.errors import ConfigError
from deepspeed.ops import fused_step
from deepspeed.ops.fused_step import AdamStep, Shard

from .grads import GradShards
from .subgroup import Run, SubGroup, copied, is_flat

Parts = list[tuple[int, torch.Tensor]]
"""Buffers of one sub-group's gradients, each with its place: see ``GradShards.parts``."""

STEP_CHUNK = 1 << 26
"""Elements whose gradients are converted to fp32 together: bounds the temporary memory of a step."""
HOST_CHUNK = 1 << 18
"""The same for gradients on a CPU, where what is converted should still be in its cache when it is used."""


class Stepper(Protocol):
    """Steps sub-groups with one optimizer.

    ``device_scaled``: the scale and the skip flag are read on the device; else the caller has checked the flag.
    ``cuts``: only the ``runs`` of a sub-group are stepped, so that parameters can be left alone.
    """

    device_scaled: bool
    cuts: bool

    def step(self, subs: list[SubGroup], grads: GradShards, scale: torch.Tensor, skip: torch.Tensor) -> bool:
        """Step the runs of every sub-group, their gradients divided by ``scale``, and write the shards; nothing changes
        where ``skip`` is not zero. Returns whether the gradients were divided in place."""
        ...


def choose(optimizer: torch.optim.Optimizer, subs: list[SubGroup], device: torch.device, split: bool | None) -> Stepper:
    """The fastest way that gives what ``optimizer.step()`` would.

    Args:
        split: change sub-groups to the split layout; None: if the one-pass kernel will run.

    Raises:
        ConfigError: ``split`` is true and cannot be.
    """
    adam = is_fused_adam(optimizer)
    kernel = adam and fused_step.kernel_is_available(device.type)
    if split or (split is None and kernel):
        done = adam and all([sub.split_masters() for sub in subs if sub.numel])
        if split and not done:
            raise ConfigError(
                "zero_optimization.split_master_weights: true needs bf16 parameters on the device of the optimizer, "
                "more than one rank, and a fused Adam or AdamW without amsgrad (the configured one, or torch's with "
                "fused=True)"
            )
    if kernel or any(sub.low is not None for sub in subs):
        return OnePass(optimizer)
    return Sliced(optimizer) if adam else Own(optimizer)


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` is torch's fused Adam or AdamW in a form that this module runs itself."""
    name = getattr(type(optimizer).step, "__qualname__", "")
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) or name not in ("Adam.step", "AdamW.step"):
        return False
    return all(_runs_fused(group) for group in optimizer.param_groups)


def _runs_fused(group: dict[str, Any]) -> bool:
    odd = any(group.get(key) for key in ("amsgrad", "maximize", "differentiable", "capturable"))
    numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
    return bool(group.get("fused")) and not odd and all(isinstance(number, (int, float)) for number in numbers)


class _Work(NamedTuple):
    """The step of one run of a sub-group: the sub-group's optimizer state, the run's count of steps and gradients, and
    what all share."""

    sub: SubGroup
    state: dict[str, Any]
    steps: torch.Tensor
    parts: Parts
    scale: torch.Tensor
    skip: torch.Tensor
    options: AdamStep


class _Adam:
    """What both ways of running Adam here share: options, state, the step counts."""

    device_scaled = cuts = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, subs: list[SubGroup], grads: GradShards, scale: torch.Tensor, skip: torch.Tensor) -> bool:
        """See ``Stepper.step``."""
        subs = [sub for sub in subs if sub.numel]
        states = [self._state(sub) for sub in subs]
        if not subs:
            return False
        optimizer = self.optimizer
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (), {})
        runs = [
            (sub, state, run, _count(state if run.apart is None else run.apart.begin(), sub))
            for sub, state in zip(subs, states, strict=True)
            for run in sub.runs
        ]
        counts = list({id(count): count for *_, count in runs}.values())
        if counts:
            # a list of tensors: with a single one torch reads its value on the host, which waits for the device
            torch._foreach_add_(counts, [1.0 - skip] * len(counts))
        divided = False
        for sub, state, run, count in runs:
            options = self._options(optimizer.param_groups[sub.group_index])
            parts = _within(grads.parts(sub.index), run)
            divided |= self._one(_Work(sub, state, count, parts, scale, skip, options))
        for sub in subs:
            if sub.shards_beside_masters is None:
                sub.write_back()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, (), {})
        return divided

    def _one(self, work: _Work) -> bool:
        raise NotImplementedError

    def _options(self, group: dict[str, Any]) -> AdamStep:
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))
        return AdamStep(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], bool(decoupled))

    def _state(self, sub: SubGroup) -> dict[str, Any]:
        state = self.optimizer.state[sub.master]
        if "exp_avg" not in state:
            _count(state, sub)
            state["exp_avg"] = torch.zeros(sub.numel, dtype=torch.float32, device=sub.master.device)
            state["exp_avg_sq"] = torch.zeros(sub.numel, dtype=torch.float32, device=sub.master.device)
        return state


def _count(scalars: dict[str, Any], sub: SubGroup) -> torch.Tensor:
    """The count of steps among ``scalars``, where the masters of ``sub`` are; made if there is none yet."""
    device, step = sub.master.device, scalars.get("step")
    if step is None:
        step = torch.zeros((), dtype=torch.float32, device=device)
    scalars["step"] = step = step.to(device)
    return step


class OnePass(_Adam):
    """Gradient as it is reduced, master (or its halves), moments and shard in one pass."""

    def _one(self, work: _Work) -> bool:
        sub, state, steps, parts, scale, skip, options = work
        halves = sub.low is not None
        shards = sub.shards_beside_masters
        corrections = fused_step.bias_corrections(steps, options)
        for start, grad in parts:
            run = slice(start, start + grad.numel())
            shard = Shard(
                grad.to(sub.master.device),
                state["exp_avg"][run],
                state["exp_avg_sq"][run],
                shards[run] if shards is not None else None,
                None if halves else sub.master[run],
                sub.low[run] if sub.low is not None else None,
                steps,
            )
            fused_step.apply(shard, scale, skip, options, corrections)
        return False


class Sliced(_Adam):
    """torch's fused kernel, slice by slice.

    On a CPU it runs at the speed of memory (36 of 42 GB/s on one core), so there is no kernel of our own for it.
    """

    def _one(self, work: _Work) -> bool:
        sub, state, steps, parts, scale, skip, options = work
        kernel = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
        device = sub.master.device
        shards = sub.shards_beside_masters
        for start, grad in _slices(parts):
            run = slice(start, start + grad.numel())
            kernel(
                [sub.master[run]],
                [grad.to(device=device, dtype=torch.float32)],
                [state["exp_avg"][run]],
                [state["exp_avg_sq"][run]],
                [],
                [steps],
                lr=options.lr,
                beta1=options.beta1,
                beta2=options.beta2,
                weight_decay=options.weight_decay,
                eps=options.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=skip,
            )
            if shards is not None:
                shards[run].copy_(sub.master[run])
        return any(is_fp32_on(grad, device) for _, grad in parts)  # torch's kernel writes the quotient back


class _Piece(NamedTuple):
    """What an optimizer sees of one run: ``param``; ``begun``: whether it was stepped before."""

    sub: SubGroup
    run: Run
    param: torch.Tensor
    begun: bool


class Own:
    """The optimizer's own step; gradients of a few sub-groups at a time are converted to fp32.

    Of a sub-group that is not stepped as a whole the optimizer sees the runs, as parameters with states of their own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # torch's marker of fused kernels that divide by `grad_scale` and heed `found_inf` on the device
        self.device_scaled = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.cuts = type(optimizer).__module__.startswith(("torch.optim", "deepspeed."))

    def step(self, subs: list[SubGroup], grads: GradShards, scale: torch.Tensor, skip: torch.Tensor) -> bool:
        """See ``Stepper.step``."""
        divided = False
        for chunk in _chunks(subs):
            pieces: list[_Piece] = []
            for sub in chunk:
                full = _whole(sub, grads.parts(sub.index))
                divided |= any(full is grad for _, grad in grads.parts(sub.index))
                gradient = full if self.device_scaled else full / scale
                pieces += [self._piece(sub, run, gradient) for run in sub.runs]
            if self.device_scaled:
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
                self.optimizer.found_inf = skip  # type: ignore[attr-defined]
            # torch's fused SGD takes no mixture of parameters with and without a momentum buffer
            for some in ([p for p in pieces if not p.begun], [p for p in pieces if p.begun]):
                if some:
                    self._step(some)
        for sub in subs:
            sub.write_back()
        return divided and self.device_scaled

    def _step(self, pieces: list[_Piece]) -> None:
        groups = self.optimizer.param_groups
        masters = [group["params"] for group in groups]
        for index, group in enumerate(groups):
            group["params"] = [piece.param for piece in pieces if piece.sub.group_index == index]
        try:
            self.optimizer.step()
        finally:
            for group, params in zip(groups, masters, strict=True):
                group["params"] = params
            for piece in pieces:
                piece.param.grad = None
                if piece.param is not piece.sub.master:
                    self._take_back(piece)

    def _piece(self, sub: SubGroup, run: Run, gradient: torch.Tensor) -> _Piece:
        """The parameter that the optimizer sees for ``run``, with its gradient and state."""
        state = self.optimizer.state
        flat = state.get(sub.master, {})
        begun, scalars = (bool(flat), flat) if run.apart is None else (run.apart.begun, run.apart.scalars)
        param = sub.master if sub.whole else run.of(sub.master).detach()
        param.grad = run.of(gradient)
        if begun and not sub.whole:
            state[param] = {key: run.of(value) for key, value in flat.items() if is_flat(value)} | copied(scalars)
        return _Piece(sub, run, param, begun)

    def _take_back(self, piece: _Piece) -> None:
        """Put the state of a piece into that of its sub-group."""
        sub, run, param, _ = piece
        made = self.optimizer.state.pop(param, {})
        if not made:
            return
        flat = self.optimizer.state[sub.master]
        scalars = flat if run.apart is None else run.apart.begin()
        for key, value in made.items():
            if is_flat(value):
                if key not in flat:
                    flat[key] = torch.zeros(sub.numel, dtype=value.dtype, device=value.device)
                run.of(flat[key]).copy_(value)
            else:
                scalars[key] = value


def is_fp32_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` needs no conversion to be an fp32 gradient on ``device``."""
    return tensor.dtype is torch.float32 and tensor.device == device


def _within(parts: Parts, run: Run) -> Parts:
    """The gradients of one run."""
    found = []
    for start, flat in parts:
        first, last = max(run.start, start), min(run.end, start + flat.numel())
        if first < last:
            found.append((first, flat[first - start : last - start]))
    return found


def _slices(parts: Parts) -> Iterator[tuple[int, torch.Tensor]]:
    """``parts`` cut into slices of at most ``STEP_CHUNK`` elements, ``HOST_CHUNK`` where they lie on a CPU."""
    for start, flat in parts:
        chunk = HOST_CHUNK if flat.is_cpu else STEP_CHUNK
        for offset in range(0, flat.numel(), chunk):
            yield start + offset, flat[offset : offset + chunk]


def _whole(sub: SubGroup, parts: Parts) -> torch.Tensor:
    """The fp32 gradient of a whole sub-group: the buffer itself where there is just one that fits, else a copy."""
    device = sub.master.device
    if len(parts) == 1 and is_fp32_on(parts[0][1], device):
        return parts[0][1]
    whole = torch.empty(sub.numel, dtype=torch.float32, device=device)
    for start, flat in parts:
        whole[start : start + flat.numel()].copy_(flat)
    return whole


def _chunks(subs: Iterable[SubGroup]) -> Iterator[list[SubGroup]]:
    chunk: list[SubGroup] = []
    filled = 0
    for sub in subs:
        if chunk and filled + sub.numel > STEP_CHUNK:
            yield chunk
            chunk, filled = [], 0
        chunk.append(sub)
        filled += sub.numel
    if chunk:
        yield chunk
