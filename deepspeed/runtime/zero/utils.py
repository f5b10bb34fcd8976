# SPDX-License-Identifier: Apache-2.0
"""Small questions about parameters, under the import path of the field."""

from __future__ import annotations

from .partition_parameters import is_zero_param

__all__ = ["is_zero_param"]
