# SPDX-License-Identifier: Apache-2.0
"""Pure layout arithmetic: shard sizes, spans and the packing of shards into sub-groups.

Invariant (the checkpoint format depends on it): a parameter is flattened row-major and cut into ``world`` equal
slices of ``ceil(numel / world)`` elements; slice ``r`` belongs to rank ``r``; the tail is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ALIGN_BYTES = 16


def shard_numel(numel: int, world: int) -> int:
    """Elements in one rank's shard of a parameter with ``numel`` elements."""
    return -(-numel // world)


def padded_numel(numel: int, world: int) -> int:
    """Elements of the padded, flattened parameter: ``world`` shards side by side."""
    return shard_numel(numel, world) * world


def secondary_numel(numel: int, world: int, partition: int) -> int:
    """Elements in one rank's hpZ (secondary) shard; ``partition`` divides ``world``."""
    return padded_numel(numel, world) // partition


def valid_span(numel: int, shard: int, rank: int) -> tuple[int, int]:
    """Half-open span of true (unpadded) elements of the flattened parameter that rank ``rank``'s shard holds.

    The span is empty (``start == end``) where the whole shard is padding.
    """
    start = min(shard * rank, numel)
    return start, min(start + shard, numel)


def aligned_offsets(sizes: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Start of each block in one buffer so that every start is a multiple of 16 bytes; and the buffer's length."""
    step = max(1, ALIGN_BYTES // itemsize)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // step) * step
    return offsets, end


def pack_sub_groups(shards: Iterable[int], sub_group_size: int) -> list[list[int]]:
    """Cut one optimizer group's parameters, given by shard size, into sub-groups; returns lists of positions.

    Positions are appended to a sub-group until its shards together reach ``sub_group_size`` elements. An empty group
    gives no sub-group.
    """
    groups: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for position, size in enumerate(shards):
        current.append(position)
        filled += size
        if filled >= sub_group_size:
            groups.append(current)
            current, filled = [], 0
    if current:
        groups.append(current)
    return groups
