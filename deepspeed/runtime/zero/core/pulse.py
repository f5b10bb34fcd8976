# SPDX-License-Identifier: Apache-2.0
"""Where the other ranks are, asked once a wait has failed.

A thread of each rank writes its rank's place (step, collectives issued) to a clone of the rendezvous store, once a
second. Training itself never touches the store. When a collective fails, the survivors read every place twice: a rank
whose beat stands still is dead or its host is stuck; one that is alive and behind is stalled, or took another path.
On NCCL the host may never hear of a failure before the watchdog ends the process; there the thread itself says who is
missing once a wait has taken most of the timeout.

What must hold: nothing here can make a run fail or wait. Every access is bounded, an unreachable store only makes the
message poorer, and the thread ends with its engine or its process.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import distributed_c10d as c10d

from deepspeed.utils.logging import logger

from .wire import Channel

BEAT = 1.0
"""Seconds between two beats in a job of up to ``BEATS_A_SECOND`` ranks."""
BEATS_A_SECOND = 2000
STORE_TIMEOUT = timedelta(seconds=1)
LATE_AFTER = 0.75
"""Share of the timeout after which a rank that is ahead of others says so."""
NAMED = 8
"""Ranks that a message names."""


class Placed(Protocol):
    """What is reported: see ``param.Place``."""

    step: int
    issued: int


class Pulse:
    """The beats of one engine's ranks.

    Args:
        store: a store of its own, with a short timeout.
        name: key of the engine in the store, the same on every rank.
        timeout: seconds after which a collective fails, for the early notice; 0 gives none.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, place: Placed, timeout: float) -> None:
        self.store = store
        self.name, self.rank, self.size, self.timeout = name, rank, size, timeout
        self.interval = max(BEAT, size / BEATS_A_SECOND)
        self.beats = 0
        self.failed = self._verdict = ""
        self.place = weakref.ref(place)
        self.stopped = threading.Event()
        self._moved = (time.monotonic(), (-1, -1))
        self._told = (-1, -1)
        self._noted: tuple[int, dict[int, Any]] | None = None
        self.beat()
        self.thread = threading.Thread(target=_run, args=(weakref.ref(self), self.stopped, self.interval), daemon=True)
        self.thread.name = f"deepspeed pulse {name}"
        self.thread.start()
        self._at_exit = _stop_at_exit(self)

    @classmethod
    def of(cls, channel: Channel, name: str, place: Placed) -> Pulse | None:
        """The pulse of a channel's ranks; None for one rank, and where torch has no rendezvous store to ask."""
        if channel.group is None or channel.backend(torch.device("cpu")) == "fake":
            return None
        try:
            store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(STORE_TIMEOUT)
            return cls(store, name, channel.rank, channel.size, place, channel.timeout)
        except (RuntimeError, OSError, ValueError):
            return None

    def follow(self, name: str, place: Placed) -> None:
        """Report another place from now on, under another name."""
        self.name, self.place = name, weakref.ref(place)
        self.failed = self._verdict = ""
        self.beat()

    def stop(self) -> None:
        """End the thread; the place stays in the store."""
        self.stopped.set()
        if self.thread is not threading.current_thread():
            self.thread.join(2.0)
        atexit.unregister(self._at_exit)

    def __del__(self) -> None:
        stopped, at_exit = self.__dict__.get("stopped"), self.__dict__.get("_at_exit")
        if stopped is not None:
            stopped.set()
        if at_exit is not None:
            atexit.unregister(at_exit)

    # -- what every rank writes

    def beat(self) -> bool:
        """Write this rank's place; False where there is nothing left to report on."""
        place = self.place()
        if place is None:
            return False
        self.beats += 1
        entry = {"beat": self.beats, "at": [place.step, place.issued], "text": str(place), "failed": self.failed}
        self.store.set(self._key("beat", self.rank), json.dumps(entry))
        if self.timeout:
            self._watch((place.step, place.issued))
        return True

    def _watch(self, at: tuple[int, int]) -> None:
        """Say who is missing once this rank has stood still for most of the timeout in the midst of a step; of the
        ranks that wait, the first says it."""
        now = time.monotonic()
        since, before = self._moved
        if at != before:
            self._moved, self._noted = (now, at), None
            return
        if now - since < LATE_AFTER * self.timeout or self._told == at or not at[1]:
            return
        if self._noted is None:
            self._noted = (self.beats, self._read())
            return
        beats, first = self._noted
        if self.beats - beats < 2:
            return
        self._told, second = at, self._read()
        silent = self._silent(first, second)
        waiting = [rank for rank, entry in second.items() if rank not in silent and tuple(entry["at"]) >= at]
        if len(waiting) < self.size and waiting and waiting[0] == self.rank:
            logger.warning(
                f"rank {self.rank} has issued no collective for {now - since:.0f} s. {self._judge(first, second)}"
            )

    # -- what is read after a failure

    def fail(self, what: str) -> str:
        """Note that this rank's wait for ``what`` failed; returns who is missing, in words.

        The first call takes about two beats; later ones, on the way out, give the same answer at once.
        """
        if self.failed:
            return self._verdict
        self.failed = what[:200]
        try:
            if self.beat():
                first = self._read()
                self.stopped.wait(1.6 * self.interval)
                self._verdict = self._judge(first, self._read())
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            self._verdict = (
                f"Nothing is known of the other ranks: the rendezvous store does not answer ({type(error).__name__})."
            )
        return self._verdict

    def _judge(self, first: dict[int, Any], second: dict[int, Any]) -> str:
        place = self.place()
        at = (place.step, place.issued) if place is not None else (0, 0)
        absent = [rank for rank in range(self.size) if rank not in second]
        silent = self._silent(first, second)
        parts = []
        if absent:
            parts.append(f"{_ranks(absent)} did not come here.")
        if silent:
            seconds = f"{1.6 * self.interval:.1f} s"
            parts.append(
                f"{_ranks(silent)} gave no sign of life for {seconds} (ended, or stuck together with its host)."
            )
        alive = {r: e for r, e in second.items() if r not in silent and r != self.rank and not e["failed"]}
        behind = self._behind(alive, at)
        if behind:
            parts.append(behind)
        failed = {r: e for r, e in second.items() if e["failed"] and r != self.rank}
        for rank, entry in list(failed.items())[: NAMED if not parts else 0]:
            parts.append(f"Rank {rank} failed as well: {entry['failed']}.")
        if not parts:
            parts.append("Every rank is alive and has issued as many collectives: another path, or the network.")
        return " ".join(parts)

    def _silent(self, first: dict[int, Any], second: dict[int, Any]) -> list[int]:
        """Ranks whose beat stood still between two readings, although they reported no failure."""
        return [
            rank
            for rank, entry in second.items()
            if rank in first and first[rank]["beat"] == entry["beat"] and rank != self.rank and not entry["failed"]
        ]

    def _behind(self, entries: dict[int, Any], at: tuple[int, int]) -> str:
        found = [(tuple(entry["at"]), rank) for rank, entry in entries.items() if tuple(entry["at"]) < at]
        if not found:
            return ""
        found.sort()
        rank = found[0][1]
        more = f" (and {len(found) - 1} more ranks are behind)" if len(found) > 1 else ""
        return f"Rank {rank} is alive but behind: {entries[rank]['text']}{more}; this rank: {self.place()}."

    def _read(self) -> dict[int, Any]:
        found = {}
        for rank in range(self.size):
            key = self._key("beat", rank)
            if self.store.check([key]):
                found[rank] = json.loads(self.store.get(key))
        return found

    # -- small texts that only matter once something went wrong

    def publish(self, topic: str, text: str) -> None:
        """Leave ``text`` of this rank under ``topic``."""
        self.store.set(self._key(topic, self.rank), text)

    def read(self, topic: str, rank: int, seconds: float) -> str | None:
        """What ``rank`` left under ``topic``, or None where it is not there within ``seconds``."""
        key, end = self._key(topic, rank), time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        return bytes(self.store.get(key)).decode()

    def _key(self, topic: str, rank: int) -> str:
        return f"deepspeed/{self.name}/{topic}/{rank}"


def _run(pulse: weakref.ref[Pulse], stopped: threading.Event, interval: float) -> None:
    while not stopped.wait(interval):
        target = pulse()
        try:
            if target is None or not target.beat():
                return
        except (RuntimeError, OSError, ValueError, KeyError):
            return  # the store is gone: its host ended, or the job does
        del target


def _stop_at_exit(pulse: Pulse) -> Any:
    """A thread that is inside the store while the interpreter shuts down would abort the process: stop it before."""
    reference = weakref.ref(pulse)

    def stop() -> None:
        target = reference()
        if target is not None:
            target.stopped.set()
            target.thread.join(2.0)

    atexit.register(stop)
    return stop


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {ranks[:NAMED]}" + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
