# SPDX-License-Identifier: Apache-2.0
"""What the engine delegates to: building, reporting, checkpoints, configuration getters."""
