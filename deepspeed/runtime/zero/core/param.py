# SPDX-License-Identifier: Apache-2.0
"""The sharded parameter: every copy of its weights, and the version each copy holds.

Invariant (ZeRO++ hpZ; deepspeedai/DeepSpeed#4851, #7164, #7606, #7130): the primary shard is the truth and carries
``version``. Every other copy (the full buffer, the hpZ secondary) carries the version of the weights it holds and is
used only while the two are equal. Whoever writes the primary calls ``wrote_primary``; forgetting to invalidate a copy
cannot make it stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from deepspeed.errors import CollectiveTimeout

from . import host, layout, wire
from .pulse import Pulse

if TYPE_CHECKING:
    from .unit import ShardedUnit


class ZeroParamStatus(Enum):
    """Where the full weights of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is treated: ``NORMAL`` is sharded, ``PARTITIONED`` was sharded by someone else, ``REMOTE`` lives
    off the device."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


PLACE_LOG = 8192
"""Collectives of a step that are remembered, to name the first in which ranks differ."""


class Place:
    """Where this rank is: the step, and the collectives issued since the last vote.

    Attributes:
        step: the last step that was voted on; ``issued``: collectives since then; ``last``: the newest of them.
        log: the first ``PLACE_LOG`` of them: a unit's index (-1 for parameters outside the model's units) for a gather,
            ``reduction_of(index)`` for a reduction.
        names: unit names by index.
        fingerprint: 48 bits of all of them, in order (exact in a double).
    """

    __slots__ = ("__weakref__", "fingerprint", "issued", "last", "log", "names", "step")

    def __init__(self) -> None:
        self.fingerprint = self.issued = self.last = self.step = 0
        self.log: list[int] = []
        self.names: list[str] = []

    def mix(self, item: int) -> None:
        """Note one collective."""
        self.fingerprint = (self.fingerprint * 1000003 ^ (item + 2)) & 0xFFFFFFFFFFFF
        self.last = item
        self.issued += 1
        if self.issued <= PLACE_LOG:
            self.log.append(item)

    def voted(self, step: int) -> list[int]:
        """The vote of ``step`` was held: start the next step; returns the log of the one that ended."""
        log, self.log = self.log, []
        self.fingerprint = self.issued = 0
        self.step = step
        return log

    def describe(self, item: int) -> str:
        """A logged collective in words."""
        index = item if item >= -1 else -2 - item
        name = self.names[index] if 0 <= index < len(self.names) else "parameters outside the model's units"
        return f"the gather of {name}" if item >= -1 else f"the reduction of {name}"

    def __str__(self) -> str:
        if not self.issued:
            return f"step {self.step + 1}, before its first collective"
        return f"step {self.step + 1}, after {self.issued} collectives, the last {self.describe(self.last)}"


def reduction_of(index: int) -> int:
    """How the reduction of the unit ``index`` is noted in a ``Place``."""
    return -2 - index


@dataclass
class Traffic:
    """Counters of what went over the wire, inside one hpZ group and across groups. Bytes are those a rank receives."""

    gathers_inside: int = 0
    gathers_across: int = 0
    gather_bytes_inside: int = 0
    gather_bytes_across: int = 0
    reductions: int = 0
    reduce_bytes: int = 0
    place: Place = field(default_factory=Place)

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return {name: value for name, value in vars(self).items() if name != "place"}

    def reset(self) -> None:
        """Set every counter to zero."""
        for name in self.as_dict():
            setattr(self, name, 0)


@dataclass(eq=False)
class ShardGroups:
    """The groups that parameters are sharded over: all ranks (primary) and, under hpZ, the ranks of one node.

    ``secondary`` is None without hpZ. Where its size equals the world's, it is the primary channel itself and secondary
    shards are the primary shards: nothing is allocated. ``pulse`` tells where other ranks are once a wait has failed;
    ``checks`` is None unless ``enable_sanity_checks``.
    """

    primary: wire.Channel
    secondary: wire.Channel | None = None
    traffic: Traffic = field(default_factory=Traffic)
    pulse: Pulse | None = None
    checks: Checks | None = None

    @property
    def aliased(self) -> bool:
        """Whether secondary shards are the primary shards."""
        return self.secondary is not None and self.secondary.size == self.primary.size

    def exchange(self, row: torch.Tensor, what: str) -> torch.Tensor:
        """``row`` of every rank, by rank (world, len(row)). Collective; ``what`` says in an error what it was for.

        Raises:
            CollectiveTimeout: another rank did not take part.
        """
        try:
            return wire.exchange(row, self.primary)
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: BaseException) -> CollectiveTimeout:
        """The error for a collective that failed or timed out: what was waited for, and who is missing.

        Raises:
            OutOfMemoryError: that is what ``error`` is, and no other rank's doing.
        """
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        place = self.traffic.place
        missing = self.pulse.fail(f"{what}, {place}") if self.pulse is not None else ""
        return CollectiveTimeout(
            f"rank {self.primary.rank}, step {place.step + 1}: {what} failed or timed out. "
            f"{missing or 'A rank may have died, stalled or taken another path.'} DEEPSPEED_TIMEOUT (minutes), or the "
            f"timeout of init_distributed, bounds such waits. Cause: {error}"
        )


class Checks(Protocol):
    """What ``enable_sanity_checks`` looks at; see ``sanity.py``."""

    origins: list[str]

    def before_step(self, trainable: Sequence[ShardedParam]) -> None: ...

    def before_gather(self, unit: ShardedUnit, params: Sequence[ShardedParam], inside: bool) -> None: ...

    def after_gather(self, unit: ShardedUnit) -> None: ...

    def before_reduce(self, unit: ShardedUnit) -> None: ...


class EditSink(Protocol):
    """Who must hear of weights written from outside the optimizer: the master weights."""

    def before_edit(self, p: ShardedParam, piece: torch.Tensor) -> None: ...

    def accept_edit(self, p: ShardedParam) -> None: ...


class ShardedParam:
    """Owns the copies of one parameter: primary shard, secondary shard, and its place in the unit's full buffer.

    Attributes:
        param: the ``nn.Parameter`` that users see; its ``data`` is the full weights while exposed, else empty.
        shard: 1-D primary shard, ``ceil(numel / world)`` elements, padding zero.
        secondary: 1-D hpZ shard, ``world * shard / P`` elements, or None before it is first needed.
        version, full_version, secondary_version: the version of the primary and of the weights in each copy.
        pins: ``GatheredParameters`` blocks that hold the full weights; ``shown``: torch's count of writes to ``param``
            when these were last what the shards hold.
        reading: follows the newest copy of a shard on the host to the device, until that was waited for (``host.py``).
    """

    __slots__ = (
        "dtype",
        "edits",
        "external",
        "full",
        "full_class",
        "full_version",
        "grad_is_ready",
        "groups",
        "id",
        "leaf",
        "name",
        "numel",
        "param",
        "persistent",
        "pins",
        "reading",
        "released_class",
        "secondary",
        "secondary_source",
        "secondary_version",
        "shape",
        "shard",
        "shown",
        "status",
        "unit",
        "version",
        "view",
    )

    _ids = itertools.count()

    def __init__(
        self,
        param: torch.nn.Parameter,
        shard: torch.Tensor,
        shape: torch.Size,
        groups: ShardGroups,
        full_class: type,
        released_class: type,
    ) -> None:
        self.param = param
        self.shard = shard
        self.shape = shape
        self.numel = shape.numel()
        self.dtype = shard.dtype
        self.groups = groups
        self.full_class, self.released_class = full_class, released_class
        self.id = next(ShardedParam._ids)
        self.name = f"parameter {self.id}"
        self.status = ZeroParamStatus.NOT_AVAILABLE
        self.version = 0
        self.full_version = -1
        self.secondary_version = -1
        self.secondary: torch.Tensor | None = None
        self.secondary_source: torch.Tensor | None = None
        self.full: torch.Tensor | None = None
        self.view: torch.Tensor | None = None
        self.unit: ShardedUnit = None  # type: ignore[assignment]  # set by the unit that takes the parameter
        self.edits: EditSink | None = None
        self.persistent = False
        self.external = False
        self.leaf = False
        self.pins = self.shown = 0
        self.reading: host.Event | None = None
        self.grad_is_ready = True

    @property
    def padded_numel(self) -> int:
        """Elements of the padded, flattened parameter."""
        return self.shard.numel() * self.groups.primary.size

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's unpadded slice of a full tensor (any shape with ``numel`` elements): a 1-D view."""
        start, end = layout.valid_span(self.numel, self.shard.numel(), self.groups.primary.rank)
        return full.reshape(-1)[start:end]

    def write_shard(self, piece: torch.Tensor) -> None:
        """Copy ``piece`` to the start of the shard; the caller says ``wrote_primary``."""
        host.before_write((self,))
        self.shard[: piece.numel()].copy_(piece)

    def wrote_primary(self) -> None:
        """The primary shard holds new weights: every other copy is old from now on."""
        self.version += 1
        self.unit.fresh = False

    def recast(self, dtype: torch.dtype) -> None:
        """Change the dtype of shard and gathered weights; only before the parameter joins a model's unit."""
        self.shard = self.shard.to(dtype)
        self.dtype = dtype
        self.secondary, self.secondary_version = None, -1

    def regroup(self, groups: ShardGroups) -> None:
        """Belong to other groups over the same ranks; a hpZ shard of another size is not kept."""
        before, after = self.groups.secondary, groups.secondary
        self.groups = groups
        if before is None or after is None or before.ranks != after.ranks:
            self.secondary, self.secondary_version = None, -1

    @property
    def secondary_is_valid(self) -> bool:
        """Whether the hpZ secondary holds the weights of the primary."""
        if self.groups.secondary is None:
            return False
        return self.groups.aliased or self.secondary_version == self.version

    def valid_secondary(self) -> torch.Tensor | None:
        """The hpZ shard while it is valid, else None."""
        if not self.secondary_is_valid:
            return None
        return self.shard if self.groups.aliased else self.secondary

    def drop_secondary(self) -> None:
        """Declare the hpZ secondary invalid (its memory is kept for the next copy)."""
        self.secondary_version = -1
