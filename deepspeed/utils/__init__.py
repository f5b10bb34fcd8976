# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.utils`: the names that users import from here, each loaded when it is first asked for."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from deepspeed.lazy import submodules

if TYPE_CHECKING:
    from deepspeed.comm import is_initialized as is_initialized
    from deepspeed.runtime.dataloader import RepeatingLoader as RepeatingLoader
    from deepspeed.utils import groups as groups
    from deepspeed.utils.logging import log_dist as log_dist
    from deepspeed.utils.logging import logger as logger
    from deepspeed.utils.logging import print_dist as print_dist
    from deepspeed.utils.logging import warning_once as warning_once

_FRAGMENT = "deepspeed.utils.tensor_fragment"
_LEAF = "deepspeed.utils.z3_leaf_module"
_LOGGING = "deepspeed.utils.logging"

_HOME = {
    "RepeatingLoader": "deepspeed.runtime.dataloader",
    "groups": "deepspeed.utils",
    "is_initialized": "deepspeed.comm",
    "LoggerFactory": _LOGGING,
    "log_dist": _LOGGING,
    "logger": _LOGGING,
    "print_dist": _LOGGING,
    "warning_once": _LOGGING,
    "safe_get_full_fp32_param": _FRAGMENT,
    "safe_get_full_grad": _FRAGMENT,
    "safe_get_full_optimizer_state": _FRAGMENT,
    "safe_get_local_fp32_param": _FRAGMENT,
    "safe_get_local_grad": _FRAGMENT,
    "safe_get_local_optimizer_state": _FRAGMENT,
    "safe_set_full_fp32_param": _FRAGMENT,
    "safe_set_full_grad": _FRAGMENT,
    "safe_set_full_optimizer_state": _FRAGMENT,
    "safe_set_local_fp32_param": _FRAGMENT,
    "safe_set_local_grad": _FRAGMENT,
    "safe_set_local_optimizer_state": _FRAGMENT,
    "safe_update_full_grad_vectorized": _FRAGMENT,
    "get_z3_leaf_modules": _LEAF,
    "set_z3_leaf_module": _LEAF,
    "set_z3_leaf_modules": _LEAF,
    "set_z3_leaf_modules_by_name": _LEAF,
    "set_z3_leaf_modules_by_suffix": _LEAF,
    "unset_z3_leaf_modules": _LEAF,
    "z3_leaf_module": _LEAF,
    "z3_leaf_parameter": _LEAF,
}

__all__ = list(_HOME)
_submodule = submodules(__name__)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        return _submodule(name)
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """`z3_leaf_module` names a function here, as clients know it, although a file of that name is loaded as well."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "z3_leaf_module" and isinstance(value, types.ModuleType):
            value = value.z3_leaf_module
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
