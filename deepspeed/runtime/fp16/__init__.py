# SPDX-License-Identifier: Apache-2.0
"""Half-precision training."""
