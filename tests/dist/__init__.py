# SPDX-License-Identifier: Apache-2.0
"""Promises of training on several ranks, against plain torch in one process."""
