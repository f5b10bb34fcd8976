# SPDX-License-Identifier: Apache-2.0
"""Reading and writing master weights, optimizer states and gradients of sharded parameters.

``full`` functions take and give tensors of the parameter's full shape and are collective; ``local`` functions work on
this rank's 1-D shard (``ceil(numel / world)`` elements, padding included) without communication. Any shape works on any
rank, also where the last shard is partly or wholly padding (deepspeedai/DeepSpeed#7117). Parameters that are not
trained here give None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.core import wire
from deepspeed.runtime.zero.core.master import MasterWeights
from deepspeed.runtime.zero.core.param import ShardedParam
from deepspeed.runtime.zero.core.parameter import ZeroParameter

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


def _trained(param: Any) -> tuple[ShardedParam, MasterWeights] | None:
    if not isinstance(param, ZeroParameter):
        return None
    p = param._sharded
    return (p, p.edits) if isinstance(p.edits, MasterWeights) and p in p.edits.places else None


def _must_be_trained(param: Any, call: str) -> tuple[ShardedParam, MasterWeights]:
    found = _trained(param)
    if found is None:
        raise UsageError(f"{call}: the parameter is not trained by a deepspeed engine (frozen, or not sharded)")
    return found


def _gather(p: ShardedParam, shard: torch.Tensor) -> torch.Tensor:
    """The full tensor (``p.shape``) of which every rank holds a ``shard``."""
    world = p.groups.primary.size
    shard = shard.to(p.unit.device)
    full = torch.empty(shard.numel() * world, dtype=shard.dtype, device=shard.device)
    if shard.numel():
        wire.gather([full], [shard.contiguous()], p.groups.primary).wait()
    return full[: p.numel].view(p.shape)


def _piece(p: ShardedParam, value: torch.Tensor, call: str) -> torch.Tensor:
    if tuple(value.shape) != tuple(p.shape):
        raise UsageError(f"{call}: {p.name} has shape {tuple(p.shape)}, the value has {tuple(value.shape)}")
    return p.shard_of(value)


def _local(p: ShardedParam, value: torch.Tensor, call: str) -> torch.Tensor:
    if value.numel() != p.shard.numel():
        raise UsageError(
            f"{call}: the shard of {p.name} has {p.shard.numel()} elements (padding included), the value has "
            f"{value.numel()}"
        )
    return value.reshape(-1)


def _set_master(p: ShardedParam, master: MasterWeights, values: torch.Tensor) -> None:
    master.set_master(p, values)
    if p.full_version >= 0:
        p.unit.fresh = False


def _writable_grad(p: ShardedParam, master: MasterWeights, call: str) -> torch.Tensor:
    shard = master.grads.slices.get(p)
    if shard is None or master.grads.divided_by is not None:
        raise UsageError(f"{call}: there is no gradient of {p.name} to write; call it between backward and step")
    master.grads.idle.discard(p)
    return shard


# -- full ------------------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """fp32 master weights in full shape; None where the parameter is not trained. Collective."""
    found = _trained(param)
    if found is None:
        return None
    p, master = found
    return _gather(p, master.master_of(p)).clone()


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set master weights and low-precision shards from ``value`` (full shape, the same on every rank).

    The next forward sees the new weights.

    Raises:
        UsageError: another shape, or the parameter is not trained.
    """
    p, master = _must_be_trained(param, "safe_set_full_fp32_param")
    _set_master(p, master, _piece(p, value, "safe_set_full_fp32_param"))


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Optimizer state (``exp_avg``, ``exp_avg_sq``, ...) in full shape; None where not trained. Collective.

    Raises:
        KeyError: no such state (yet: states appear with the first step).
    """
    found = _trained(param)
    if found is None:
        return None
    p, master = found
    return _gather(p, master.state_of(p, optim_state_key)).clone()


@torch.no_grad()
def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set an optimizer state from ``value`` (full shape, the same on every rank)."""
    p, master = _must_be_trained(param, "safe_set_full_optimizer_state")
    piece = _piece(p, value, "safe_set_full_optimizer_state")
    master.state_of(p, optim_state_key)[: piece.numel()].copy_(piece)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Averaged, unclipped gradient in full shape and fp32, or None. Collective.

    Valid from the end of a backward to the next training forward (so also right after ``step``). Divided by the loss
    scale where there is one.
    """
    if param.grad is not None:
        return param.grad
    found = _trained(param)
    if found is None:
        return None
    p, master = found
    shard = master.grads.true_gradient(p)
    return None if shard is None else _gather(p, shard)


@torch.no_grad()
def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged gradient from ``value`` (full shape, the same on every rank); between backward and step."""
    p, master = _must_be_trained(param, "safe_set_full_grad")
    piece = _piece(p, value, "safe_set_full_grad")
    _writable_grad(p, master, "safe_set_full_grad")[: piece.numel()].copy_(piece * master.grads.loss_scale)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor | None],
) -> None:
    """Run ``update_func(grad, param)`` on each full gradient and store what it returns (or what it edited in place).

    Collective; between backward and step. Parameters without a gradient are left out.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            updated = update_func(grad, param)
            safe_set_full_grad(param, grad if updated is None else updated)


# -- local -----------------------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's fp32 master shard (1-D, a copy), or None."""
    found = _trained(param)
    return None if found is None else found[1].master_of(found[0]).clone()


@torch.no_grad()
def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's master shard and low-precision shard."""
    p, master = _must_be_trained(param, "safe_set_local_fp32_param")
    _set_master(p, master, _local(p, value, "safe_set_local_fp32_param"))


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's shard of an optimizer state (1-D, a copy), or None."""
    found = _trained(param)
    return None if found is None else found[1].state_of(found[0], optim_state_key).clone()


@torch.no_grad()
def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's shard of an optimizer state."""
    p, master = _must_be_trained(param, "safe_set_local_optimizer_state")
    master.state_of(p, optim_state_key).copy_(_local(p, value, "safe_set_local_optimizer_state"))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's shard of the averaged gradient (1-D fp32, a copy), or None."""
    found = _trained(param)
    shard = None if found is None else found[1].grads.true_gradient(found[0])
    return None if shard is None else shard.clone()


@torch.no_grad()
def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard of the averaged gradient; between backward and step."""
    p, master = _must_be_trained(param, "safe_set_local_grad")
    piece = _local(p, value, "safe_set_local_grad")
    _writable_grad(p, master, "safe_set_local_grad").copy_(piece * master.grads.loss_scale)
