# SPDX-License-Identifier: Apache-2.0
"""Writers of training metrics, one file each; `deepspeed.monitor.monitor.MonitorMaster` drives them."""

from __future__ import annotations

from deepspeed.lazy import submodules

__getattr__ = submodules(__name__)
