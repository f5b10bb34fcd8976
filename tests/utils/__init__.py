# SPDX-License-Identifier: Apache-2.0
"""Tests: utils, the data loader and the helpers of runtime.utils."""
