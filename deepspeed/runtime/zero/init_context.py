# SPDX-License-Identifier: Apache-2.0
"""`Init`: modules are sharded as they are constructed, so that no rank ever holds the whole model.

While a context is open the constructor of every ``nn.Module`` class is wrapped: when the outermost constructor of a
module returns, the parameters that the module owns directly are sharded with the weights of rank 0. New tensors get the
target dtype and device by torch's own defaults; nothing else of torch is replaced, and everything is put back when the
last context closes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deepspeed.errors import NotSupportedError, UsageError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.logging import warning_once

from . import checks
from .checks import Agreement
from .core import access, host
from .core.convert import shard_parameter
from .core.param import ShardedParam, ShardGroups
from .core.parameter import ZeroParameter, sharded_of
from .core.sanity import SanityChecks
from .gathered import GatheredParameters
from .topology import current_device, ensure_distributed, shard_groups


class _Patches:
    """What is wrapped while a context is open; one per process, since the wrapped classes are."""

    def __init__(self) -> None:
        self.contexts: list[Init] = []
        self.constructing: set[int] = set()
        self.originals: dict[type, Callable[..., None]] = {}
        self.apply: Any = None

    def install(self) -> None:
        """Wrap every constructor, now and for classes to come."""
        for cls in {nn.Module, *_subclasses(nn.Module)}:
            self.wrap(cls)
        patches = self

        def wrap_new_class(cls: type, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            patches.wrap(cls)

        nn.Module.__init_subclass__ = classmethod(wrap_new_class)  # type: ignore[assignment]
        self.apply = nn.Module.apply
        nn.Module.apply = _gathering_apply(self, self.apply)  # type: ignore[method-assign, assignment]
        self.to_empty = nn.Module.to_empty
        nn.Module.to_empty = _sharding_to_empty(self, self.to_empty)  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Put everything back."""
        for cls, original in self.originals.items():
            cls.__init__ = original  # type: ignore[misc]
        self.originals.clear()
        self.constructing.clear()
        del nn.Module.__init_subclass__
        nn.Module.apply = self.apply  # type: ignore[method-assign]
        nn.Module.to_empty = self.to_empty  # type: ignore[method-assign]

    def wrap(self, cls: type) -> None:
        """Wrap the constructor that ``cls`` defines, if it defines one."""
        original = cls.__dict__.get("__init__")
        if original is None or cls in self.originals:
            return

        @functools.wraps(original)
        def constructor(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            outermost = id(module) not in self.constructing
            if outermost:
                self.constructing.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                if outermost:
                    self.constructing.discard(id(module))
            if outermost and self.contexts and isinstance(module, nn.Module) and "_parameters" in module.__dict__:
                self.contexts[-1]._shard_own_parameters(module)

        try:
            cls.__init__ = constructor  # type: ignore[misc]
        except (TypeError, AttributeError):
            return  # a class that cannot be changed keeps its constructor; its parameters are sharded by `initialize`
        self.originals[cls] = original


_patches = _Patches()


def _subclasses(cls: type) -> Iterator[type]:
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _gathering_apply(patches: _Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        """``nn.Module.apply`` with each module's own parameters gathered; what rank 0 writes is kept."""
        if not patches.contexts or not patches.contexts[-1].override_module_apply:
            return original(module, fn)  # type: ignore[no-any-return]
        for child in module.children():
            child.apply(fn)
        with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            fn(module)
        return module

    return apply


def _sharding_to_empty(patches: _Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        """``nn.Module.to_empty``, sharding each module as soon as it has memory (``torch.nn.utils.skip_init``)."""
        for part in list(module.modules()) if recurse else [module]:
            original(part, device=device, recurse=False)
            if patches.contexts:
                patches.contexts[-1]._shard_own_parameters(part)
        return module

    return to_empty


@contextmanager
def suspended() -> Iterator[None]:
    """No construction is sharded inside this block, although an `Init` context is open (``deepspeed.initialize``)."""
    contexts, _patches.contexts = _patches.contexts, []
    try:
        yield
    finally:
        _patches.contexts = contexts


class Init:
    """Shard modules as they are constructed (context manager), or one that exists (``module=``). Collective.

    Args:
        module: an existing module to shard at once.
        data_parallel_group: ranks to shard over (default: all); ``zero_param_parallel_group``: ranks of one hpZ group.
        remote_device: "cpu" keeps shards in host memory; ``pin_memory``, or the configuration's
            ``offload_param.pin_memory``, page-locks them where the accelerator can.
        config_dict_or_path: a configuration, as for ``deepspeed.initialize``; ``config`` is its older name.
        enabled: False makes the context do nothing.
        dtype: dtype of new floating-point tensors (default: the configuration's; without one, half precision where the
            accelerator has it).
        mpu: gives the data-parallel group by ``get_data_parallel_group()``.

    A ``deepspeed.initialize`` with hpZ later covers these parameters too, whatever this context was told.

    Raises:
        NotSupportedError: NVMe or quantised weights.
        UsageError: several ranks were started and the group has one; or ranks differ in versions, configuration or
            the module.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Sequence[str] = ("dtype", "device"),
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise NotSupportedError("zero.Init: quantised weights are not built; leave zero_quantized_* at False")
        if param_swapper is not None or remote_device == "nvme":
            raise NotSupportedError('zero.Init: NVMe offload is not built; use remote_device="cpu"')
        if config is not None:
            warning_once("zero.Init(config=...) is the older name of config_dict_or_path")
            config_dict_or_path = config if config_dict_or_path is None else config_dict_or_path
        ensure_distributed()
        with Agreement("zero.Init") as agreement:
            settings = None
            if config_dict_or_path is not None:
                settings = (
                    config_dict_or_path
                    if isinstance(config_dict_or_path, DeepSpeedConfig)
                    else DeepSpeedConfig(config_dict_or_path, mpu)
                )
            zero = settings.zero_config if settings is not None else None
            self.override_module_apply = zero.override_module_apply if zero is not None else True
            self.dtype = dtype or (settings.param_dtype if settings is not None else _default_dtype())
            self.tensor_overrides = tuple(tensor_overrides)
            self.device = current_device()
            configured = zero is not None and zero.param_device.value == "cpu"
            offload = remote_device == "cpu" or configured
            wanted = pin_memory or (zero is not None and zero.pins_params)
            self.pin = offload and wanted and host.can_pin(self.device)
            self.shard_device = torch.device("cpu") if offload else self.device
            group = data_parallel_group or sequence_data_parallel_group
            if group is None and mpu is not None and hasattr(mpu, "get_data_parallel_group"):
                group = mpu.get_data_parallel_group()
            if group is not None:
                agreement.groups = shard_groups(1, group)
            agreement.hold(_subjects(self, settings, module))
            hpz = zero.zero_hpz_partition_size if zero is not None else 1
            with agreement.waiting("making process groups"):
                self.groups: ShardGroups = shard_groups(hpz, group, zero_param_parallel_group)
        agreement.hand_over(self.groups)
        if zero is not None and zero.enable_sanity_checks:
            self.groups.checks = SanityChecks(self.groups)
        self._open = ExitStack()
        if module is not None:
            for part in module.modules():
                self._shard_own_parameters(part)
            self._stop_pulse()

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        if not _patches.contexts:
            _patches.install()
        _patches.contexts.append(self)
        if "dtype" in self.tensor_overrides:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._open.callback(torch.set_default_dtype, before)
        if "device" in self.tensor_overrides and self.device.type != "cpu":
            self._open.enter_context(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._open.close()
        if self in _patches.contexts:
            _patches.contexts.remove(self)
        if not _patches.contexts:
            _patches.remove()
        self._stop_pulse()

    def _stop_pulse(self) -> None:
        """Every parameter is sharded: nobody is waited for until an engine, with a pulse of its own, takes them."""
        if self.groups.pulse is not None:
            self.groups.pulse.stop()
            self.groups.pulse = None

    def _shard_own_parameters(self, module: nn.Module) -> None:
        """Shard the parameters that ``module`` owns directly; those sharded already or on the meta device are left."""
        for name, param in module._parameters.items():
            if param is None or isinstance(param, ZeroParameter) or param.is_meta:
                continue
            if not isinstance(param, nn.Parameter):
                raise UsageError(f"zero.Init: {type(module).__name__}.{name} is not an nn.Parameter")
            dtype = self.dtype if "dtype" in self.tensor_overrides else None
            sharded = shard_parameter(param, self.groups, self.device, self.shard_device, dtype, pin=self.pin)
            sharded.name = f"{type(module).__name__}.{name}"

    # -- the write path of every change from outside the optimizer (hpZ promise H3)

    @staticmethod
    def _partition(
        param_list: Iterable[nn.Parameter], force: bool = False, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        """Release the full weights of ``param_list``; with ``has_been_updated`` write them to every copy first.

        ``has_been_updated`` is handed on to ``_partition_param_sec``: the full weights are at hand on every rank, so
        the hpZ secondary is rewritten at once and cannot be stale (deepspeedai/DeepSpeed#7606).
        """
        access.partition_params(
            sharded_of(param_list), has_been_updated, free_data, secondary=Init._partition_param_sec
        )

    @staticmethod
    def _partition_param_sec(params: Sequence[ShardedParam], has_been_updated: bool = False) -> None:
        """Rewrite the hpZ secondary shards of ``params`` from their full weights if these are new."""
        access.refresh_secondary(params, has_been_updated)


def _subjects(context: Init, settings: DeepSpeedConfig | None, module: nn.Module | None) -> list[checks.Section]:
    """What every rank must have alike."""
    own = [("dtype", str(context.dtype)), ("shards live on", context.shard_device.type)]
    found = [checks.versions(), checks.Section("arguments", own)]
    if settings is not None:
        found.append(checks.configuration(settings))
    if module is not None:
        found.append(checks.parameters(module))
    return found


def _default_dtype() -> torch.dtype:
    from deepspeed.accelerator import get_accelerator

    return torch.float16 if get_accelerator().is_fp16_supported() else torch.float32
