# SPDX-License-Identifier: Apache-2.0
"""One vote per step: how large is the gradient, is it finite everywhere, did every rank issue the same collectives, and
which parameters did nobody use?

Each rank contributes one small row of doubles; the rows of all ranks are exchanged in a single collective, and every
rank draws the same verdict from the same rows. A step in which ranks disagree, or saw a non-finite gradient, never
reaches the optimizer (deepspeedai/DeepSpeed#8415: a run whose every step was skipped unnoticed).

What must hold: holding the vote never waits for the device. What it takes to name a culprit (which parameter is not
finite, which collectives were issued) is kept in the verdict and looked at only where something was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from deepspeed.errors import CollectiveMismatch

from . import host
from .param import PLACE_LOG, ShardGroups

EPSILON = 1e-6
SQUARE, PRINT, BAD, IDLE = 0, 1, 2, 3
"""Columns of a rank's row: squared norm, fingerprint of its collectives, its first non-finite parameter; from ``IDLE``
on one bit for each parameter that it did not use, ``BITS`` to a double."""
BITS = 48
NO_BAD = float(1 << 40)
LOG_WAIT = 5.0
"""Seconds that a rank waits for another's log of collectives, once a mismatch was found."""


def summarise(slices: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squares of gradient shards, and which is the first that is not finite; no host sync.

    Returns:
        two 0-d doubles on ``device``: the sum, and twice the position in ``slices`` plus one for NaN (zero for Inf),
        or ``NO_BAD``. A shard whose norm is beyond float32 counts as Inf.
    """
    if not slices:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return zero, zero + NO_BAD
    norms = torch.stack(torch._foreach_norm(slices, 2, dtype=torch.float32)).to(device=device, dtype=torch.float64)
    codes = torch.arange(0, 2 * len(slices), 2, dtype=torch.float64, device=device) + norms.isnan()
    return norms.square().sum(), torch.where(norms.isfinite(), NO_BAD, codes).min()


def packed(idle: Collection[int], count: int) -> list[float]:
    """``count`` bits, set at the positions ``idle``, as doubles that hold ``BITS`` of them each."""
    words = [0] * -(-count // BITS)
    for position in idle:
        words[position // BITS] |= 1 << position % BITS
    return [float(word) for word in words]


def idle_everywhere(words: list[list[float]]) -> set[int]:
    """Positions whose bit is set in the ``packed`` words of every rank."""
    found: set[int] = set()
    for index, column in enumerate(zip(*words, strict=True)):
        common = (1 << BITS) - 1
        for word in column:
            common &= int(word)
        found.update(index * BITS + bit for bit in range(BITS) if common >> bit & 1)
    return found


class OnHost:
    """A small tensor on its way to the host. Reading it waits for that copy, not for what was queued since."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.arrived = value, None
        if value.device.type == "cuda":
            self.value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self.value.copy_(value, non_blocking=True)
            self.arrived = torch.cuda.current_stream(value.device).record_event()

    def read(self, timeout: float = float("inf")) -> torch.Tensor:
        """The values, on the host.

        Raises:
            TimeoutError: it did not come within ``timeout`` seconds: the device waits for something.
        """
        if self.arrived is not None:
            host.wait(self.arrived, timeout)
        return self.value


@dataclass(frozen=True)
class NonFinite:
    """Where a gradient is not finite: ``kind`` is "NaN" or "Inf"; the shard of ``param`` that ``rank`` holds."""

    rank: int
    param: str
    kind: str


@dataclass
class Verdict:
    """Outcome of one vote; tensors are 0-d and on the device until someone asks.

    Attributes:
        norm: global norm of the averaged, unscaled gradients before clipping (double).
        scale: what gradients are divided by: loss scale times clip factor (float32).
        skip: 1.0 where the step must not be applied, else 0.0 (float32).
        rows: (world, 3 and more) doubles, the columns as above.
        names: parameter names by position; ``log``: this rank's collectives of the step.
        some_idle: whether this rank left a parameter unused.
    """

    norm: torch.Tensor
    scale: torch.Tensor
    skip: torch.Tensor
    rows: torch.Tensor
    step: int
    groups: ShardGroups
    names: list[str] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    some_idle: bool = False

    def __post_init__(self) -> None:
        self.skip_on_host = OnHost(self.skip)
        self.idle_on_host = OnHost(self.rows[:, IDLE:]) if self.some_idle else None

    def check(self) -> bool:
        """Whether the step is applied; asks the device, so it may wait.

        Raises:
            CollectiveMismatch: ranks issued different collectives since the last step.
            CollectiveTimeout: the device still waits for another rank.
        """
        if not self._read(self.skip_on_host):
            return True
        prints = self.rows[:, PRINT].tolist()
        if len(set(prints)) > 1:
            raise CollectiveMismatch(self._mismatch(prints))
        return False

    def idle(self) -> set[int]:
        """Positions of the parameters that no rank used. Waits for the device, on ranks alone that left one unused.

        Raises:
            CollectiveTimeout: the device still waits for another rank.
        """
        return idle_everywhere(self._read(self.idle_on_host).tolist()) if self.idle_on_host is not None else set()

    def _read(self, value: OnHost) -> torch.Tensor:
        try:
            return value.read(self.groups.primary.timeout or float("inf"))
        except TimeoutError as error:
            raise self.groups.lost(f"a collective of step {self.step}", error) from error

    def _mismatch(self, prints: list[float]) -> str:
        common = max(prints, key=lambda value: (prints.count(value), value == prints[0]))
        odd = [rank for rank, value in enumerate(prints) if value != common]
        return (
            f"step {self.step}: ranks {odd} issued other collectives than the rest (another order of modules, or "
            f"modules that only some ranks used). {self._first_difference(prints.index(common), odd[0])} The step was "
            "not applied. Make every rank run the same modules in the same order, or mark data-dependent ones with "
            "deepspeed.utils.set_z3_leaf_modules."
        )

    def _first_difference(self, rank: int, odd: int) -> str:
        """The first collective in which ``odd`` differs from ``rank``, in words; asks both by way of the store."""
        pulse, place = self.groups.pulse, self.groups.traffic.place
        if pulse is None:
            return ""
        topic = f"log{self.step}"
        try:
            pulse.publish(topic, json.dumps(self.log))
            mine, other = (pulse.read(topic, r, LOG_WAIT) for r in (rank, odd))
        except (RuntimeError, OSError):
            return ""
        if mine is None or other is None:
            return ""
        ours, theirs = json.loads(mine), json.loads(other)
        for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return (
                    f"Collective {position + 1} of the step was {place.describe(a)} on rank {rank} and "
                    f"{place.describe(b)} on rank {odd}."
                )
        if len(ours) == len(theirs):
            return f"The first {PLACE_LOG} collectives of the step agree." if len(ours) == PLACE_LOG else ""
        longer, who = (ours, rank) if len(ours) > len(theirs) else (theirs, odd)
        at = min(len(ours), len(theirs))
        return f"Rank {who} alone issued collective {at + 1} of the step, {place.describe(longer[at])}."

    def non_finite(self) -> list[NonFinite]:
        """Of every rank with a non-finite shard, the first such parameter, in rank order."""
        found = []
        for rank, row in enumerate(self.rows.tolist()):
            if row[BAD] < NO_BAD:
                position, is_nan = divmod(int(row[BAD]), 2)
                found.append(NonFinite(rank, self.names[position], "NaN" if is_nan else "Inf"))
        return found


def vote(
    slices: list[torch.Tensor],
    names: list[str],
    idle: Collection[int],
    groups: ShardGroups,
    device: torch.device,
    loss_scale: float,
    clip: float,
    skip_non_finite: bool,
    step: int,
) -> Verdict:
    """Hold the vote of one step. Collective; no host sync.

    Args:
        slices: this rank's gradient shards, non-empty ones; ``names``: their parameters, the same on every rank;
            ``idle``: positions in them of those that this rank did not use.
        loss_scale: what the loss was multiplied by.
        clip: largest allowed global norm, 0 for no clipping; as ``torch.nn.utils.clip_grad_norm_``.
        skip_non_finite: whether a non-finite gradient skips the step.

    Raises:
        CollectiveTimeout: the exchange failed or timed out.
    """
    square, bad = summarise(slices, device)
    place = groups.traffic.place
    fingerprint = torch.full((1,), float(place.fingerprint), dtype=torch.float64, device=device)
    words = packed(idle, len(names))
    bits = torch.tensor(words, dtype=torch.float64).to(device) if idle else fingerprint.new_zeros(len(words))
    row = torch.cat([square.view(1), fingerprint, bad.view(1), bits])
    rows = groups.exchange(row, "the vote before the optimizer step")
    log = place.voted(step)
    norm = rows[:, SQUARE].sum().sqrt() / loss_scale
    disagree = rows[:, PRINT].max() != rows[:, PRINT].min()
    skip = (disagree | ~torch.isfinite(norm)) if skip_non_finite else disagree
    scale = torch.full((), loss_scale, dtype=torch.float32, device=device)
    if clip > 0:
        factor = ((norm + EPSILON) / clip).clamp(min=1.0)
        scale = scale * torch.nan_to_num(factor, nan=1.0, posinf=1.0).to(torch.float32)
    return Verdict(norm, scale, skip.to(torch.float32), rows, step, groups, names, log, bool(idle))
