# SPDX-License-Identifier: Apache-2.0
"""Pure: host lists. The hostfile, the filters `--include` and `--exclude`, and their transport as `--world_info`.

What must hold: a host name that leaves this module is safe as one word of a command (letters, digits, `.`, `_`,
`-`, not beginning with `-` or `.`), and an error about a file names its line and the form that was expected.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.errors import LauncherError

__all__ = [
    "HostListError",
    "Slot",
    "check_host",
    "decode_world_info",
    "encode_world_info",
    "first_hosts",
    "first_slots",
    "parse_hostfile",
    "parse_inclusion_exclusion",
    "parse_slots",
]

Slot = int | str
"""One place for a rank: a device index, or the identifier of a device (`GPU-…`, `MIG-…`)."""

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", re.ASCII)
_DEVICE_ID = re.compile(r"(?:GPU|MIG)-[A-Za-z0-9\-/]+", re.ASCII)
_LINE_FORM = "expected 'HOST slots=N' with N at least 1, such as 'worker-1 slots=8'"
_FILTER_FORM = "expected 'HOST:SLOT,SLOT@HOST', such as 'worker-1:0,2@worker-2'"


class HostListError(LauncherError, ValueError):
    """A hostfile or a host filter is wrong."""


def check_host(name: str) -> str:
    """Return `name` if it is a host name or an IPv4 address, else raise `HostListError`."""
    if not _HOST.fullmatch(name):
        raise HostListError(
            f"{name!r} is not a host name: use letters, digits, '.', '_' and '-', and begin with none of '.' and '-'"
        )
    return name


def parse_hostfile(lines: Iterable[str], source: str = "hostfile") -> dict[str, int]:
    """Read `HOST slots=N` lines; blank lines and `#` comments are skipped.

    Returns: number of slots by host, in the order of the file, which is the order of the ranks.

    Raises:
        HostListError: a malformed line, a repeated host, or no host at all; names the line.
    """
    pool: dict[str, int] = {}
    seen_at: dict[str, int] = {}
    for number, raw in enumerate(lines, 1):
        line = raw.removesuffix("\n")
        where = f"{source}, line {number}"
        if "\r" in line:
            raise HostListError(f"{where}: carriage return in {line!r}: save the file with Unix line ends")
        line = line.split("#", 1)[0].strip(" \t")
        if not line:
            continue
        match = re.fullmatch(r"(\S+)[ \t]+slots=([0-9]+)", line, re.ASCII)
        if match is None or int(match[2]) < 1:
            raise HostListError(f"{where}: cannot read {line!r}: {_LINE_FORM}")
        try:
            host = check_host(match[1])
        except HostListError as err:
            raise HostListError(f"{where}: {err}") from None
        if host in pool:
            raise HostListError(f"{where}: host {host!r} stands on line {seen_at[host]} already: name each host once")
        pool[host] = int(match[2])
        seen_at[host] = number
    if not pool:
        raise HostListError(f"{source}: names no host: {_LINE_FORM}")
    return pool


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int | Sequence[Slot]], inclusion: str, exclusion: str
) -> dict[str, list[Slot]]:
    """Choose slots by `--include` or `--exclude` text.

    Args:
        resource_pool: by host, the number of its slots or their list.
        inclusion: keep only these (`""`: everything).
        exclusion: leave these out.

    Returns: slots by host, in the order of the pool; hosts left without slots are absent.

    Raises:
        HostListError: both filters, an unknown host or slot (the message lists the known ones), or nothing left.
    """
    pool: dict[str, list[Slot]] = {
        host: list(range(slots)) if isinstance(slots, int) else list(slots) for host, slots in resource_pool.items()
    }
    if inclusion and exclusion:
        raise HostListError("--include and --exclude exclude each other: give one of them")
    if not inclusion and not exclusion:
        return pool
    flag, text = ("--include", inclusion) if inclusion else ("--exclude", exclusion)
    named = _parse_filter(text, flag, pool)
    if inclusion:
        chosen = {host: [s for s in slots if s in named.get(host, ())] for host, slots in pool.items()}
    else:
        chosen = {host: [s for s in slots if s not in named.get(host, ())] for host, slots in pool.items()}
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise HostListError(f"{flag} {text!r} leaves no slot to run on")
    return chosen


def _parse_filter(text: str, flag: str, pool: Mapping[str, list[Slot]]) -> dict[str, list[Slot]]:
    named: dict[str, list[Slot]] = {}
    for part in text.split("@"):
        host, colon, slot_text = part.strip().partition(":")
        if not host or (colon and not slot_text):
            raise HostListError(f"{flag}: cannot read {part!r} in {text!r}: {_FILTER_FORM}")
        if host not in pool:
            raise HostListError(f"{flag}: unknown host {host!r}: the hosts are {', '.join(pool)}")
        slots = parse_slots(slot_text, f"{flag} {part!r}") if colon else pool[host]
        for slot in slots:
            if slot not in pool[host]:
                known = ",".join(map(str, pool[host]))
                raise HostListError(f"{flag}: host {host!r} has no slot {slot}: its slots are {known}")
        named.setdefault(host, []).extend(slots)
    return named


def parse_slots(text: str, source: str) -> list[Slot]:
    """Read `0,2,GPU-…`, the form of `CUDA_VISIBLE_DEVICES`.

    Raises:
        HostListError: an empty or unknown item, or one that occurs twice.
    """
    slots: list[Slot] = []
    for item in (piece.strip() for piece in text.split(",")):
        if re.fullmatch("[0-9]+", item, re.ASCII):
            slot: Slot = int(item)
        elif _DEVICE_ID.fullmatch(item):
            slot = item
        else:
            raise HostListError(f"{source}: {item!r} is no device: expected indices ('0,2'), or GPU-… or MIG-… ids")
        if slot in slots:
            raise HostListError(f"{source}: {item!r} occurs twice")
        slots.append(slot)
    return slots


def first_hosts(pool: Mapping[str, list[Slot]], count: int) -> dict[str, list[Slot]]:
    """The first `count` hosts of the pool.

    Raises:
        HostListError: fewer hosts, or `count` below 1.
    """
    if not 1 <= count <= len(pool):
        raise HostListError(f"--num_nodes {count}: the hostfile names {len(pool)} host(s); use 1 to {len(pool)}")
    return dict(list(pool.items())[:count])


def first_slots(pool: Mapping[str, list[Slot]], count: int) -> dict[str, list[Slot]]:
    """The first `count` slots of each host.

    Raises:
        HostListError: a host with fewer slots, or `count` below 1.
    """
    for host, slots in pool.items():
        if not 1 <= count <= len(slots):
            known = ",".join(map(str, slots))
            raise HostListError(f"--num_gpus {count}: host {host!r} has {len(slots)} slot(s) ({known})")
    return {host: slots[:count] for host, slots in pool.items()}


def encode_world_info(world: Mapping[str, Sequence[Slot]]) -> str:
    """The value of `--world_info`: URL-safe base64 of the JSON `{"host": [slots]}`."""
    return base64.urlsafe_b64encode(json.dumps({host: list(slots) for host, slots in world.items()}).encode()).decode()


def decode_world_info(text: str) -> dict[str, list[Slot]]:
    """The inverse of `encode_world_info`.

    Raises:
        HostListError: not what `encode_world_info` writes.
    """
    try:
        world = json.loads(base64.b64decode(text.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        world = None
    if (
        not isinstance(world, dict)
        or not world
        or not all(
            isinstance(slots, list) and slots and all(type(slot) in (int, str) for slot in slots)
            for slots in world.values()
        )
    ):
        raise HostListError("--world_info is not the base64 text that the deepspeed command writes")
    return {check_host(host): slots for host, slots in world.items()}
