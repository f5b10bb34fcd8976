# SPDX-License-Identifier: Apache-2.0
"""The runtime: engine, configuration, schedules, ZeRO."""
