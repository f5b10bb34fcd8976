# SPDX-License-Identifier: Apache-2.0
"""The unit: parameters of one dtype that are gathered together into one storage.

Invariants:
- One storage per unit for its whole life. It is freed and refilled by ``resize_``; tensors that view it (the
  parameter itself, what autograd saved of it) become valid again when it is refilled. So no replacement of
  ``F.linear`` is needed and a re-gather in the backward just works.
- The storage is allocated and freed on the compute stream only; a collective waits for what that stream had queued.
- ``fresh`` means: the storage holds the newest weights of every parameter of the unit.
- A parameter whose weights are not exposed shows an empty tensor of shape (0,), whatever the storage holds, so a use
  outside its unit's forward is always noticed (see ``parameter.ReleasedZeroParameter``).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from . import layout
from .param import ShardedParam, ZeroParamStatus
from .wire import Handle

AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT


class Ledger:
    """Counts the elements of full weights that are allocated, their peak, and those whose gather is in flight."""

    __slots__ = ("inflight", "live", "peak")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.inflight = 0

    def add(self, numel: int) -> None:
        """Count ``numel`` more live elements."""
        self.live += numel
        if self.live > self.peak:
            self.peak = self.live


class Watcher(Protocol):
    """A model's hooks, as its units see them."""

    def on_access(self, params: list[ShardedParam], computing: bool) -> None:
        """A computation is about to use these released parameters."""

    def on_pass(self, params: list[ShardedParam]) -> None:
        """A block that gathers these parameters is entered, perhaps inside a pass."""

    def let_go(self, module: nn.Module) -> None:
        """``module``, which holds parameters of the unit, is about to be sharded anew."""


class ShardedUnit:
    """Parameters that are gathered, exposed and released together.

    Attributes:
        numel: elements of the padded parameters.
        watcher: is told of uses outside the forward of the module that owns the unit.
        aliased: in a world of one the primary shards are the full weights; nothing is allocated or copied.
        allocated: whether the storage has memory.
        exposed: whether every parameter shows its full weights.
        lent: code outside may hold tensors of the full weights, because they were gathered for it.
        handle: the gather in flight, and ``incoming`` the parameters that it fills.
        users: forwards that use the unit now; ``pinned``: parameters that a ``GatheredParameters`` context holds.
    """

    __slots__ = (
        "aliased",
        "allocated",
        "complete",
        "device",
        "dtype",
        "empty",
        "epoch",
        "exposed",
        "fresh",
        "fulls",
        "handle",
        "hold_until_flush",
        "incoming",
        "index",
        "keep_eval",
        "keep_forward",
        "late",
        "lent",
        "ledger",
        "name",
        "nbytes",
        "numel",
        "params",
        "persistent",
        "pinned",
        "secondaries",
        "secondary_sources",
        "shards",
        "storage",
        "trainable",
        "users",
        "visited",
        "watcher",
    )

    def __init__(self, params: list[ShardedParam], device: torch.device, ledger: Ledger | None = None) -> None:
        self.params = params
        self.device = device
        self.dtype = params[0].dtype
        self.name = params[0].name
        self.index = -1
        self.ledger = ledger if ledger is not None else Ledger()
        self.persistent = False
        self.watcher: Watcher | None = None
        self.empty = torch.empty(0, dtype=self.dtype, device=device)
        self.numel = sum(p.padded_numel for p in params)
        self.storage: torch.UntypedStorage | None = None
        self.nbytes = 0
        self.shards = [p.shard for p in params if p.numel]
        self.fulls: list[torch.Tensor] = []
        self.secondaries: list[torch.Tensor] = []
        self.secondary_sources: list[torch.Tensor] = []
        self.allocated = self.exposed = self.fresh = False
        self.aliased = params[0].groups.primary.size == 1 and params[0].shard.device == device
        self.handle: Handle | None = None
        self.incoming: list[ShardedParam] = []
        self.users = self.pinned = 0
        self.lent = False
        self.hold_until_flush = False
        self.keep_forward = self.keep_eval = False
        # what grads.py keeps here: parameters that get a gradient; whether it was reduced in backward `epoch`, or twice
        self.trainable: list[ShardedParam] = []
        self.epoch = self.visited = -1
        self.complete = self.late = False
        for p in params:
            p.unit = self

    def __str__(self) -> str:
        names = ", ".join(p.name for p in self.params[:4])
        return f"{self.name} ({names}{', …' if len(self.params) > 4 else ''})"

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Give the storage its memory (contents undefined)."""
        if self.allocated:
            return
        self.allocated = True
        if self.aliased:
            with torch.inference_mode(False):
                for p in self.params:
                    p.full = p.shard
                    p.view = p.shard.view(p.shape)
            return
        self.ledger.add(self.numel)
        if self.storage is not None:
            self.storage.resize_(self.nbytes)
            return
        offsets, total = layout.aligned_offsets([p.padded_numel for p in self.params], self.empty.element_size())
        with torch.inference_mode(False):  # the views outlive a first pass in inference mode
            base = torch.empty(total, dtype=self.dtype, device=self.device)
            for p, start in zip(self.params, offsets, strict=True):
                p.full = base[start : start + p.padded_numel]
                p.view = p.full[: p.numel].view(p.shape)
        self.storage = base.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.fulls = [p.full for p in self.params if p.numel and p.full is not None]
        if self.secondaries:
            self._set_secondary_sources()

    def free(self) -> None:
        """Give the memory back. No parameter may be exposed.

        Memory that was ``lent``, or that somebody made a numpy array of, lives for as long as somebody holds it, and
        the next gather gets another.
        """
        if self.aliased or self.storage is None or not self.allocated:
            return
        self.allocated = self.fresh = False
        self.ledger.live -= self.numel
        if self.storage.resizable() and not self.lent:
            self.storage.resize_(0)
        else:
            self.lent = False
            self.storage = None
            self.fulls = []
            for p in self.params:
                p.full = p.view = None
        for p in self.params:
            p.full_version = -1

    def renew_shards(self) -> None:
        """The parameters have new shard tensors (moved between devices): forget the old ones."""
        self.shards = [p.shard for p in self.params if p.numel]
        self.fresh = False
        if self.aliased and self.allocated:
            self.allocated = False
            self.allocate()
        for p in self.params:
            p.wrote_primary()

    # -- what users see ----------------------------------------------------------------------------------------

    def expose(self) -> None:
        """Show the full weights of every parameter."""
        for p in self.params:
            param = p.param
            param.__class__ = p.full_class
            param.data = p.view  # type: ignore[assignment]  # there is a view wherever the unit is allocated
            p.status = AVAILABLE
        self.exposed = True

    def conceal(self) -> None:
        """Show empty tensors again, except for parameters that a context holds."""
        empty = self.empty
        if self.pinned:
            for p in self.params:
                if not p.pins:
                    conceal_param(p)
        else:
            for p in self.params:
                param = p.param
                param.data = empty
                param.__class__ = p.released_class
                p.status = NOT_AVAILABLE
        self.exposed = False

    # -- hpZ ---------------------------------------------------------------------------------------------------

    def refresh_secondaries(self, params: list[ShardedParam]) -> None:
        """Copy this rank's hpZ slices out of the full weights of ``params``; they hold ``full_version`` then.

        One call, queued on the compute stream behind the gather and before any later gather inside the group
        (deepspeedai/DeepSpeed#5059: reading before the copy is complete).
        """
        if not self.secondaries:
            self._allocate_secondaries()
        if len(params) == len(self.params):
            torch._foreach_copy_(self.secondaries, self.secondary_sources)
        else:
            pairs = [(p.secondary, p.secondary_source) for p in params if p.numel]
            if pairs:
                torch._foreach_copy_([pair[0] for pair in pairs], [pair[1] for pair in pairs])  # type: ignore[misc]
        for p in params:
            p.secondary_version = p.full_version

    def _allocate_secondaries(self) -> None:
        channel = self.params[0].groups.secondary
        assert channel is not None
        sizes = [p.padded_numel // channel.size for p in self.params]
        with torch.inference_mode(False):
            flat = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
            for p, secondary in zip(self.params, flat.split(sizes), strict=True):
                if p.secondary is not None and p.secondary_version == p.version:  # taken over from another unit
                    secondary.copy_(p.secondary)
                p.secondary = secondary
        self.secondaries = [p.secondary for p in self.params if p.numel and p.secondary is not None]
        self._set_secondary_sources()

    def free_secondaries(self) -> None:
        """Give the memory of the hpZ shards back; the next gather across groups makes new ones."""
        self.secondaries, self.secondary_sources = [], []
        for p in self.params:
            p.secondary = p.secondary_source = None
            p.secondary_version = -1

    def _set_secondary_sources(self) -> None:
        """The slices of the full weights that this rank's hpZ shards are copied from."""
        channel = self.params[0].groups.secondary
        assert channel is not None
        with torch.inference_mode(False):
            for p in self.params:
                size = p.padded_numel // channel.size
                assert p.full is not None
                p.secondary_source = p.full[channel.rank * size : (channel.rank + 1) * size]
        used = [p for p in self.params if p.numel]
        self.secondary_sources = [p.secondary_source for p in used if p.secondary_source is not None]


def expose_param(p: ShardedParam) -> None:
    """Show the full weights of one parameter."""
    p.param.__class__ = p.full_class
    assert p.view is not None
    p.param.data = p.view
    p.status = AVAILABLE


def conceal_param(p: ShardedParam) -> None:
    """Show an empty tensor of shape (0,) for one parameter."""
    p.param.data = p.unit.empty
    p.param.__class__ = p.released_class
    p.status = NOT_AVAILABLE
