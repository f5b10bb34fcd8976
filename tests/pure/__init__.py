# SPDX-License-Identifier: Apache-2.0
"""Promises that need neither ranks nor devices."""
