# SPDX-License-Identifier: Apache-2.0
"""Single parameters, in sets that a user chose: gathered for a block, shown, written back, concealed.

Invariant: whoever writes full weights writes the shard through ``write_primary``, which makes a new version of it and
tells the masters. Then no copy of the old weights can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .fetch import finish_gather, start_gather_of
from .param import ShardedParam, ZeroParamStatus
from .unit import ShardedUnit, conceal_param, expose_param


def by_unit(params: Iterable[ShardedParam]) -> dict[ShardedUnit, list[ShardedParam]]:
    """Group parameters by unit, in order of id, each once."""
    units: dict[ShardedUnit, list[ShardedParam]] = {}
    for p in sorted(set(params), key=lambda p: p.id):
        units.setdefault(p.unit, []).append(p)
    return units


def gather_params(params: Iterable[ShardedParam]) -> None:
    """Gather and expose ``params``; collective over their group. All gathers are issued before the first is waited
    for."""
    units = by_unit(params)
    for unit, chosen in units.items():
        start_gather_of(unit, chosen)
    for unit, chosen in units.items():
        finish_gather(unit)
        unit.lent = True  # a state dict that is made of them, say, may outlive the block
        for p in chosen:
            expose_param(p)


def refresh_secondary(params: Sequence[ShardedParam], has_been_updated: bool) -> None:
    """Rewrite the hpZ shards of ``params`` (of one unit) from their exposed full weights, if these are new."""
    groups = params[0].groups if params else None
    if has_been_updated and groups is not None and groups.secondary is not None and not groups.aliased:
        params[0].unit.refresh_secondaries(list(params))


def partition_params(
    params: Iterable[ShardedParam],
    has_been_updated: bool = False,
    free: bool = True,
    secondary: Callable[[Sequence[ShardedParam], bool], None] = refresh_secondary,
) -> None:
    """Conceal ``params``, except what a block holds; with ``has_been_updated`` first write their full weights back.

    The full weights must then be the same on every rank. The hpZ secondary is rewritten at once, so that no gather
    across groups is wasted.
    """
    for unit, chosen in by_unit(params).items():
        if unit.handle is not None:
            finish_gather(unit)
        exposed = [p for p in chosen if p.status is ZeroParamStatus.AVAILABLE]
        if has_been_updated:
            for p in exposed:
                data = p.param.data
                write_primary(p, data)
                p.full_version = p.version
                if p.view is not None and data.data_ptr() != p.view.data_ptr():  # replaced, not edited in place
                    p.view.copy_(data)
                p.shown = p.param._version
        elif unit.users:  # a forward of its module is running and still needs it
            continue
        secondary(exposed, has_been_updated)
        for p in exposed:
            if not p.pins:
                conceal_param(p)
                p.full_version = -1
        unit.fresh = unit.exposed = False
        if free and not unit.pinned and all(p.status is ZeroParamStatus.NOT_AVAILABLE for p in unit.params):
            unit.free()


def write_primary(p: ShardedParam, full: torch.Tensor) -> None:
    """Write this rank's slice of ``full`` (``p.shape``) to the primary shard, as a new version."""
    piece = p.shard_of(full)
    if p.edits is not None:
        p.edits.before_edit(p, piece)
    if piece.numel() and not (p.unit.aliased and piece.data_ptr() == p.shard.data_ptr()):
        p.write_shard(piece)
    p.wrote_primary()
    if p.edits is not None:
        p.edits.accept_edit(p)
