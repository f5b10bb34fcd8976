# SPDX-License-Identifier: Apache-2.0
"""Leaf modules: modules that are gathered as one unit with all their descendants.

Needed where a module's forward uses different descendants on different ranks (experts) and the module is larger than
what would be one unit anyway. Marks are set before or after ``deepspeed.initialize``; those set afterwards count from
the next ``initialize``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from deepspeed.runtime.zero.core.parameter import ZeroParameter
from deepspeed.utils.logging import warning_once

_MARK = "_z3_leaf"

Classes = Iterable[type[nn.Module] | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return bool(model.__dict__.get(_MARK, False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether the parameter belongs to a marked module of an initialised model."""
    return bool(getattr(param, "ds_z3_leaf_module", False))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    if any(isinstance(param, ZeroParameter) and param._sharded.unit.index >= 0 for param in model.parameters()):
        warning_once(
            "leaf modules were changed after deepspeed.initialize: units are formed there, so the mark counts from the "
            "next initialize on"
        )
    model.__dict__[_MARK] = flag


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Every marked module below ``model``, itself included."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _class_names(module: nn.Module) -> set[str]:
    names = set()
    for cls in type(module).__mro__:
        names |= {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
    return names


def _is_one_of(module: nn.Module, classes: list[type[nn.Module] | str]) -> bool:
    names = _class_names(module)
    return any(kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in classes)


def _mark(model: nn.Module, classes: Classes, flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    wanted: list[type[nn.Module] | str] = [classes] if isinstance(classes, (str, type)) else list(classes)
    found = [module for module in model.modules() if _is_one_of(module, wanted)]
    if not found and raise_if_not_found:
        names = [kind if isinstance(kind, str) else kind.__name__ for kind in wanted]
        raise ValueError(f"no module of {type(model).__name__} is an instance of {', '.join(names)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module that is an instance of one of the classes (given as classes, names or qualified names).

    Returns:
        the marked modules.

    Raises:
        ValueError: there is none, unless ``raise_if_not_found`` is False.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark off every module that is an instance of one of the classes; see ``set_z3_leaf_modules``."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def _mark_named(
    model: nn.Module, wanted: Iterable[str], matches: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    modules: dict[nn.Module, None] = {}
    missing = []
    for name in [wanted] if isinstance(wanted, str) else wanted:
        found = [module for path, module in model.named_modules() if matches(path, name)]
        if not found:
            missing.append(name)
        for module in found:
            modules[module] = None
            set_z3_leaf_module(module, True)
    return list(modules), missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their name in ``named_modules()``; returns (marked modules, names not found).

    Raises:
        ValueError: nothing was found, unless ``raise_if_not_found`` is False.
    """
    found, missing = _mark_named(model, module_names, lambda path, name: path == name)
    if not found and missing and raise_if_not_found:
        raise ValueError(f"{type(model).__name__} has no module named {', '.join(missing)}")
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose name ends in a suffix (at a dot); otherwise as ``set_z3_leaf_modules_by_name``."""
    found, missing = _mark_named(
        model, module_name_suffixes, lambda path, name: path == name or path.endswith("." + name.lstrip("."))
    )
    if not found and missing and raise_if_not_found:
        raise ValueError(f"{type(model).__name__} has no module whose name ends in {', '.join(missing)}")
    return found, missing
