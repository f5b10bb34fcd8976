# SPDX-License-Identifier: Apache-2.0
"""Optimizers, and the table of native ops.

The package builds nothing at import or at start; `__compatible_ops__` says which native ops could be used.
"""

from __future__ import annotations

from deepspeed.lazy import submodules
from deepspeed.ops import adagrad, adam, lion, op_builder

__all__ = ["__compatible_ops__", "adagrad", "adam", "lion", "op_builder"]

__compatible_ops__: dict[str, bool] = {builder.NAME: builder().is_compatible() for builder in op_builder.ALL_BUILDERS}

__getattr__ = submodules(__name__)
