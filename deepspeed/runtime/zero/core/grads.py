# SPDX-License-Identifier: Apache-2.0
"""Gradients: from ``param.grad`` to this rank's slice of the average over ranks.

Invariants:
- Units are reduced in one order that is the same on every rank, as the buckets of DDP are: a unit waits for those
  before it; a gradient that is missing on a rank counts as zero; what is left is reduced when the backward ends. The
  order is the reverse of the modules' until rank 0's first backward has shown a better one.
- Reducing is additive. A gradient that arrives after its unit was reduced (a parameter used in two separately
  checkpointed segments) is reduced once more at the end of the backward: later, never wrong.
- Gradient shards are allocated page by page as the first reductions of an accumulation window need them, and freed when
  the next window's first forward begins (they stay readable after ``step``).
- A parameter whose ``grad`` was None in every micro-batch of a window is *idle* on this rank. If it is idle on every
  rank (the vote tells) the step leaves it alone, as torch does; its zeros were reduced only because nobody could know.
- A plain ``loss.backward()`` counts as one micro-batch of its window, as ``engine.backward(loss)`` does: what it
  reduced is divided by the accumulation steps here. (Hooks on the model's outputs would divide twice where one output,
  the loss, was computed from another, the logits.)
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from deepspeed.errors import CollectiveTimeout

from . import layout, wire
from .param import ShardedParam, ShardGroups, reduction_of
from .unit import ShardedUnit

MAX_INFLIGHT = 2
"""Units whose full gradients may be alive while their reduction is on the wire."""


PAGES = 4
"""Buffers that a large sub-group's gradient shards are cut into, so that they need not all live from the first one."""
PAGE_NUMEL = 1 << 22
"""Elements that a page has at least, unless the sub-group has fewer."""


class Page:
    """A run of a sub-group's parameters whose gradient shards share one flat buffer.

    Attributes:
        start: where the run begins in the sub-group; ``flat``: the buffer (1-D), or None while there is none.
    """

    __slots__ = ("flat", "params", "sizes", "start")

    def __init__(self, start: int, params: list[ShardedParam]) -> None:
        self.start, self.params = start, params
        self.sizes = [p.shard.numel() for p in params]
        self.flat: torch.Tensor | None = None


class GradShards:
    """This rank's gradient shards: per sub-group a few pages, each allocated when its first gradient is reduced.

    ``loss_scale`` is what the loss was multiplied by; ``divided_by`` is what a fused step already divided the buffers
    by (it unscales and clips in place), or None. ``idle`` are parameters that this rank had no gradient for in any
    micro-batch of the window.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.pages: list[list[Page]] = []
        self.page_of: dict[ShardedParam, Page] = {}
        self.slices: dict[ShardedParam, torch.Tensor] = {}
        self.loss_scale = 1.0
        self.divided_by: torch.Tensor | None = None
        self.idle: set[ShardedParam] = set()

    def add_sub_group(self, params: list[ShardedParam]) -> None:
        """Give ``params`` their places in a new sub-group, in order, without gaps."""
        sizes = [p.shard.numel() for p in params]
        pages, start = [], 0
        for run in layout.pack_sub_groups(sizes, max(PAGE_NUMEL, sum(sizes) // PAGES)):
            page = Page(start, [params[i] for i in run])
            pages.append(page)
            start += sum(page.sizes)
            self.page_of.update((p, page) for p in page.params)
        self.pages.append(pages)

    def __contains__(self, p: ShardedParam) -> bool:
        return p in self.page_of

    @property
    def allocated(self) -> bool:
        """Whether there is memory for gradients."""
        return bool(self.slices)

    def slice_of(self, p: ShardedParam) -> torch.Tensor:
        """The slice of ``p`` (1-D), allocated if it has to be (contents undefined then)."""
        found = self.slices.get(p)
        if found is None:
            page = self.page_of[p]
            page.flat = torch.empty(sum(page.sizes), dtype=self.dtype, device=self.device)
            self._cut(page)
            found = self.slices[p]
        return found

    def _cut(self, page: Page) -> None:
        assert page.flat is not None
        self.slices.update(zip(page.params, page.flat.split(page.sizes), strict=True))

    def parts(self, sub_group: int) -> list[tuple[int, torch.Tensor]]:
        """The buffers of one sub-group, in order, each with its first element's place in the sub-group."""
        return [
            (page.start, page.flat) for page in self.pages[sub_group] if page.flat is not None and page.flat.numel()
        ]

    def items(self) -> list[tuple[ShardedParam, torch.Tensor]]:
        """Every parameter with a non-empty slice, and the slice, in the order of the sub-groups."""
        slices = self.slices
        return [(p, slices[p]) for p in self.page_of if p in slices and slices[p].numel()]

    def flats(self) -> list[torch.Tensor]:
        """Every buffer."""
        return [page.flat for pages in self.pages for page in pages if page.flat is not None]

    def renew_views(self) -> None:
        """Make each parameter's slice anew after the buffers moved."""
        self.slices = {}
        for pages in self.pages:
            for page in pages:
                if page.flat is not None:
                    self._cut(page)

    def free(self) -> None:
        """Give the memory back."""
        self.slices, self.divided_by = {}, None
        for pages in self.pages:
            for page in pages:
                page.flat = None

    def true_gradient(self, p: ShardedParam) -> torch.Tensor | None:
        """This rank's slice of the averaged, unscaled, unclipped gradient in fp32, or None where there is none."""
        shard = self.slices.get(p)
        if shard is None:
            return None
        shard = shard.float()
        if self.divided_by is not None:
            shard = shard * self.divided_by
        return shard / self.loss_scale if self.loss_scale != 1.0 else shard


class _InFlight:
    __slots__ = ("handle", "ins", "staged", "targets", "unit")

    def __init__(
        self,
        handle: wire.Handle,
        ins: list[torch.Tensor],
        staged: list[torch.Tensor] | None,
        targets: list[torch.Tensor],
        unit: ShardedUnit,
    ) -> None:
        self.handle, self.ins, self.staged, self.targets, self.unit = handle, ins, staged, targets, unit


class GradReducer:
    """Reduces the units of one model as their gradients become complete."""

    def __init__(
        self,
        units: list[ShardedUnit],
        groups: ShardGroups,
        shards: GradShards,
        comm_dtype: torch.dtype | None,
    ) -> None:
        self.groups, self.shards, self.comm_dtype = groups, shards, comm_dtype
        self.begin_backward: Callable[[], None] = lambda: None
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.accumulation: Callable[[], int] = lambda: 1
        self.on_abort: Callable[[], None] = lambda: None
        self.divisor = 1
        self.running = False
        self.order: list[ShardedUnit] = []
        for unit in units:
            unit.trainable = [p for p in unit.params if p in shards]
            if unit.trainable:
                self.order.append(unit)
        self.order.reverse()
        self.cursor = 0
        self.epoch = -1
        self.arrivals: list[ShardedUnit] = []
        self.order_agreed = False
        self.late: list[ShardedUnit] = []
        self.inflight: deque[_InFlight] = deque()
        self.filled: set[ShardedUnit] = set()
        self.max_inflight_numel = 1 << 62
        self.inflight_numel = 0

    # -- gradients arrive

    def hook_for(self, p: ShardedParam) -> Callable[[torch.Tensor], None]:
        """The post-accumulate-grad hook of ``p``.

        It holds nothing: the parameter holds it in C++, where the garbage collector sees no cycle.
        """
        reducer = weakref.ref(self)

        def grad_is_here(param: torch.Tensor) -> None:
            p, grads = param._sharded, reducer()  # type: ignore[attr-defined]
            if grads is None or not p.grad_is_ready:
                return
            unit = p.unit
            if not grads.running:
                grads.begin_backward()
            if unit.complete and unit.epoch == grads.epoch and not unit.late:
                grads.reduce_again(unit)

        return grad_is_here

    def _enter(self, unit: ShardedUnit) -> None:
        unit.epoch = self.epoch
        unit.complete = unit.late = False

    def reduce_again(self, unit: ShardedUnit) -> None:
        """``unit`` was reduced in this backward and is used once more: what comes is reduced at its end."""
        unit.late = True
        self.late.append(unit)

    def begin(self, epoch: int, plain: bool) -> None:
        """A backward begins; ``plain``: its loss was not divided by the accumulation steps."""
        self.epoch = epoch
        self.divisor = self.accumulation() if plain else 1
        self.running = True
        if not self.filled:
            self.shards.loss_scale = self.loss_scale()
        self.cursor = 0
        self.late = []
        self.arrivals = []

    def complete(self, unit: ShardedUnit) -> None:
        """Every gradient of ``unit`` that this rank will have is there: reduce it as soon as it is its turn."""
        if unit.epoch != self.epoch:
            self._enter(unit)
        if unit.complete or not unit.trainable:
            return
        unit.complete = True
        self.arrivals.append(unit)
        order = self.order
        while self.cursor < len(order):
            turn = order[self.cursor]
            if turn.epoch != self.epoch or not turn.complete:
                return
            self.cursor += 1
            self.reduce(turn)

    # -- reduce

    def reduce(self, unit: ShardedUnit) -> None:
        """Reduce-scatter the gradients of ``unit`` into its slices of the gradient shards."""
        shards = self.shards
        if not self.filled:
            shards.divided_by = None
        if self.groups.checks is not None:
            self.groups.checks.before_reduce(unit)
        comm = self.comm_dtype or unit.dtype
        world = self.groups.primary.size
        with torch._C.DisableTorchFunctionSubclass():  # released parameters: reading .grad is no use of weights
            ins, targets = self._take(unit, comm, world)
        if not ins:
            return
        while self.inflight and (
            len(self.inflight) >= MAX_INFLIGHT or self.inflight_numel + unit.numel > self.max_inflight_numel
        ):
            self._drain_one()
        direct = unit not in self.filled and comm == shards.dtype and shards.device == unit.device
        staged = None if direct else [torch.empty_like(t, dtype=comm, device=unit.device) for t in targets]
        traffic = self.groups.traffic
        traffic.reductions += 1
        traffic.reduce_bytes += sum([g.nbytes for g in ins]) * (world - 1) // world
        traffic.place.mix(reduction_of(unit.index))
        try:
            handle = wire.reduce_scatter(targets if staged is None else staged, ins, self.groups.primary)
        except RuntimeError as error:
            raise self.groups.lost(f"reducing the gradients of {unit}", error) from error
        self.inflight.append(_InFlight(handle, ins, staged, targets, unit))
        self.inflight_numel += unit.numel
        if not self.max_inflight_numel:
            self._drain_one()

    def _take(self, unit: ShardedUnit, comm: torch.dtype, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Take the gradients off the parameters of ``unit``: flat and padded in ``comm``, and where each belongs."""
        slices, slice_of, idle = self.shards.slices, self.shards.slice_of, self.shards.idle
        first = unit not in self.filled
        ins: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for p in unit.trainable:
            param, size = p.param, p.shard.numel()
            grad = param.grad
            if grad is not None:
                param.grad = None
            if not size:
                continue
            padded = size * world
            if grad is None:
                ins.append(self._zero(comm, padded))
                if first:
                    idle.add(p)
            else:
                if idle:
                    idle.discard(p)
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                grad = grad.reshape(-1)
                if grad.dtype is not comm:
                    grad = grad.to(comm)
                if p.numel != padded:
                    grad = torch.nn.functional.pad(grad, (0, padded - p.numel))
                ins.append(grad)
            target = slices.get(p)
            targets.append(slice_of(p) if target is None else target)
        return ins, targets

    def _zero(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.order[0].device)

    def _drain_one(self) -> None:
        item = self.inflight.popleft()
        self.inflight_numel -= item.unit.numel
        try:
            item.handle.wait()
        except RuntimeError as error:
            self.inflight.clear()
            self.inflight_numel = 0
            raise self.groups.lost(f"reducing the gradients of {item.unit}", error) from error
        if item.unit in self.filled:
            assert item.staged is not None  # only the first reduction of a window writes its targets directly
            torch._foreach_add_(item.targets, [s.to(self.shards.device) for s in item.staged], alpha=1 / self.divisor)
            return
        self.filled.add(item.unit)
        if item.staged is not None:
            torch._foreach_copy_(item.targets, item.staged)
        if self.divisor != 1:
            torch._foreach_div_(item.targets, self.divisor)

    def drain(self) -> None:
        """Wait for every reduction in flight."""
        while self.inflight:
            self._drain_one()

    def finish(self) -> None:
        """The backward ended: reduce what is left, in order, then what came late; wait for all."""
        for unit in self.order[self.cursor :]:
            if unit.epoch != self.epoch:
                self._enter(unit)
            if not unit.complete:
                unit.complete = True
                self.arrivals.append(unit)
            self.reduce(unit)
        self.cursor = len(self.order)
        self.drain()  # a late unit's first reduction must have landed before it is added to
        for unit in sorted(self.late, key=lambda u: u.index):
            self.reduce(unit)
        self.late = []
        self.drain()
        self.running = False

    def abort(self) -> None:
        """A backward failed: what was accumulated since the last step is incomplete and is dropped."""
        self.on_abort()
        self.running = False
        try:
            self.drain()
        except CollectiveTimeout:
            pass  # the error that ended the backward is on its way up, and these gradients are dropped
        self.end_window()
        self.drop_local()
        self.late = []
        self.cursor = len(self.order)

    def drop_local(self) -> None:
        """Drop gradients that were not reduced."""
        for unit in self.order:
            for p in unit.trainable:
                p.param.grad = None

    # -- windows

    def agree_on_order(self) -> None:
        """Adopt the order in which rank 0's last backward completed the units. Collective, once."""
        if self.order_agreed or not self.arrivals:
            return
        self.order_agreed = True
        by_index = {unit.index: unit for unit in self.order}
        seen = [unit.index for unit in self.arrivals]
        if len(seen) != len(self.order):
            seen = [unit.index for unit in self.order]
        ranks_order = torch.tensor(seen, dtype=torch.int64, device=self.order[0].device)
        try:
            wire.broadcast(ranks_order, self.groups.primary)
        except RuntimeError as error:
            raise self.groups.lost("agreeing on the order of reductions", error) from error
        self.order = [by_index[index] for index in ranks_order.tolist()]

    def end_window(self) -> None:
        """The optimizer has used the gradients: the next reduction starts a new window."""
        self.filled.clear()
        self.shards.idle.clear()

    @property
    def has_gradients(self) -> bool:
        """Whether anything was reduced since the last step."""
        return bool(self.filled)
