# SPDX-License-Identifier: Apache-2.0
"""Gathering, prefetching and releasing units.

Invariants:
- A gather reads the hpZ secondary of a parameter only while its version equals the primary's; whatever was gathered
  across groups refreshes the secondary at once (``hpz.md``, H1, H4).
- The versions that a gather will deliver are noted when it is issued. A write in between makes them old again, so a
  gather in flight can never be mistaken for newer weights.
- Order of issue is the same on every rank as long as every rank uses the same units in the same order; each gather is
  mixed into a fingerprint that the step's vote compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import CollectiveTimeout
from deepspeed.utils.logging import logger

from . import host, wire
from .param import Checks, ShardedParam
from .trace import Trace, reuse_distances
from .unit import Ledger, ShardedUnit


class _Both:
    """Handle of two gathers."""

    __slots__ = ("first", "second")

    def __init__(self, first: wire.Handle, second: wire.Handle) -> None:
        self.first, self.second = first, second

    def wait(self) -> None:
        try:
            self.first.wait()
            self.second.wait()
        finally:
            self.first = self.second = wire.DONE  # the frames of an error hold this, and must hold no message


class _Whole:
    """What is done inside leaves ``unit`` with newest weights, or, whatever ends it early, holding nothing."""

    __slots__ = ("unit",)

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = unit

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is None:
            return
        _holds_nothing(self.unit)
        if isinstance(error, RuntimeError):
            raise self.unit.params[0].groups.lost(f"gathering {self.unit}", error) from error


# -- one unit --------------------------------------------------------------------------------------------------


def start_gather(unit: ShardedUnit) -> None:
    """Issue the gather of whatever is old or missing in ``unit``; does nothing where all of it is new or on its way."""
    if unit.fresh:
        return
    if unit.handle is not None:  # on its way, but written in between
        finish_gather(unit)
    if unit.allocated:
        stale = [p for p in unit.params if p.full_version != p.version]
        outs = [p.full for p in stale if p.full is not None and p.numel]
        ins = [p.shard for p in stale if p.numel]
    else:
        unit.allocate()
        stale, outs, ins = unit.params, unit.fulls, unit.shards
    unit.fresh = True
    _issue(unit, stale, outs, ins)


def start_gather_of(unit: ShardedUnit, params: Sequence[ShardedParam]) -> None:
    """Issue the gather of some parameters of ``unit`` only (for contexts that need just these)."""
    if unit.handle is not None:
        finish_gather(unit)
    unit.allocate()
    stale = [p for p in params if p.full_version != p.version]
    outs = [p.full for p in stale if p.full is not None and p.numel]
    _issue(unit, stale, outs, [p.shard for p in stale if p.numel])
    unit.fresh = all(p.full_version == p.version for p in unit.params)


def _issue(
    unit: ShardedUnit, stale: Sequence[ShardedParam], outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]
) -> None:
    for p in stale:
        p.full_version = p.version
    if unit.aliased or not ins:
        return
    groups = unit.params[0].groups
    secondary = groups.secondary
    if secondary is not None and not groups.aliased:
        inside = [p for p in stale if p.secondary_version == p.version and p.numel]
        if inside:
            _issue_hpz(unit, stale, inside, secondary)
            return
        unit.incoming = list(stale)
    if ins[0].device != unit.device:  # parameters offloaded to the host
        ins = host.send(stale, unit.device)
    traffic = groups.traffic
    received = sum([out.nbytes for out in outs]) - sum([shard.nbytes for shard in ins])
    if groups.aliased:
        traffic.gathers_inside += 1
        traffic.gather_bytes_inside += received
    else:
        traffic.gathers_across += 1
        traffic.gather_bytes_across += received
    if groups.checks is not None:
        _check(groups.checks, unit, stale, inside=False)
    traffic.place.mix(unit.index)
    with _Whole(unit):
        unit.handle = wire.gather(outs, ins, groups.primary)
    unit.ledger.inflight += unit.numel


def _issue_hpz(
    unit: ShardedUnit, stale: Sequence[ShardedParam], inside: list[ShardedParam], secondary: wire.Channel
) -> None:
    """Gather ``inside`` from valid secondaries, and the rest of ``stale`` across groups."""
    groups = unit.params[0].groups
    traffic = groups.traffic
    across = [p for p in stale if p.secondary_version != p.version and p.numel]
    if len(inside) == len(unit.secondaries):
        outs, ins = unit.fulls, unit.secondaries
    else:
        outs = [p.full for p in inside if p.full is not None]
        ins = [p.secondary for p in inside if p.secondary is not None]
    rest = host.send(across, unit.device)  # first: nothing may be in flight where this runs out of memory
    traffic.gathers_inside += 1
    traffic.gather_bytes_inside += sum([t.nbytes for t in outs]) - sum([t.nbytes for t in ins])
    if groups.checks is not None:
        _check(groups.checks, unit, stale, inside=True)
    traffic.place.mix(unit.index)
    with _Whole(unit):
        unit.handle = wire.gather(outs, ins, secondary)
    unit.incoming = across
    if across:
        outs = [p.full for p in across if p.full is not None]
        traffic.gathers_across += 1
        traffic.gather_bytes_across += sum([t.nbytes for t in outs]) - sum([t.nbytes for t in rest])
        traffic.place.mix(unit.index)
        with _Whole(unit):
            unit.handle = _Both(unit.handle, wire.gather(outs, rest, groups.primary))
    unit.ledger.inflight += unit.numel


def finish_gather(unit: ShardedUnit) -> None:
    """Wait for the gather in flight, if any, and refresh the hpZ secondaries of what came across groups."""
    handle = unit.handle
    if handle is not None:
        unit.handle = None
        unit.ledger.inflight -= unit.numel
        with _Whole(unit):
            handle.wait()
    if unit.incoming:
        incoming, unit.incoming = unit.incoming, []
        unit.refresh_secondaries(incoming)
    if handle is not None:
        checks = unit.params[0].groups.checks
        if checks is not None:
            checks.after_gather(unit)


def _holds_nothing(unit: ShardedUnit) -> None:
    """The memory of ``unit`` is undefined: it is not new, and no copy may be made of it."""
    unit.handle = None
    unit.fresh = False
    unit.incoming = []
    for p in unit.params:
        p.full_version = -1


def _check(checks: Checks, unit: ShardedUnit, stale: Sequence[ShardedParam], inside: bool) -> None:
    """What ``enable_sanity_checks`` looks at before a gather."""
    try:
        checks.before_gather(unit, stale, inside)
    except RuntimeError:
        _holds_nothing(unit)
        raise


def release(unit: ShardedUnit, keep: bool = False) -> None:
    """Conceal the unit and, unless ``keep`` or a context holds part of it, free its memory."""
    if unit.handle is not None:
        try:
            finish_gather(unit)
        except CollectiveTimeout:
            pass  # nobody needs the weights, and the unit knows that it holds none; the next collective will tell
    if unit.exposed:
        unit.conceal()
    if not keep and not unit.pinned:
        unit.free()


# -- a model's units ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FetchLimits:
    """Upper bounds, in elements: ``stage3_max_live_parameters``, ``stage3_prefetch_bucket_size``,
    ``stage3_max_reuse_distance``."""

    max_live: int
    prefetch: int
    max_reuse: int


class Fetcher:
    """Gathers, prefetches and releases one model's units, pass by pass.

    A pass is a forward with or without gradients, or a backward. ``in_backward`` holds from the first gradient of a
    backward to its end; modules that run then are recomputing for activation checkpointing and stay gathered.
    """

    def __init__(self, units: list[ShardedUnit], persistent: list[ShardedUnit], limits: FetchLimits) -> None:
        self.units = units
        self.persistent = persistent
        self.limits = limits
        self.ledger = Ledger()
        for index, unit in enumerate([*units, *persistent]):
            unit.index = index
            unit.ledger = self.ledger
        self.sizes = [unit.numel for unit in units]
        self.live: dict[ShardedUnit, None] = {}
        self.forward_trace, self.eval_trace, self.backward_trace = Trace(), Trace(), Trace()
        self.trace = self.forward_trace
        self.in_forward = self.in_backward = self.differentiated = False
        self.epoch = 0
        self.warn_on_change = False

    # -- gather and wait

    def start(self, unit: ShardedUnit) -> None:
        """Issue the gather of ``unit`` and count it."""
        if unit.fresh:
            return
        self.live[unit] = None  # before it can fail: what is in here is released in the end
        start_gather(unit)

    def ready(self, unit: ShardedUnit) -> None:
        """Make the newest weights of ``unit`` visible, waiting for them where needed."""
        if not unit.fresh:
            self.start(unit)
        if unit.handle is not None:
            finish_gather(unit)
        if not unit.exposed:
            unit.expose()

    def refresh_persistent(self) -> None:
        """Gather the persistent parameters anew after their shards changed: one call for all of a dtype."""
        for unit in self.persistent:
            if not unit.fresh or not unit.exposed:
                start_gather(unit)
        for unit in self.persistent:
            if not unit.exposed or unit.handle is not None:
                finish_gather(unit)
                unit.expose()

    def prefetch(self) -> None:
        """Issue gathers of the units expected next, within the limits."""
        limits, units, ledger = self.limits, self.units, self.ledger
        if not limits.prefetch:
            return
        for index in self.trace.upcoming():
            if ledger.inflight >= limits.prefetch and ledger.inflight:
                return
            unit = units[index]
            if unit.fresh:
                continue
            if not unit.allocated and ledger.live + unit.numel > limits.max_live:
                return
            self.start(unit)

    # -- forward

    def begin_forward(self, grad: bool) -> None:
        """A forward of the whole model begins."""
        if self.in_forward or self.in_backward:
            return
        self.in_forward = True
        for unit in list(self.live):
            unit.users = 0
            if unit.exposed and not unit.hold_until_flush:
                self.drop(unit, keep=unit.fresh)
        self.trace = self.forward_trace if grad else self.eval_trace
        self.trace.reset()
        self.refresh_persistent()

    def end_forward(self, completed: bool) -> None:
        """The forward of the whole model ended; ``completed`` is False after an exception."""
        if not self.in_forward:
            return
        self.in_forward = False
        if not completed:
            self.release_all()
            self.trace.reset()
            return
        for unit in list(self.live):
            if self.trace is self.eval_trace:
                unit.hold_until_flush = False
            if unit.exposed and not unit.hold_until_flush:
                unit.users = 0
                self.drop(unit, keep=unit.fresh and self._keeps(unit))
            elif unit.handle is not None:  # expected and not used; nothing is in flight between passes
                finish_gather(unit)
        if self._finish_trace():
            self._plan_reuse()

    def acquire(self, unit: ShardedUnit) -> None:
        """A module that uses ``unit`` begins its forward: show the weights, prefetch what follows."""
        if self.in_backward:  # recomputing: stays until its backward is done
            self.ready(unit)
            return
        unit.users += 1
        if not self.in_forward:  # a part of the model is called by itself
            self.refresh_persistent()
            self.ready(unit)
            return
        self.trace.visit(unit.index)
        self.ready(unit)
        self.prefetch()

    def leave(self, unit: ShardedUnit) -> None:
        """A module that uses ``unit`` ended its forward."""
        if self.in_backward:
            return
        unit.users -= 1
        if unit.users <= 0 and not unit.hold_until_flush:
            unit.users = 0
            self.drop(unit, keep=self._keeps(unit))

    def drop(self, unit: ShardedUnit, keep: bool = False) -> None:
        """Conceal ``unit``; free it unless ``keep``."""
        release(unit, keep)
        if not unit.allocated or unit.aliased:
            self.live.pop(unit, None)

    def _finish_trace(self) -> bool:
        known = bool(self.trace.order)
        changed = self.trace.finish()
        if changed and known and self.warn_on_change:
            logger.warning(f"ZeRO-3: the order of units changed to {self.trace.order}; gathers were issued on demand")
        return changed

    def _keeps(self, unit: ShardedUnit) -> bool:
        keep = unit.keep_forward if self.trace is self.forward_trace else unit.keep_eval
        return keep and self.ledger.live <= self.limits.max_live

    def _plan_reuse(self) -> None:
        """Decide which units stay gathered between two uses (``stage3_max_reuse_distance``)."""
        limit = self.limits.max_reuse
        forward, evaluation = self.forward_trace.order, self.eval_trace.order
        training = reuse_distances([*forward, *self.backward_trace.order], self.sizes)
        again = reuse_distances([*evaluation, *evaluation], self.sizes)
        for unit in self.units:
            unit.keep_forward = training.get(unit.index, limit + 1) <= limit
            unit.keep_eval = again.get(unit.index, limit + 1) <= limit

    # -- backward

    def begin_backward(self) -> None:
        """The first gradient of a backward has arrived."""
        self.in_backward = True
        self.in_forward = False
        self.epoch += 1
        self.trace = self.backward_trace
        self.trace.reset()
        self.refresh_persistent()

    def hold_all(self) -> None:
        """The backward that begins will be differentiated: all weights stay until a backward after it has ended."""
        self.differentiated = True
        for unit in self.units:
            self.ready(unit)
            unit.hold_until_flush = True

    def acquire_backward(self, unit: ShardedUnit) -> None:
        """The backward of a module that uses ``unit`` begins."""
        if unit.persistent or (unit.visited == self.epoch and unit.exposed and unit.fresh):
            return
        unit.visited = self.epoch
        self.trace.visit(unit.index)
        self.ready(unit)
        self.prefetch()

    def release_backward(self, unit: ShardedUnit) -> None:
        """The backward of every module that uses ``unit`` is done."""
        if not unit.persistent and not unit.hold_until_flush and unit.allocated:
            self.drop(unit)

    def end_backward(self, completed: bool = True) -> None:
        """The backward ended: release everything; adopt the order seen."""
        self.in_backward = False
        keep, self.differentiated = self.differentiated and completed, False
        for unit in list(self.live) if not keep else ():
            unit.users = 0
            unit.hold_until_flush = False
            self.drop(unit)
        if completed and self.trace is self.backward_trace and self._finish_trace():
            self._plan_reuse()
        self.trace = self.forward_trace

    # -- between passes

    def weights_changed(self) -> None:
        """Primary shards were written: free what was kept gathered and is old now."""
        for unit in list(self.live):
            if not unit.fresh:
                self.drop(unit)

    def release_all(self, persistent: bool = False) -> None:
        """Free every gathered unit that no context holds (``empty_partition_cache``)."""
        for unit in list(self.live):
            unit.users = 0
            unit.hold_until_flush = False
            self.drop(unit)
        if persistent:
            for unit in self.persistent:
                release(unit)

    def forget_traces(self) -> None:
        """Record the order of use anew in the next passes."""
        for trace in (self.forward_trace, self.eval_trace, self.backward_trace):
            trace.forget()
