# SPDX-License-Identifier: Apache-2.0
"""``zero_optimization.enable_sanity_checks``: what is checked, and what it costs.

- Before each gather and each reduction: all ranks are about to issue it for the same parameters, from copies of the
  same version. One small exchange and a wait for the device each: the mismatch is named before any data is mixed up,
  where the vote names it at the step.
- After each gather: every slice of the full weights equals the primary shard of the rank that owns it, by checksum. So
  a secondary (or a gather) that differs from the primary is noticed. One small exchange, one pass over the weights.
- Before each reduction: whether this rank's gradients are finite, so that a skipped step can name the rank and the
  parameter whose gradient *became* non-finite, and which parameters got no gradient on any rank. One pass over the
  gradients, and one small exchange per step.
- Leaving a read-only ``GatheredParameters`` block with edited weights is an error (see ``gathered.py``).

All this makes training synchronous, so nothing overlaps: steps of a tiny model on two gloo ranks took 1.4 to 2 times as
long. Switched off, it costs one comparison with None per collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from deepspeed.errors import CollectiveMismatch
from deepspeed.utils.logging import logger

from .param import ShardedParam, ShardGroups, reduction_of
from .unit import ShardedUnit

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(rows: torch.Tensor) -> torch.Tensor:
    """64-bit sums over the bits of each row of a 2-D tensor."""
    return rows.contiguous().view(_INT[rows.element_size()]).sum(dim=1, dtype=torch.int64)


class SanityChecks:
    """The checks of one engine (or ``zero.Init``), asked by ``fetch``, ``grads`` and the step."""

    def __init__(self, groups: ShardGroups) -> None:
        self.groups = groups
        self.spoiled: tuple[ShardedParam, str] | None = None
        self.origins: list[str] = []
        self.seen: set[ShardedParam] = set()
        self.told: set[str] = set()

    # -- collectives

    def before_gather(self, unit: ShardedUnit, params: Sequence[ShardedParam], inside: bool) -> None:
        """Raise on every rank unless all are about to gather the same.

        Raises:
            CollectiveMismatch: ranks differ in the unit, the parameters, the kind of gather or the versions.
        """
        self._same(unit, unit.index, params, f"gather {'inside hpZ groups ' if inside else ''}of {unit}", inside)

    def before_reduce(self, unit: ShardedUnit) -> None:
        """As ``before_gather``; also look at this rank's gradients."""
        for p in unit.trainable:
            grad = p.param.grad
            if grad is None:
                continue
            self.seen.add(p)
            if self.spoiled is None and not bool(torch.isfinite(grad).all()):
                self.spoiled = (p, "NaN" if bool(torch.isnan(grad).any()) else "Inf")
        self._same(unit, reduction_of(unit.index), unit.trainable, f"reduction of {unit}", False)

    def _same(self, unit: ShardedUnit, item: int, params: Sequence[ShardedParam], what: str, inside: bool) -> None:
        text = " ".join(f"{p.name}:{tuple(p.shape)}:{p.version}" for p in params)
        row = torch.tensor([item, zlib.crc32(text.encode()), inside], dtype=torch.int64, device=unit.device)
        rows = self.groups.exchange(row, f"checking the {what}").tolist()
        if all(other == rows[0] for other in rows):
            return
        place = self.groups.traffic.place
        odd = next(rank for rank, other in enumerate(rows) if other != rows[0])
        if rows[odd][0] != rows[0][0]:
            how = f"rank 0 is about to issue {place.describe(rows[0][0])}, rank {odd} {place.describe(rows[odd][0])}"
        else:
            how = f"ranks 0 and {odd} differ in its parameters, their versions or the group that it is gathered in"
        raise CollectiveMismatch(
            f"step {place.step + 1}, {what}: {how}. Nothing was sent. Make every rank run the same modules in the same "
            "order, or mark data-dependent ones with deepspeed.utils.set_z3_leaf_modules."
        )

    def after_gather(self, unit: ShardedUnit) -> None:
        """Compare what was gathered with every rank's primary shard.

        Raises:
            CollectiveMismatch: a slice differs; names parameter and rank.
        """
        size = self.groups.primary.size
        params = [p for p in unit.params if p.numel and p.full_version == p.version and not p.pins]
        if not params or unit.aliased:
            return
        shards = [p.shard.to(unit.device).unsqueeze(0) for p in params]
        mine = torch.cat([checksum(shard) for shard in shards])
        owners = self.groups.exchange(mine, f"checking what was gathered of {unit}")
        gathered = torch.stack([checksum(p.full.view(size, -1)) for p in params if p.full is not None], dim=1)
        wrong = (owners != gathered).nonzero().tolist()
        any_wrong = torch.tensor([wrong[0][0], wrong[0][1]] if wrong else [-1, -1], device=unit.device)
        verdicts = self.groups.exchange(any_wrong, f"checking what was gathered of {unit}").tolist()
        for rank, (owner, position) in enumerate(verdicts):
            if owner >= 0:
                raise CollectiveMismatch(
                    f"step {self.groups.traffic.place.step + 1}: rank {rank} gathered weights of "
                    f"{params[position].name} that differ from the primary shard of rank {owner}. A copy of the "
                    "weights was changed behind the engine's back, or the wire is faulty. Write weights inside "
                    "deepspeed.zero.GatheredParameters(..., modifier_rank=...)."
                )

    # -- the step

    def before_step(self, trainable: Sequence[ShardedParam]) -> None:
        """Exchange what was seen of the window's gradients. Collective."""
        device = trainable[0].unit.device
        position = {p: i for i, p in enumerate(trainable)}
        row = torch.zeros(len(trainable) + 1, dtype=torch.int64, device=device)
        seen = [position[p] for p in self.seen if p in position]
        if seen:
            row[torch.tensor(seen, device=device)] = 1
        if self.spoiled is not None:
            p, kind = self.spoiled
            row[-1] = 2 * position[p] + 1 + (kind == "NaN")
        rows = self.groups.exchange(row, "comparing which gradients there are")
        self.origins = []
        for rank, code in enumerate(rows[:, -1].tolist()):
            if code:
                at, is_nan = divmod(code - 1, 2)
                self.origins.append(
                    f"{'NaN' if is_nan else 'Inf'} in the gradient of {trainable[at].name} on rank {rank}"
                )
        absent = [trainable[i].name for i in (rows[:, :-1].sum(dim=0) == 0).nonzero().flatten().tolist()]
        fresh = [name for name in absent if name not in self.told]
        if fresh and self.groups.primary.rank == 0:
            logger.warning(
                f"step {self.groups.traffic.place.step + 1}: no rank has a gradient for {', '.join(fresh[:8])}"
                f"{' and others' if len(fresh) > 8 else ''}; they are left alone. Freeze what is never used."
            )
        self.told.update(fresh)
        self.spoiled = None
        self.seen.clear()
