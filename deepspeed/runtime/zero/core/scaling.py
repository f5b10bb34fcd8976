# SPDX-License-Identifier: Apache-2.0
"""One vote per step: how large is the gradient, is it finite everywhere, did every rank issue the same collectives?

Each rank contributes one small row of doubles; the rows of all ranks are exchanged in a single collective, and every
rank draws the same verdict from the same rows. A step in which ranks disagree, or saw a non-finite gradient, never
reaches the optimizer (deepspeedai/DeepSpeed#8415: a run whose every step was skipped unnoticed).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.errors import CollectiveMismatch

from . import wire
from .param import ShardGroups

EPSILON = 1e-6


def squared_norm(flats: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of this rank's gradient shards: a 0-d double on ``device``, no host sync."""
    filled = [flat for flat in flats if flat.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float32) for flat in filled])
    return norms.to(device=device, dtype=torch.float64).square().sum()


@dataclass
class Verdict:
    """Outcome of one vote; tensors are 0-d and on the device until someone asks.

    Attributes:
        norm: global norm of the averaged, unscaled gradients before clipping (double).
        scale: what gradients are divided by: loss scale times clip factor (float32).
        skip: 1.0 where the step must not be applied, else 0.0 (float32).
        rows: (world, 2) doubles: squared norm and fingerprint of each rank.
    """

    norm: torch.Tensor
    scale: torch.Tensor
    skip: torch.Tensor
    rows: torch.Tensor
    step: int

    def check(self) -> bool:
        """Whether the step is applied; asks the device, so it may wait.

        Raises:
            CollectiveMismatch: ranks issued different collectives since the last step.
        """
        if not float(self.skip):
            return True
        prints = self.rows[:, 1].tolist()
        if len(set(prints)) > 1:
            common = max(set(prints), key=prints.count)
            odd = [rank for rank, value in enumerate(prints) if value != common]
            raise CollectiveMismatch(
                f"step {self.step}: ranks {odd} issued other collectives than the rest (another order of units, or "
                "units that only some ranks used). The step was not applied. Make every rank run the same modules, or "
                "mark data-dependent ones with deepspeed.utils.set_z3_leaf_modules."
            )
        return False

    def non_finite_ranks(self) -> list[int]:
        """Ranks whose shard of the gradient is not finite."""
        return [rank for rank, value in enumerate(torch.isfinite(self.rows[:, 0]).tolist()) if not value]


def vote(
    flats: list[torch.Tensor],
    groups: ShardGroups,
    device: torch.device,
    loss_scale: float,
    clip: float,
    skip_non_finite: bool,
    step: int,
) -> Verdict:
    """Hold the vote of one step. Collective; no host sync.

    Args:
        flats: this rank's gradient shards; ``loss_scale``: what the loss was multiplied by.
        clip: largest allowed global norm, 0 for no clipping; as ``torch.nn.utils.clip_grad_norm_``.
        skip_non_finite: whether a non-finite gradient skips the step.
    """
    local = squared_norm(flats, device)
    fingerprint = torch.tensor(float(groups.traffic.fingerprint), dtype=torch.float64).to(device, non_blocking=True)
    groups.traffic.fingerprint = 0
    rows = wire.exchange(torch.stack([local, fingerprint]), groups.primary)
    norm = rows[:, 0].sum().sqrt() / loss_scale
    disagree = rows[:, 1].max() != rows[:, 1].min()
    skip = (disagree | ~torch.isfinite(norm)) if skip_non_finite else disagree
    scale = torch.full((), loss_scale, dtype=torch.float32, device=device)
    if clip > 0:
        factor = ((norm + EPSILON) / clip).clamp(min=1.0)
        scale = scale * torch.nan_to_num(factor, nan=1.0, posinf=1.0).to(torch.float32)
    return Verdict(norm, scale, skip.to(torch.float32), rows, step)
