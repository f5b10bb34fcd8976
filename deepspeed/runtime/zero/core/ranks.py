# SPDX-License-Identifier: Apache-2.0
"""Pure rank arithmetic: world size and hpZ partition size to rank lists."""

from __future__ import annotations


def hpz_groups(world: int, partition: int) -> list[list[int]]:
    """Rank lists of the secondary (hpZ) groups: ``partition`` consecutive ranks each.

    Source: ZeRO++ (arXiv 2306.10209), section on hierarchical partitioning.

    Raises:
        ValueError: ``partition`` does not divide ``world``.
    """
    if partition < 1 or world % partition:
        raise ValueError(f"hpZ partition size {partition} does not divide the world size {world}")
    return [list(range(start, start + partition)) for start in range(0, world, partition)]
