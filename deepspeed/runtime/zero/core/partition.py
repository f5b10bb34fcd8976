# SPDX-License-Identifier: Apache-2.0
"""Which modules become units.

A unit is the largest module whose parameters fit the bound: in practice one block of a repeated stack, an embedding, a
norm, a head. The outermost repeated stack decides (so the experts inside a block belong to the block). Larger modules
are split at their children, except for stacks of experts, which belong to the module that holds them: ranks may use
different ones (deepspeedai/DeepSpeed#7461). Modules that the user marked as leaves
(``set_z3_leaf_modules``) are units whatever their size. Every parameter belongs to exactly one place, the first that is
met in module order; a module that shares a parameter with an earlier one (tied weights) also lists it, as ``shared``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

MIN_UNIT_BOUND = 1 << 25
"""Elements that a unit may always have, however small the limits are: smaller gathers waste the wire."""


@dataclass(eq=False)
class Place:
    """A module at whose forward and backward its parameters are needed.

    Attributes:
        owned: parameters that are gathered with this module; ``shared``: ones that an earlier place owns.
    """

    module: nn.Module
    name: str
    owned: list[nn.Parameter] = field(default_factory=list)
    shared: list[nn.Parameter] = field(default_factory=list)


def unit_bound(max_live: int, prefetch: int) -> int:
    """Elements that a unit may have under these limits: three units must fit the live parameters."""
    return max(max_live // 3, prefetch, MIN_UNIT_BOUND)


def find_places(
    model: nn.Module, bound: int, numel: Callable[[nn.Parameter], int], is_leaf: Callable[[nn.Module], bool]
) -> list[Place]:
    """Cut ``model`` into places, in module order.

    Args:
        bound: elements that a place may own unless it is a leaf or cannot be split.
        numel: true number of elements of a parameter (sharded ones show none).
        is_leaf: whether the user marked a module as a unit.
    """
    finder = _Finder(bound, numel, is_leaf)
    finder.visit(model, "", is_root=True)
    return finder.places


class _Finder:
    def __init__(self, bound: int, numel: Callable[[nn.Parameter], int], is_leaf: Callable[[nn.Module], bool]) -> None:
        self.bound, self.numel, self.is_leaf = bound, numel, is_leaf
        self.places: list[Place] = []
        self.taken: set[nn.Parameter] = set()
        self.stacked: dict[nn.Module, bool] = {}

    def visit(self, module: nn.Module, name: str, is_root: bool = False, in_stack: bool = False) -> None:
        if self.is_leaf(module) or self._is_unit(module, is_root, in_stack):
            self._take(module, name, list(module.parameters()))
            return
        experts = [child for child_name, child in module.named_children() if _are_experts(child_name, child)]
        own = list(module.parameters(recurse=False))
        self._take(module, name, own + [p for stack in experts for p in stack.parameters()])
        stack = _is_stack(module)
        for child_name, child in module.named_children():
            if child in experts:
                continue
            self.visit(child, f"{name}.{child_name}" if name else child_name, in_stack=in_stack or stack)

    def _is_unit(self, module: nn.Module, is_root: bool, in_stack: bool) -> bool:
        if not any(True for _ in module.children()):
            return True
        if is_root or not _has_forward(module) or (not in_stack and self._has_stack(module)):
            return False
        return sum(self.numel(p) for p in module.parameters() if p not in self.taken) <= self.bound

    def _has_stack(self, module: nn.Module) -> bool:
        found = self.stacked.get(module)
        if found is None:
            found = _is_stack(module) or any(self._has_stack(child) for child in module.children())
            self.stacked[module] = found
        return found

    def _take(self, module: nn.Module, name: str, params: list[nn.Parameter]) -> None:
        owned = [p for p in params if p not in self.taken]
        shared = [p for p in params if p in self.taken]
        if params:
            self.taken.update(owned)
            self.places.append(Place(module, name, owned, shared))


def _has_forward(module: nn.Module) -> bool:
    own = "forward" in vars(module)  # torch.compile(block), say: its hooks are outside of the graph, its child's inside
    runs = own or type(module).forward is not nn.Module.forward
    return runs and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _are_experts(name: str, module: nn.Module) -> bool:
    """A stack of experts: data decides which of them run, so they must not be gathered one by one."""
    return "expert" in name.lower() and _is_stack(module)


def _is_stack(module: nn.Module) -> bool:
    """A list of at least two modules of one class that have parameters."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    kinds = [type(child) for child in module.children() if next(child.parameters(), None) is not None]
    return len(kinds) > len(set(kinds))


def group_by_dtype(params: list[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Parameters by dtype, keeping their order."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault(p.dtype, []).append(p)
    return groups
