# SPDX-License-Identifier: Apache-2.0
"""Devices behind one interface: `get_accelerator()` returns the CPU's or CUDA's.

What must hold: importing this package initialises no device. A third party subclasses `DeepSpeedAccelerator` and hands
an instance to `set_accelerator` before the first `get_accelerator`.
"""

from __future__ import annotations

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.real_accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator
from deepspeed.lazy import submodules

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

__getattr__ = submodules(__name__)
