# SPDX-License-Identifier: Apache-2.0
"""Promises under faults: dead, stalled and disagreeing ranks, non-finite numbers, engines that come and go."""
