# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations, multiply-accumulates and parameters of a model."""

from __future__ import annotations

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
