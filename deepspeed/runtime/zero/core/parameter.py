# SPDX-License-Identifier: Apache-2.0
"""What users see of a sharded parameter: ``nn.Parameter`` with read-through ``ds_*`` views.

The class of a parameter follows its state. While its full weights are exposed it is a ``ZeroParameter``, which costs
nothing. While they are not it is a ``ReleasedZeroParameter``, which notices that an operation is about to compute with
an empty tensor and gathers it first. So tied and external weights, a child that is called by itself and code that
never heard of sharding work without registration, at no cost where the weights are there already.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import access, fetch, host
from .param import ShardedParam, ShardGroups, ZeroParamStatus, ZeroParamType
from .unit import ShardedUnit, conceal_param

_PASS = frozenset(
    """element_size is_floating_point is_complex is_signed requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad untyped_storage storage storage_type get_device type_as __repr__
    __str__ __format__ __hash__ __reduce_ex__ __reduce__ __setstate__ __deepcopy__ __dir__ is_pinned is_shared
    share_memory_ is_inference is_set_to is_conj is_neg is_coalesced new_empty new_zeros new_ones new_tensor new_full
    backward has_names names _is_view _has_compatible_shallow_copy_type _typed_storage data_ptr""".split()
)
"""Operations that do not look at weights or their shape: a released parameter answers as the empty tensor it is."""

_SHAPED = frozenset(("T", "mT", "H", "mH", "real", "imag", "shape", "ndim", "data", "nbytes"))
"""Properties that depend on weights or their shape."""


_WEIGHTS_ALONE = frozenset(("_weight_norm",))
"""Computations of which every argument is a weight. Models of transformers read such a weight while they are built."""


class ZeroParameter(nn.Parameter):
    """An ``nn.Parameter`` that is sharded over the ranks; ``ds_*`` attributes are views of its ``ShardedParam``."""

    _sharded: ShardedParam

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Code that rebuilds a parameter with ``type(p)(data)`` gets a plain one: the copy is not sharded."""
        return nn.Parameter(torch.empty(0) if data is None else data, requires_grad)

    # -- read-through views

    @property
    def ds_id(self) -> int:
        """Process-wide number of this parameter; its presence means that the parameter is sharded."""
        return self._sharded.id

    @property
    def ds_shape(self) -> torch.Size:
        """Full shape."""
        return self._sharded.shape

    @property
    def ds_numel(self) -> int:
        """Elements of the full parameter."""
        return self._sharded.numel

    @property
    def ds_numel_aligned(self) -> int:
        """Elements of the padded parameter: a multiple of the world size."""
        return self._sharded.padded_numel

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the full weights are visible, on their way, or not here."""
        sharded = self._sharded
        if sharded.status is ZeroParamStatus.NOT_AVAILABLE and sharded.unit.handle is not None:
            return ZeroParamStatus.INFLIGHT
        return sharded.status

    @property
    def ds_tensor(self) -> torch.Tensor:
        """Primary shard: 1-D, ``ceil(ds_numel / world)`` elements, in the parameter's dtype.

        Carries ``ds_numel`` (its elements), ``status`` and ``final_location`` (None: it is where it says).
        """
        sharded = self._sharded
        host.before_write((sharded,))  # whoever gets it may write it
        shard: Any = sharded.shard
        if not hasattr(shard, "ds_numel"):
            shard.ds_numel, shard.status, shard.final_location = shard.numel(), ZeroParamStatus.AVAILABLE, None
        return shard  # type: ignore[no-any-return]

    @property
    def ds_secondary_tensor(self) -> torch.Tensor | None:
        """hpZ shard: 1-D, or None where there is no valid one."""
        return self._sharded.valid_secondary()

    @property
    def ds_secondary_tensor_group_size(self) -> int:
        """Ranks in one hpZ group (1 without hpZ)."""
        secondary = self._sharded.groups.secondary
        return secondary.size if secondary is not None else 1

    @property
    def ds_secondary_tensor_num_of_groups(self) -> int:
        """Number of hpZ groups."""
        return self._sharded.groups.primary.size // self.ds_secondary_tensor_group_size

    @property
    def ds_process_group(self) -> Any:
        """Group that the primary shards are spread over (None in a world of one)."""
        return self._sharded.groups.primary.group

    @property
    def ds_zero_param_process_group(self) -> Any:
        """Group that the hpZ shards are spread over, or None without hpZ."""
        secondary = self._sharded.groups.secondary
        return secondary.group if secondary is not None else None

    @property
    def ds_persist(self) -> bool:
        """Whether the parameter stays gathered (``stage3_param_persistence_threshold``)."""
        return self._sharded.persistent

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """Modules that use the parameter now, by id; a snapshot."""
        unit = self._sharded.unit
        return {id(unit)} if unit.users else set()

    @property
    def ds_param_type(self) -> ZeroParamType:
        """Always ``NORMAL``."""
        return ZeroParamType.NORMAL

    @property
    def is_external_param(self) -> bool:
        """Whether a module other than its owner uses the parameter."""
        return self._sharded.external

    @property
    def ds_z3_leaf_module(self) -> bool:
        """Whether the parameter belongs to a module marked as leaf."""
        return self._sharded.leaf

    @property
    def nvme_swapper(self) -> None:
        """NVMe swapping is not part of this package."""
        return None

    @property
    def ds_grad_is_ready(self) -> bool:
        """Tiled computations set this False until the last tile, so that the gradient is reduced once."""
        return self._sharded.grad_is_ready

    @ds_grad_is_ready.setter
    def ds_grad_is_ready(self, value: bool) -> None:
        self._sharded.grad_is_ready = bool(value)

    # -- operations

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False) -> Any:
        """Gather the full weights of ``param_list`` (default: this parameter). Collective over the group.

        With ``async_op`` returns an object whose ``wait()`` shows the weights.
        """
        params = sharded_of([self] if param_list is None else param_list)
        if async_op:
            return _Pending(params)
        access.gather_params(params)
        return None

    def all_gather_coalesced(self, params: Iterable[nn.Parameter] | None = None, **_: Any) -> Any:
        """Start gathering several parameters in one call; returns an object whose ``wait()`` shows the weights."""
        return _Pending(sharded_of([self] if params is None else params))

    def partition(
        self,
        param_list: Iterable[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Release the full weights of ``param_list`` (default: this parameter).

        Args:
            has_been_updated: write the full weights back first; they must be equal on every rank.
            free_data: give the memory back.
        """
        access.partition_params(sharded_of([self] if param_list is None else param_list), has_been_updated, free_data)

    def partition_numel(self) -> int:
        """Elements of one rank's shard."""
        return self._sharded.shard.numel()

    def aligned_size(self) -> int:
        """Elements of the padded parameter."""
        return self._sharded.padded_numel

    def padding_size(self) -> int:
        """Elements of padding at the end of the flattened parameter."""
        return self._sharded.padded_numel - self._sharded.numel

    def get_partition_rank(self) -> int:
        """This rank's number within the group."""
        return self._sharded.groups.primary.rank

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Shard further parameters over the same groups."""
        from .convert import shard_parameter

        for param in param_list:
            if not isinstance(param, ZeroParameter):
                shard_parameter(param, self._sharded.groups)

    def ds_summary(self, *_: Any, **__: Any) -> dict[str, Any]:
        """State of the parameter as a plain dict."""
        grad = self.grad
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.numel(),
            "ds_numel": self.ds_numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,
            "grad_shape": tuple(grad.shape) if grad is not None else None,
            "persist": self.ds_persist,
            "active_sub_modules": self.ds_active_sub_modules,
            "ds_tensor.shape": tuple(self.ds_tensor.shape),
        }

    def item(self) -> Any:
        """Value of a one-element parameter; gathers it first (collective)."""
        sharded = self._sharded
        if sharded.status is ZeroParamStatus.AVAILABLE:
            return self.data.item()
        access.gather_params([sharded])
        try:
            return self.data.item()
        finally:
            access.partition_params([sharded])

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Inside ``GatheredParameters`` a plain parameter with the full weights; else a sharded one of its own.

        The sharded copy has the same groups, a shard of its own and the attributes; nothing is communicated.
        """
        if id(self) in memo:
            return memo[id(self)]
        sharded = self._sharded
        if sharded.pins:
            memo[id(self)] = copied = nn.Parameter(self.data.clone(), self.requires_grad)
            return copied
        memo[id(self)] = copied = nn.Parameter(sharded.unit.empty, self.requires_grad)
        base: Any = next(base for base in type(self).__mro__ if not issubclass(base, ZeroParameter))
        copied.__class__ = base
        adopt_shard(copied, sharded.shard.clone(), sharded.shape, sharded.groups, sharded.unit.device)
        own = {name: value for name, value in self.__dict__.items() if name != "_sharded"}
        copied.__dict__.update(copy.deepcopy(own, memo))
        return copied

    def detach(self) -> torch.Tensor:
        """The tensor without history; to ``nn.Parameter(self)``, what it takes to become a plain parameter.

        torch's constructor insists that ``detach`` keeps the class of whatever is not a plain tensor. The copy has
        memory of its own, since that of gathered weights is freed. (``nn.utils.parametrizations.weight_norm``)
        """
        plain = super().detach()
        if sys._getframe(1).f_code is not _PARAMETER_NEW:
            return plain
        becoming: _Becoming = torch.Tensor._make_subclass(_Becoming, plain.clone(), False)  # type: ignore[assignment]
        becoming.__dict__["origin"] = self, type(self)
        self.__class__ = _Becoming  # type: ignore[assignment]
        return becoming

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickled as the plain parameter that it shows."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(proto)


class _Becoming(nn.Parameter):
    """Class of a sharded parameter and its copy for as long as ``nn.Parameter(sharded)`` compares the two."""

    def _settle(self) -> None:
        origin, cls = self.__dict__.pop("origin")
        origin.__class__ = cls
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def requires_grad_(self, requires_grad: bool = True) -> _Becoming:
        try:
            super().requires_grad_(requires_grad)
        except RuntimeError:
            self._settle()
            raise
        return self

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        """The last thing that torch's constructor does."""
        self._settle()


_PARAMETER_NEW = nn.Parameter.__new__.__code__


class ReleasedZeroParameter(ZeroParameter):
    """A sharded parameter whose weights are not exposed: computing with it gathers it first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name == "__set__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute in _SHAPED and name == "__get__":
                _show_released(func, args, kwargs)
        elif name not in _PASS and (not name.endswith("_") or name.startswith("__")):
            _show_released(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _show_released(func: Any, args: Any, kwargs: Any) -> None:
    """Gather the released parameters among the arguments if a forward uses them.

    In a forward any use counts, also of the shape alone. Outside one an operation on nothing but parameters is taken as
    an inspection (a rank may do it alone, and a gather is collective): it sees the empty tensor.
    """
    tensors = [t for t in _leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
    released = [t for t in tensors if isinstance(t, ReleasedZeroParameter)]
    if not released or (getattr(func, "__name__", "") == "to" and tensors[0] is not released[0]):
        return  # x.to(weight) asks for a dtype and a device
    watcher = released[0]._sharded.unit.watcher
    name = getattr(func, "__name__", "")
    others = len(tensors) > sum(isinstance(t, ZeroParameter) for t in tensors) or name in _WEIGHTS_ALONE
    if watcher is not None:
        watcher.on_access([p._sharded for p in released], others)
    elif others and name not in ("equal", "allclose", "isclose"):
        access.gather_params([p._sharded for p in released])


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


class _Pending:
    """Gathers that were issued and are shown by ``wait``."""

    def __init__(self, params: list[ShardedParam]) -> None:
        self.params = params
        for unit, chosen in access.by_unit(params).items():
            fetch.start_gather_of(unit, chosen)

    def wait(self, **_: Any) -> None:
        """Show the weights."""
        access.gather_params(self.params)


def sharded_of(params: Iterable[Any]) -> list[ShardedParam]:
    """The ``ShardedParam`` of every sharded parameter among ``params``, each once, others left out."""
    found: dict[ShardedParam, None] = {}
    for param in params:
        if isinstance(param, ZeroParameter):
            found[param._sharded] = None
    return list(found)


@functools.cache
def classes_for(base: type) -> tuple[type, type]:
    """The exposed and the released class for parameters of class ``base``."""
    if base is nn.Parameter:
        return ZeroParameter, ReleasedZeroParameter
    shown = type(f"Zero{base.__name__}", (ZeroParameter, base), {})
    return shown, type(f"ReleasedZero{base.__name__}", (ReleasedZeroParameter, base), {})


def adopt_shard(
    param: nn.Parameter, shard: torch.Tensor, shape: torch.Size, groups: ShardGroups, device: torch.device
) -> ShardedParam:
    """Make ``param`` a sharded parameter of ``shape`` whose shard is ``shard``; its own data is dropped."""
    shown, released = classes_for(type(param))
    sharded = ShardedParam(param, shard, shape, groups, shown, released)
    ShardedUnit([sharded], device)
    param.data = sharded.unit.empty
    param.__class__ = shown
    param._sharded = sharded  # type: ignore[attr-defined]
    conceal_param(sharded)
    return sharded


def numel_of(param: nn.Parameter) -> int:
    """True number of elements of a parameter, sharded or not."""
    return param._sharded.numel if isinstance(param, ZeroParameter) else param.numel()
