# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeedZeRoOffload`: a sharded module and its hooks, under the names that clients take them off and on by.

An engine without an optimizer hands this object out as its optimizer; with one it is ``optimizer.parameter_offload``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.utils.logging import warning_once

from .core.convert import is_released
from .core.model import ShardedModel

if TYPE_CHECKING:
    from deepspeed.checkpoint.state import Zero3State


class ParamCoordinator:
    """The recorded order of use, as clients that remove hooks for generation ask for it."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def is_invalid_trace(self) -> bool:
        """Whether no order is recorded."""
        fetcher = self._model.fetcher
        return not (fetcher.forward_trace.order or fetcher.eval_trace.order)

    def is_complete_trace(self) -> bool:
        """Whether an order is recorded."""
        return not self.is_invalid_trace()

    def _invalidate_trace(self) -> None:
        self._model.fetcher.forget_traces()

    def reset_step(self) -> None:
        """Release what is gathered."""
        self._model.fetcher.release_all()


class DeepSpeedZeRoOffload:
    """A sharded module: its hooks, its order of use, and release of what is gathered.

    Attributes:
        module: the model; ``forward_hooks``, ``backward_hooks``: removable handles. Clients remove them, run the module
            with its parameters gathered, and call ``_register_deepspeed_module(module)`` to put hooks back.
    """

    def __init__(self, model: ShardedModel) -> None:
        self.sharded = model
        self.param_coordinator = ParamCoordinator(model)
        self.persistence_threshold = model.plan.persistence_threshold
        module = model.module
        module.__dict__["ds_external_parameters"] = functools.partial(_external_parameters, module)
        module.__dict__["all_parameters"] = functools.partial(_all_parameters, module)
        self._state_dict_hook = module.register_state_dict_post_hook(_name_placeholders)

    @property
    def module(self) -> nn.Module:
        """The sharded model."""
        return self.sharded.module

    @property
    def forward_hooks(self) -> list[Any]:
        """Handles of the hooks that act before and after the whole model."""
        return self.sharded.hooks.forward_handles

    @forward_hooks.setter
    def forward_hooks(self, handles: list[Any]) -> None:
        self.sharded.hooks.forward_handles = handles

    @property
    def backward_hooks(self) -> list[Any]:
        """Handles of the hooks that release after a forward and act in the backward."""
        return self.sharded.hooks.backward_handles

    @backward_hooks.setter
    def backward_hooks(self, handles: list[Any]) -> None:
        self.sharded.hooks.backward_handles = handles

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Put the hooks back after a client removed them."""
        if module is not self.module:
            raise UsageError("_register_deepspeed_module takes the module that the engine was built with")
        self.sharded.hooks.remove()
        self.sharded.fetcher.forget_traces()
        self.sharded.hooks.install()

    _register_hooks_recursively = _register_deepspeed_module

    def setup_zero_stage3_hooks(self) -> None:
        """Put the hooks back."""
        self._register_deepspeed_module(self.module)

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that no context holds."""
        self.sharded.fetcher.release_all(persistent=True)

    def partition_all_parameters(self) -> None:
        """The older name of ``empty_partition_cache``."""
        self.empty_partition_cache()

    def invalidate_secondary_tensor(self) -> None:
        """Declare every hpZ secondary shard invalid: the next gathers cross groups."""
        self.sharded.drop_secondaries()

    def export_state(self) -> Zero3State:
        """What a checkpoint holds of a model without optimizer: every parameter as a frozen one; views, no copies."""
        from .state_exchange import export_model_state

        return export_model_state(self.sharded)

    def import_state(self, state: Zero3State, load_optimizer_states: bool) -> None:
        """Copy weights and buffers of ``state`` in, as a new version."""
        from .state_exchange import import_model_state

        import_model_state(self.sharded, state)
        self.invalidate_secondary_tensor()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """No optimizer, no groups."""
        return []

    def step(self, *_: Any, **__: Any) -> None:
        """There is nothing to step.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "step() on an engine without an optimizer: pass optimizer=, or an 'optimizer' section in the config"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There are no gradients."""

    def destroy(self) -> None:
        """Remove the hooks, release what is gathered and the hpZ shards; the primary shards stay."""
        self._state_dict_hook.remove()
        self.sharded.hooks.remove()
        self.sharded.fetcher.release_all(persistent=True)
        for unit in self.sharded.units:
            unit.watcher = None
            if not self.sharded.hooks.superseded:  # else they belong to a later engine
                unit.free_secondaries()
        groups = self.sharded.plan.groups
        groups.secondary = None
        if groups.pulse is not None:
            groups.pulse.stop()
            groups.pulse = None


def _name_placeholders(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Say once that a state dict holds placeholders instead of weights (PEFT#2450 and others saved those)."""
    hidden = [name for name, param in module.named_parameters() if is_released(param) and prefix + name in state]
    if hidden:
        names = ", ".join(hidden[:3]) + (", …" if len(hidden) > 3 else "")
        warning_once(
            f"state_dict() of a model that ZeRO-3 partitions holds empty placeholders for {len(hidden)} parameters "
            f"({names}). Save with engine.save_checkpoint or engine.save_16bit_model, or call state_dict() inside "
            "deepspeed.zero.GatheredParameters(model.parameters()). Nothing is lost where a client drops them and "
            "saves through the engine, as Lightning's strategy does"
        )


def _external_parameters(module: nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and parameters registered as used by ``module`` although another module owns them."""
    for key, param in module.__dict__.get("_external_params", {}).items():
        yield str(key), param


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from module.named_parameters(recurse=False)
    yield from _external_parameters(module)
