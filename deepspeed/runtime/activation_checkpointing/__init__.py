# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing."""

from __future__ import annotations

from deepspeed.lazy import submodules

__getattr__ = submodules(__name__)
