# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.checkpoint.ds_to_universal``: write a ZeRO-3 checkpoint in the universal layout.

Loading at another world size does not need this; it is for other tools, and for ``checkpoint.load_universal``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.universal import convert
from deepspeed.errors import DeepSpeedError

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__.split("\n")[0])
    parser.add_argument("--input_folder", type=Path, required=True, help="tag folder, e.g. checkpoints/global_step100")
    parser.add_argument("--output_folder", type=Path, required=True, help="folder to write")
    parser.add_argument("--num_extract_workers", type=int, default=2, help="threads; each holds one parameter")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="threads; the larger of the two counts")
    parser.add_argument("--inject_missing_state", action="store_true", help="write zero moments where there are none")
    parser.add_argument(
        "--keep_temp_folder", action="store_true", help="accepted; there is no temporary folder to keep"
    )
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="skip the comparison of hashes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 with the reason on stderr."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    args = _parser().parse_args(argv)
    try:
        count = convert(
            args.input_folder.absolute(),
            args.output_folder.absolute(),
            workers=max(args.num_extract_workers, args.num_merge_workers),
            inject_missing_state=args.inject_missing_state,
            verify=args.strict,
            progress=lambda done, total: tqdm(done, total=total, desc="parameters"),
        )
    except (DeepSpeedError, OSError, ValueError) as error:
        print(f"ds_to_universal: {error}", file=sys.stderr)
        return 1
    print(f"{count} parameters written to {args.output_folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
