# SPDX-License-Identifier: Apache-2.0
"""Names of the keys in checkpoint files, for converters of others that read the files themselves.

Model files hold BUFFER_NAMES, PARAM_SHAPES, FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS and DS_VERSION. Optimizer files
hold OPTIMIZER_STATE_DICT and DS_VERSION; the rest are keys of the dict under OPTIMIZER_STATE_DICT.
"""

from __future__ import annotations

BUFFER_NAMES = "buffer_names"
PARAM_SHAPES = "param_shapes"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
DS_VERSION = "ds_version"

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
ZERO_STAGE = "zero_stage"
PARTITION_COUNT = "partition_count"
FP32_FLAT_GROUPS = "fp32_flat_groups"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
