# SPDX-License-Identifier: Apache-2.0
"""Tests: counts, memory, kernels and the cost model."""
