# SPDX-License-Identifier: Apache-2.0
"""The runtime: engine, configuration, schedules, ZeRO."""

from __future__ import annotations

from deepspeed.lazy import submodules

__getattr__ = submodules(__name__)
