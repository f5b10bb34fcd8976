# SPDX-License-Identifier: Apache-2.0
"""Asynchronous file I/O: reported as not available (see `op_builder`)."""

from __future__ import annotations

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
