# SPDX-License-Identifier: Apache-2.0
"""Import path of tensor parallelism, which is not built: only what clients call whether they use it or not."""

from __future__ import annotations

from deepspeed.lazy import submodules

__getattr__ = submodules(__name__)
