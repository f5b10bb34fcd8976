# SPDX-License-Identifier: Apache-2.0
"""Module and tensor hooks; each body calls one method of ``fetch`` or ``grads``.

A *scope* is a hooked module and the units its forward and backward need. Hooks sit on the few modules that own units,
not on every leaf. The backward of a scope is entered when the gradient of an output that it made is there. It is left
when a scope that it neither contains nor is part of is entered: autograd runs, of the nodes that are ready, the one
created last, so whatever the left scope computed after the entered one is done by then. Then its weights are released
and, unless an earlier call of it is still to come, its gradients are reduced.

Entering and leaving depend on which modules ran, never on which parameters inside a module got a gradient. So ranks
whose data take different branches inside a module issue the same collectives in the same order, reductions and gathers
alike (deepspeedai/DeepSpeed#7461, #7844). Whatever was not left is reduced and released when the backward ends.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import UsageError

from .fetch import Fetcher
from .grads import GradReducer
from .param import ShardedParam
from .unit import ShardedUnit

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Number that this thread's next autograd node gets."""


class Scope:
    """A hooked module, the units it needs, and those found to be used by it although another module owns them.

    Attributes:
        related: the scopes of modules that contain this one or that this one contains; ``started``: number of the first
            autograd node that the running forward may make; ``calls``: its forward calls whose backward is still to be
            entered (a call dies with the graph that it is part of).
    """

    __slots__ = ("calls", "extras", "module", "name", "related", "started", "units")

    def __init__(self, module: nn.Module, name: str, units: list[ShardedUnit]) -> None:
        self.module, self.name, self.units = module, name, units
        self.extras: list[ShardedUnit] = []
        self.related: frozenset[Scope] = frozenset()
        self.started = 0
        self.calls: list[weakref.ref[_Call]] = []

    def to_come(self) -> bool:
        """Whether the backward of one of the calls is still to be entered."""
        self.calls = [call for call in self.calls if call() is not None]
        return bool(self.calls)


class _Call:
    """One forward call of a scope; the hooks on its outputs keep it alive."""

    __slots__ = ("__weakref__",)


MANY_CALLS = 16
"""Forward calls of one scope after which those that no graph holds any more are looked for."""


_HOOKED = "_ds_hooked"
"""Attribute of a module with hooks, which takes them out of a copy of the module."""


class _Hooked:
    """``copy.deepcopy`` of the attribute that holds this takes the hooks of this file out of the copy of ``module``.

    They gather the parameters of the original; the copy has some of its own. The attribute is copied after the
    dictionaries that torch keeps hooks in, since it is the younger one.
    """

    def __init__(self, module: nn.Module) -> None:
        kinds = ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs", "hooks_always_called")
        self.by_number: list[dict[int, Any]] = [module.__dict__[f"_forward_{kind}"] for kind in kinds]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        ours = {
            number
            for hooks in self.by_number
            for number, hook in hooks.items()
            if getattr(hook, "__module__", None) == __name__
        }
        for hooks in self.by_number:
            copied = memo.get(id(hooks), {})
            for number in ours & copied.keys():
                del copied[number]


class ScopeHooks:
    """Installs the hooks of one model and holds what they share."""

    def __init__(self, root: nn.Module, scopes: list[Scope], fetcher: Fetcher, grads: GradReducer | None) -> None:
        self.root, self.scopes, self.fetcher, self.grads = root, scopes, fetcher, grads
        self.managed = self.superseded = False
        self.pass_owner: nn.Module | None = None
        self.active: list[Scope] = []
        self.entered: list[Scope] = []
        self.owners: dict[ShardedUnit, list[Scope]] = {}
        self.forward_handles: list[RemovableHandle] = []
        self.backward_handles: list[RemovableHandle] = []
        self.root_scope = next((s for s in scopes if s.module is root), None) or Scope(root, "", [])
        scope_of = {scope.module: scope for scope in [*scopes, self.root_scope]}
        for scope in scope_of.values():
            for child in scope.module.modules():
                if child in scope_of and child is not scope.module:
                    scope_of[child].related |= {scope}
                    scope.related |= {scope_of[child]}
            for unit in scope.units:
                self.owners.setdefault(unit, []).append(scope)
        for unit in [*fetcher.units, *fetcher.persistent]:
            unit.watcher = self
        if grads is not None:
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
        for module in {*passes, *(scope.module for scope in self.scopes)}:
            module.__dict__[_HOOKED] = _Hooked(module)
        if self.grads is not None:
            for unit in self.grads.order:
                for p in unit.trainable:
                    handle = p.param.register_post_accumulate_grad_hook(self.grads.hook_for(p))
                    self.backward_handles.append(handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScopeHooks:
        """A copy of a module names these before they are taken out of it."""
        return self

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

    def let_go(self, module: nn.Module) -> None:
        """`module` is about to get hooks of its own: where it contains this model, this model's go.

        Clients give a module to a second engine while the first is alive (Lightning validates and fits again, TRL
        trains what it computed log probabilities with). Of two sets of hooks each would gather and reduce.
        """
        if all(self.root is not child for child in module.modules()):
            return
        if self.grads is not None:
            self.grads.drain()
        self.remove()
        self.fetcher.release_all(persistent=True)
        for unit in [*self.fetcher.units, *self.fetcher.persistent]:
            unit.watcher = None
        self.superseded = True

    # -- forward

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        fetcher = self.fetcher
        if torch._C._current_graph_task_id() != -1:
            if not fetcher.in_backward:
                with torch.no_grad():  # the recomputation enabled them
                    self.begin_backward()
            return
        if fetcher.in_backward:  # a backward that raised left it so
            self.end_backward(completed=False)
        if fetcher.in_forward:
            return
        self.pass_owner = module
        self.active.clear()
        grad = torch.is_grad_enabled()
        if grad and self.grads is not None and not self.grads.has_gradients and self.grads.shards.allocated:
            self.grads.shards.free()
        fetcher.begin_forward(grad)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.pass_owner and torch._C._current_graph_task_id() == -1:
            self.pass_owner = None
            self.active.clear()
            self.fetcher.end_forward(completed=output is not None)

    def abort_forward(self) -> None:
        """The forward raised: release everything. torch calls hooks after an Exception, not after an interrupt."""
        if self.pass_owner is not None:
            self._end_forward(self.pass_owner, (), None)

    def _root_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._hook_outputs(self.root_scope, tensors_in(output))

    def _forward_hooks_of(self, scope: Scope) -> tuple[Callable[..., None], Callable[..., Any]]:
        fetcher, units, active = self.fetcher, scope.units, self.active
        extras = scope.extras

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            active.append(scope)
            scope.started = _next_node()
            for unit in units:
                fetcher.acquire(unit)
            for unit in extras:
                fetcher.acquire(unit)

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            if active and active[-1] is scope:
                active.pop()
            if type(output) is torch.Tensor:
                if self._is_weights(scope, output):
                    output = output.clone()  # a view of the weights would dangle once they are released
                tensors: Any = (output,)
            else:
                tensors = self._tensors_of(scope, output)
            if torch.is_grad_enabled():
                self._hook_outputs(scope, tensors)
                if not tensors:
                    for unit in units:
                        unit.hold_until_flush = True
            for unit in units:
                fetcher.leave(unit)
            for unit in extras:
                fetcher.leave(unit)
            return output

        return pre_forward, post_forward

    def _tensors_of(self, scope: Scope, output: Any) -> list[torch.Tensor]:
        tensors = list(tensors_in(output))
        for tensor in tensors:
            if self._is_weights(scope, tensor):
                for unit in scope.units:
                    unit.hold_until_flush = True  # the module returned (a view of) its weights
        return tensors

    def _is_weights(self, scope: Scope, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        pointer = tensor.untyped_storage().data_ptr()
        for unit in scope.units:
            if unit.storage is not None and unit.storage.data_ptr() == pointer:
                return True
        return False

    def _hook_outputs(self, scope: Scope, tensors: Iterable[torch.Tensor]) -> None:
        call = _Call()
        hook = partial(self._output_grad, scope, call)
        hooked: set[int] = set()
        for tensor in tensors:
            made = _made(tensor, scope.started)
            if made is not None and id(made) not in hooked:
                made.register_hook(hook)
                hooked.add(id(made))
        if hooked:
            if len(scope.calls) > MANY_CALLS:
                scope.to_come()
            scope.calls.append(weakref.ref(call))

    def on_access(self, params: list[ShardedParam], computing: bool) -> None:
        """Released parameters are about to be computed with: gather their units and remember who uses them.

        Args:
            computing: other tensors take part, so this is no inspection of parameters alone.
        """
        fetcher = self.fetcher
        inside = bool(self.active) or fetcher.in_forward or (fetcher.in_backward and computing)
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

    def on_pass(self, params: list[ShardedParam]) -> None:
        """A `GatheredParameters` block is entered; inside a pass its weights are used by the scope that runs.

        They are shown until the pass has ended, so that autograd finds them where it saved them and gradients are
        accumulated into parameters that have their shape. From then on the scope gathers them itself.
        """
        fetcher = self.fetcher
        if not (self.active or fetcher.in_forward or fetcher.in_backward):
            return
        self.on_access(params, True)
        for unit in dict.fromkeys(p.unit for p in params):
            fetcher.live[unit] = None
            unit.hold_until_flush = True

    # -- backward

    def _output_grad(self, scope: Scope, call: _Call, _: torch.Tensor) -> None:
        """The gradient of an output of ``call`` is there."""
        calls = scope.calls
        for position, known in enumerate(calls):
            if known() is call:
                del calls[position]
                break
        self.enter_backward(scope)

    def enter_backward(self, scope: Scope) -> None:
        """The backward of one call of ``scope`` begins; scopes that do not contain it are done with theirs."""
        fetcher, grads, entered = self.fetcher, self.grads, self.entered
        if not fetcher.in_backward:
            self.begin_backward()
        if not entered or entered[-1] is not scope:
            for other in entered[:]:
                if other is not scope and other not in scope.related:
                    entered.remove(other)
                    self.leave_backward(other)
            if scope not in entered:
                entered.append(scope)
        for unit in scope.units:
            fetcher.acquire_backward(unit)
            if grads is not None and unit.complete and unit.epoch == grads.epoch and not unit.late:
                grads.reduce_again(unit)
        for unit in scope.extras:
            unit.hold_until_flush = True
            fetcher.acquire_backward(unit)

    def leave_backward(self, scope: Scope) -> None:
        """The backward of the calls of ``scope`` that were entered is done: release, and reduce what is complete."""
        for unit in scope.units:
            if unit.hold_until_flush:
                continue
            owners = self.owners[unit]
            if len(owners) > 1:
                if any([owner in self.entered for owner in owners]):
                    continue
            elif self.grads is not None and not unit.params[0].external:
                if not scope.calls or not scope.to_come():
                    self.grads.complete(unit)
            self.fetcher.release_backward(unit)

    def _any_wants_gradient(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            units = [*self.fetcher.units, *self.fetcher.persistent]
            return any([p.param.requires_grad for unit in units for p in unit.params])

    def begin_backward(self) -> None:
        """Called at every first sign of a backward; begins it if it has not begun.

        In a backward that is to be differentiated (``create_graph``) autograd runs its nodes with gradients enabled.
        """
        if self.fetcher.in_backward:
            return
        if self.grads is None and self._any_wants_gradient():
            raise UsageError(
                "backward through a model that deepspeed.initialize set up without an optimizer: its gradients have "
                "nowhere to go. Pass optimizer=, model_parameters= with an 'optimizer' section, or run the forward "
                "under torch.no_grad()."
            )
        self.fetcher.begin_backward()
        if self.grads is not None:
            self.grads.begin(self.fetcher.epoch, plain=not self.managed)
        if torch.is_grad_enabled():
            self.fetcher.hold_all()
        if not self.managed:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self, completed: bool = True) -> None:
        """The backward ended; reduce and release what is left."""
        if not self.fetcher.in_backward:
            return
        self.active.clear()
        self.entered.clear()
        try:
            if self.grads is not None:
                if completed:
                    self.grads.finish()
                else:
                    self.grads.abort()
        finally:
            self.fetcher.end_backward(completed)


def _made(tensor: torch.Tensor, started: int) -> torch.Tensor | None:
    """What of ``tensor`` to hook: itself, or what it is a view of; None where no node since ``started`` made it.

    A view gets another node when it is written in place (``F.linear`` returns a view, ``nn.ReLU(inplace=True)``
    follows), and its hooks stay with the one that nothing leads to any more. Its base keeps both.
    """
    if tensor.grad_fn is None:
        return None
    for candidate in (tensor._base, tensor):
        node = candidate.grad_fn if candidate is not None else None
        if node is not None and node._sequence_nr() >= started:  # else the module only hands it on
            return candidate
    return None


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
