# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that work on many numbers of ranks, computed from the section ``elasticity`` of a configuration.

For callers that choose their own batch sizes by it. ``deepspeed.initialize`` does not read the section.
"""

from __future__ import annotations

from deepspeed.elasticity.batches import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
]
