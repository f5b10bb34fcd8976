#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whole weights out of a ZeRO-3 checkpoint in a dtype of choice.

    python zero_to_torch.py CHECKPOINT_DIR OUTPUT_DIR [--dtype bf16] [--safe_serialization] [-t TAG]

A save puts a copy of this file beside its tags; it needs the `deepspeed` package and nothing else of the job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from deepspeed.errors import DeepSpeedError
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict, parser

__all__ = ["convert_zero_checkpoint_to_state_dict", "main"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 0, or 1 with the reason on stderr."""
    options = parser("Write whole weights out of a ZeRO-3 checkpoint.")
    options.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32", help="dtype of floating-point tensors")
    args = options.parse_args(argv)
    try:
        convert_zero_checkpoint_to_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
            dtype=_DTYPES[args.dtype],
        )
    except (DeepSpeedError, OSError, ValueError) as error:
        print(f"zero_to_torch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
