# SPDX-License-Identifier: Apache-2.0
"""Writers of training metrics, one per service."""
