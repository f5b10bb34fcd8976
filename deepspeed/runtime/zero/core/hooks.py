# SPDX-License-Identifier: Apache-2.0
"""Module and tensor hooks; each body calls one method of ``fetch`` or ``grads``.

A *scope* is a hooked module and the units its forward and backward need. Hooks sit on the few modules that own units,
not on every leaf. A unit may be released in the backward in two ways:

- by count: all its parameters are trainable and every gradient has arrived, so every use of its weights is done;
- by watching (units with frozen or unused parameters): the gradients of all the module's inputs have arrived, so the
  module's backward is done. Each call counts for itself, since a module may be used twice in one step.

Whatever sends no signal is released when the backward ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import UsageError

from .fetch import Fetcher
from .grads import GradReducer
from .param import ShardedParam
from .unit import ShardedUnit


class Scope:
    """A hooked module, the units it needs, and those found to be used by it although another module owns them."""

    __slots__ = ("extras", "module", "name", "pre_backward", "units", "watched")

    def __init__(self, module: nn.Module, name: str, units: list[ShardedUnit]) -> None:
        self.module, self.name, self.units = module, name, units
        self.extras: list[ShardedUnit] = []
        self.watched = False
        self.pre_backward: Callable[[torch.Tensor], None] = _unset


def _unset(_: torch.Tensor) -> None:
    raise AssertionError("hooks are not installed")


class _Call:
    """One forward call of a watched scope, until its backward is done."""

    __slots__ = ("done", "entered", "hooks", "remaining", "scope")

    def __init__(self, hooks: ScopeHooks, scope: Scope, remaining: int) -> None:
        self.hooks, self.scope, self.remaining = hooks, scope, remaining
        self.entered = self.done = False

    def output_grad(self, _: torch.Tensor) -> None:
        if not self.entered:
            self.entered = True
            for unit in self.scope.units:
                unit.holds += 1
        self.hooks.enter_backward(self.scope)

    def input_grad(self, _: torch.Tensor) -> None:
        self.remaining -= 1
        if self.remaining == 0 and self.entered and not self.done:
            self.done = True
            self.hooks.leave_backward(self.scope)


class ScopeHooks:
    """Installs the hooks of one model and holds what they share."""

    def __init__(self, root: nn.Module, scopes: list[Scope], fetcher: Fetcher, grads: GradReducer | None) -> None:
        self.root, self.scopes, self.fetcher, self.grads = root, scopes, fetcher, grads
        self.managed = False
        self.pass_owner: nn.Module | None = None
        self.active: list[Scope] = []
        self.calls: dict[Scope, list[_Call]] = {}
        self.owners: dict[ShardedUnit, list[Scope]] = {}
        self.forward_handles: list[RemovableHandle] = []
        self.backward_handles: list[RemovableHandle] = []
        self.root_scope = next((s for s in scopes if s.module is root), None) or Scope(root, "", [])
        for scope in [*scopes, self.root_scope]:
            scope.pre_backward = self._pre_backward_of(scope)
            for unit in scope.units:
                self.owners.setdefault(unit, []).append(scope)
        for unit in fetcher.units:
            unit.on_access = self.on_access
            if any(not p.param.requires_grad for p in unit.params):
                self.watch(unit)
        for unit in fetcher.persistent:
            unit.on_access = self.on_access
        if grads is not None:
            grads.on_incomplete = self.watch
            grads.begin_backward = self.begin_backward

    # -- installation

    def install(self) -> None:
        """Put hooks on every scope's module, on the root and on every trainable parameter."""
        root = self.root
        passes = self._pass_modules()
        for module in passes:
            self.forward_handles.append(module.register_forward_pre_hook(self._begin_forward, prepend=True))
        for scope in self.scopes:
            pre, post = self._forward_hooks_of(scope)
            module = scope.module
            self.forward_handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
            self.backward_handles.append(module.register_forward_hook(post))
        if self.root_scope not in self.scopes:
            self.backward_handles.append(root.register_forward_hook(self._root_output))
        for module in passes:
            self.forward_handles.append(module.register_forward_hook(self._end_forward, always_call=True))
        if self.grads is not None:
            for unit in self.grads.order:
                for p in unit.trainable:
                    handle = p.param.register_post_accumulate_grad_hook(self.grads.hook_for(p))
                    self.backward_handles.append(handle)

    def _pass_modules(self) -> list[nn.Module]:
        """Modules whose call is a pass over several scopes: the root, and inner models that may be called alone."""
        scoped = {scope.module for scope in self.scopes}
        found: list[nn.Module] = []

        def visit(module: nn.Module) -> bool:
            if module in scoped and not any(child in scoped for child in module.modules() if child is not module):
                return True
            if any([visit(child) for child in module.children()]):
                found.append(module)
                return True
            return module in scoped

        visit(self.root)
        return [self.root, *(m for m in found if m is not self.root)]

    def remove(self) -> None:
        """Take every hook away."""
        for handle in [*self.forward_handles, *self.backward_handles]:
            handle.remove()
        self.forward_handles.clear()
        self.backward_handles.clear()

    def watch(self, unit: ShardedUnit) -> None:
        """Release ``unit`` by watching its modules' inputs: counting gradients will not tell."""
        if unit.persistent or unit.watched:
            return
        unit.watched = True
        for scope in self.owners.get(unit, []):
            scope.watched = True

    # -- forward

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        fetcher = self.fetcher
        if torch._C._current_graph_task_id() != -1:
            if not fetcher.in_backward:
                self.begin_backward()
            return
        if fetcher.in_backward:  # a backward that raised left it so
            self.end_backward(completed=False)
        if fetcher.in_forward:
            return
        self.pass_owner = module
        self.active.clear()
        self.calls.clear()
        grad = torch.is_grad_enabled()
        if grad and self.grads is not None and not self.grads.has_gradients and self.grads.shards.allocated:
            self.grads.shards.free()
        fetcher.begin_forward(grad)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.pass_owner and torch._C._current_graph_task_id() == -1:
            self.pass_owner = None
            self.active.clear()
            self.fetcher.end_forward(completed=output is not None)

    def _root_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.root_scope.pre_backward)

    def _forward_hooks_of(self, scope: Scope) -> tuple[Callable[..., None], Callable[..., None]]:
        fetcher, units, active = self.fetcher, scope.units, self.active
        extras = scope.extras

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            active.append(scope)
            for unit in units:
                fetcher.acquire(unit)
            for unit in extras:
                fetcher.acquire(unit)
            if scope.watched and torch.is_grad_enabled():
                self._watch_inputs(scope, args, kwargs)

        def post_forward(module: nn.Module, args: Any, output: Any) -> None:
            if active and active[-1] is scope:
                active.pop()
            self._watch_outputs(scope, output, torch.is_grad_enabled())
            for unit in units:
                fetcher.leave(unit)
            for unit in extras:
                fetcher.leave(unit)

        return pre_forward, post_forward

    def _watch_inputs(self, scope: Scope, args: Any, kwargs: Any) -> None:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        call = _Call(self, scope, len(inputs))
        self.calls.setdefault(scope, []).append(call)
        for tensor in inputs:
            tensor.register_hook(call.input_grad)

    def _watch_outputs(self, scope: Scope, output: Any, grad: bool) -> None:
        hook = scope.pre_backward
        if grad and scope.watched:
            calls = self.calls.get(scope)
            if calls:
                hook = calls.pop().output_grad
        if type(output) is torch.Tensor:
            tensors: Any = (output,)
        else:
            tensors = list(tensors_in(output))
        for tensor in tensors:
            if grad and tensor.requires_grad:
                tensor.register_hook(hook)
            pointer = tensor.untyped_storage().data_ptr()
            for unit in scope.units:
                if unit.storage is not None and unit.storage.data_ptr() == pointer:
                    unit.hold_until_flush = True  # the module returned (a view of) its weights
        if grad and not tensors:
            for unit in scope.units:
                unit.hold_until_flush = True

    def on_access(self, params: list[ShardedParam], computing: bool) -> None:
        """Released parameters are about to be computed with: gather their units and remember who uses them.

        Args:
            computing: other tensors take part, so this is no inspection of parameters alone.
        """
        fetcher = self.fetcher
        inside = bool(self.active) or fetcher.in_forward or fetcher.in_backward
        if not inside and not computing:
            return
        scope = self.active[-1] if self.active else self.root_scope
        for unit in dict.fromkeys(p.unit for p in params):
            if unit.persistent:
                fetcher.refresh_persistent()
                continue
            if inside and not fetcher.in_backward and unit not in scope.units and unit not in scope.extras:
                scope.extras.append(unit)
                unit.users += 1
                for p in unit.params:
                    p.external = True
            fetcher.ready(unit)
            if torch.is_grad_enabled() and not inside:
                unit.hold_until_flush = True

    # -- backward

    def _pre_backward_of(self, scope: Scope) -> Callable[[torch.Tensor], None]:
        def pre_backward(_: torch.Tensor) -> None:
            self.enter_backward(scope)

        return pre_backward

    def enter_backward(self, scope: Scope) -> None:
        """The first gradient of one of the scope's outputs is there."""
        fetcher = self.fetcher
        if not fetcher.in_backward:
            self.begin_backward()
        for unit in scope.units:
            fetcher.acquire_backward(unit)
        for unit in scope.extras:
            unit.hold_until_flush = True
            fetcher.acquire_backward(unit)

    def leave_backward(self, scope: Scope) -> None:
        """The backward of one call of a watched scope is done."""
        for unit in scope.units:
            if unit.holds:
                unit.holds -= 1
            if unit.holds or not unit.watched:
                continue
            self.fetcher.release_backward(unit)
            if self.grads is not None and len(self.owners[unit]) == 1 and not unit.hold_until_flush:
                if not any(p.external for p in unit.params):
                    self.grads.complete(unit)

    def begin_backward(self) -> None:
        """Called at every first sign of a backward; begins it if it has not begun."""
        if self.fetcher.in_backward:
            return
        if self.grads is None:
            raise UsageError(
                "backward through a model that deepspeed.initialize set up without an optimizer: its gradients have "
                "nowhere to go. Pass optimizer=, model_parameters= with an 'optimizer' section, or run the forward "
                "under torch.no_grad()."
            )
        self.fetcher.begin_backward()
        self.grads.begin(self.fetcher.epoch)
        if not self.managed:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self, completed: bool = True) -> None:
        """The backward ended; reduce and release what is left."""
        if not self.fetcher.in_backward:
            return
        self.active.clear()
        try:
            if self.grads is not None:
                if completed:
                    self.grads.finish()
                else:
                    self.grads.abort()
        finally:
            self.fetcher.end_backward(completed)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name, None))
    elif value is not None and not isinstance(value, (str, bytes, int, float, nn.Module, type)):
        for item in getattr(value, "__dict__", {}).values():
            if isinstance(item, (torch.Tensor, tuple, list, dict)):
                yield from tensors_in(item)
