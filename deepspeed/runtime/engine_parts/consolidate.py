# SPDX-License-Identifier: Apache-2.0
"""The whole module in 16 bit on rank 0, gathered one module at a time.

What must hold: collective, with the same gathers in the same order on every rank; at most one module's own parameters
are gathered at a time; only rank 0 keeps anything; a tied parameter is copied once and its names share one tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["consolidate", "extra_states", "state_names"]

_EXTRA = "_extra_state"  # torch's name for it


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(state dict key, module) of every module that defines `get_extra_state`, as torch's own state dicts have them."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield (f"{prefix}.{_EXTRA}" if prefix else _EXTRA), child


def state_names(module: nn.Module) -> list[str]:
    """Names of parameters and persistent buffers in the order of a state dict; no tensor is touched."""
    names: list[str] = []
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        names += [dot + name for name, _ in child.named_parameters(recurse=False, remove_duplicate=False)]
        skipped = child._non_persistent_buffers_set
        names += [
            dot + name for name, _ in child.named_buffers(recurse=False, remove_duplicate=False) if name not in skipped
        ]
    return names


def consolidate(module: nn.Module, *, rank: int, exclude_frozen: bool = False) -> OrderedDict[str, torch.Tensor] | None:
    """Full state dict on the CPU (parameters and buffers in their own dtypes) on rank 0, None on other ranks."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    result: OrderedDict[str, torch.Tensor] = OrderedDict()
    copies: dict[int, torch.Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        own = [
            (dot + name, param)
            for name, param in child.named_parameters(recurse=False, remove_duplicate=False)
            if param.requires_grad or not exclude_frozen
        ]
        fresh = [param for _, param in own if id(param) not in copies]
        with GatheredParameters(fresh, modifier_rank=None, enabled=bool(fresh)):
            for param in fresh:
                copies[id(param)] = param.detach().to("cpu", copy=True) if rank == 0 else torch.empty(0)
        if rank != 0:
            continue
        for name, param in own:
            result[name] = copies[id(param)]
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:
                result[dot + name] = buffer.detach().to("cpu", copy=True)
    return result if rank == 0 else None
