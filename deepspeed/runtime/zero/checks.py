# SPDX-License-Identifier: Apache-2.0
"""Before anything is sharded, ranks agree that they are about to build the same thing.

Ranks that differ in versions, configuration, parameters or optimizer would hang later, or worse, train on mixed-up
data. Each rank hashes what it is about to build; the hashes of all ranks are exchanged in one small collective. Only
where they differ, further exchanges find the first difference, and every rank raises the same text.

What must hold: ranks take part in the same exchanges whatever they found, a rank that failed before included
(``Agreement`` is a context manager for that); otherwise the others would wait for their timeout.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CollectiveTimeout, DeepSpeedError, UsageError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from deepspeed.utils.logging import logger
from deepspeed.version import __version__

from .core import wire
from .core.param import ShardGroups
from .core.parameter import ZeroParameter, numel_of
from .core.pulse import Pulse

ANY_RANK = frozenset(
    """steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level tensorboard csv_monitor wandb comet
    comms_logger flops_profiler timers disable_python_gc aio""".split()
)
"""Top-level keys that ranks may set differently: they change what is printed, not what is computed."""
SECTIONS = 4
"""Most subjects of one agreement."""
TEXT = 1024
"""Bytes of one rank's text in an error."""
NOTHING = "(nothing)"


@dataclass(frozen=True)
class Section:
    """One subject of the agreement: (what, value) pairs in a fixed order."""

    title: str
    entries: Sequence[tuple[str, str]]

    def digest(self) -> int:
        """64 bits of every entry."""
        return _hash("\n".join(f"{what}\t{value}" for what, value in self.entries))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


# -- what is compared --------------------------------------------------------------------------------------------


def versions() -> Section:
    """The packages whose differences matter."""
    return Section("versions", [("deepspeed", __version__), ("torch", str(torch.__version__))])


def configuration(config: DeepSpeedConfig) -> Section:
    """Every key of the completed configuration, except those of ``ANY_RANK``."""
    plain = {key: value for key, value in config.to_dict().items() if key not in ANY_RANK}
    spelt = {name: other for other, name in DeepSpeedZeroConfig.other_spellings.items() if other == f"stage3_{name}"}
    zero = plain[ZERO_OPTIMIZATION]
    plain[ZERO_OPTIMIZATION] = {spelt.get(key, key): value for key, value in zero.items()}
    return Section("configuration", sorted(_flat("", plain)))


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key in value for pair in _flat(f"{prefix}.{key}" if prefix else str(key), value[key])]
    return [(prefix, json.dumps(value, sort_keys=True, default=repr))]


def parameters(module: nn.Module) -> Section:
    """Name, shape, dtype and requires_grad of every parameter, and the modules marked as leaves."""
    entries = []
    for name, param in module.named_parameters():
        shape = tuple(param.ds_shape) if isinstance(param, ZeroParameter) else tuple(param.shape)
        sharded = ", sharded" if isinstance(param, ZeroParameter) else ""
        grad = "requires_grad" if param.requires_grad else "frozen"
        entries.append((f"parameter {name}", f"{shape}, {param.dtype}, {grad}{sharded}".replace("torch.", "")))
    for name, child in module.named_modules():
        if child.__dict__.get("_z3_leaf"):
            entries.append((f"module {name}", "leaf"))
    return Section("parameters", entries)


def optimizer_groups(
    kind: str, groups: Sequence[tuple[Sequence[nn.Parameter], dict[str, Any]]] | None, module: nn.Module
) -> Section:
    """Class, hyper-parameters and parameters of an optimizer; ``groups`` None: there is none."""
    if groups is None:
        return Section("optimizer", [("optimizer", NOTHING)])
    names = {param: name for name, param in module.named_parameters()}
    entries = [("optimizer", kind), ("number of parameter groups", str(len(groups)))]
    for index, (params, options) in enumerate(groups):
        entries += [(f"group {index} {key}", _value(value)) for key, value in sorted(options.items())]
        members = _hash("\n".join(names.get(param, "?") for param in params)) & 0xFFFF
        numel = sum(numel_of(param) for param in params)
        entries.append((f"group {index} parameters", f"{len(params)} of {numel} elements (names {members:04x})"))
    return Section("optimizer", entries)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() <= 16 else f"tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str, tuple, list)):
        return repr(value)
    return type(value).__qualname__  # no repr: it may hold an address


# -- agreeing ----------------------------------------------------------------------------------------------------


class Agreement:
    """One call on which all ranks must agree, as a context manager around everything that may fail before it.

    Args:
        call: the user's call, for messages.
        groups: the ranks; default: all of torch.distributed once the exchange takes place.
    """

    def __init__(self, call: str, groups: ShardGroups | None = None) -> None:
        self.call = call
        self.groups = groups
        self.reached = False
        self.number = next(Agreement._numbers)

    _numbers = itertools.count()

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or self.reached:
            return
        logger.error(f"{self.call} failed on this rank, and the others are told: {type(error).__name__}: {error}")
        try:
            self._hold([], f"{type(error).__name__}: {error}")
        except (RuntimeError, OSError):
            pass  # this rank's own error is on its way up

    def hold(self, sections: Sequence[Section]) -> None:
        """Compare ``sections`` over the ranks. Collective; one small exchange where they agree.

        Raises:
            UsageError: ranks differ (names the first difference), or a rank failed before; on every rank.
            CollectiveTimeout: a rank did not come.
        """
        self._hold(sections, "")

    def _hold(self, sections: Sequence[Section], failure: str) -> None:
        self.reached = True
        groups = self.groups = self.groups if self.groups is not None else ShardGroups(wire.Channel.of(None))
        channel = groups.primary
        if channel.size == 1:
            return
        groups.pulse = Pulse.of(channel, f"{self.call} {self.number}", groups.traffic.place)
        device = _device(channel)
        digests = [section.digest() for section in sections] + [0] * (SECTIONS - len(sections))
        try:
            rows = _exchange([self.number, bool(failure), *digests], channel, device)
            self.number = max(row.pop(0) for row in rows)
            failed = [rank for rank, row in enumerate(rows) if row[0]]
            if not failed and all(row == rows[0] for row in rows):
                return
            if failed:
                text = self._failure(failure, failed, channel, device)
            else:
                text = self._difference(sections, rows, channel)
        except RuntimeError as error:
            if isinstance(error, CollectiveTimeout):
                raise
            raise groups.lost(f"{self.call}: comparing the ranks' models and configurations", error) from error
        if not failure:
            raise UsageError(text)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A block that waits for other ranks outside the core's collectives: a failure says for what, and for whom."""
        try:
            yield
        except RuntimeError as error:
            if self.groups is None or isinstance(error, DeepSpeedError):
                raise
            raise self.groups.lost(f"{self.call}: {what}", error) from error

    def hand_over(self, groups: ShardGroups) -> None:
        """Let ``groups``, made since, know where the ranks of this agreement are."""
        pulse = self.groups.pulse if self.groups is not None else None
        if pulse is not None:
            pulse.follow(f"{self.call} {self.number} agreed", groups.traffic.place)
            groups.pulse = pulse

    def _failure(self, failure: str, failed: list[int], channel: wire.Channel, device: torch.device) -> str:
        texts = _exchange_texts(failure, channel, device)
        return f"{self.call}: rank {failed[0]} failed, so no rank can go on. It said: {texts[failed[0]]}"

    def _difference(self, sections: Sequence[Section], rows: list[list[int]], channel: wire.Channel) -> str:
        """Name the first difference. Collective; every rank comes to the same text."""
        device = _device(channel)
        index = next(i for i in range(1, len(rows[0])) if any(row[i] != rows[0][i] for row in rows)) - 1
        section = sections[index] if index < len(sections) else Section("sections", [])
        entries = list(section.entries)
        counts = [row[0] for row in _exchange([len(entries)], channel, device)]
        hashes = [_hash(f"{what}\t{value}") for what, value in entries] + [0] * (max(counts) - len(entries))
        tables = _exchange(hashes, channel, device)
        at = next(i for i in range(max(counts)) if any(table[i] != tables[0][i] for table in tables))
        what, value = entries[at] if at < len(entries) else ("", NOTHING)
        texts = _exchange_texts(f"{what}: {value}" if what else value, channel, device)
        odd = next(rank for rank, table in enumerate(tables) if table[at] != tables[0][at])
        others = [rank for rank, table in enumerate(tables) if table[at] != tables[0][at]]
        return (
            f"{self.call}: ranks differ in their {section.title}. The first difference: rank 0 has {texts[0]!r}, rank "
            f"{odd} has {texts[odd]!r} (ranks {others} differ from rank 0). Every rank must build the same model with "
            "the same configuration"
        )


def _device(channel: wire.Channel) -> torch.device:
    """The CPU where the group can use it, else the accelerator."""
    from .topology import current_device

    cpu = torch.device("cpu")
    return cpu if channel.backend(cpu) != "none" else current_device()


def _exchange(values: Sequence[int], channel: wire.Channel, device: torch.device) -> list[list[int]]:
    row = torch.tensor(list(values), dtype=torch.int64, device=device)
    return wire.exchange(row, channel).tolist()  # type: ignore[no-any-return]


def _exchange_texts(text: str, channel: wire.Channel, device: torch.device) -> list[str]:
    raw = text.encode()[:TEXT]
    row = torch.zeros(TEXT, dtype=torch.uint8)
    if raw:
        row[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = wire.exchange(row.to(device), channel).cpu()
    return [bytes(entry.tolist()).rstrip(b"\0").decode(errors="replace") for entry in rows]
