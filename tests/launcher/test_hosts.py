# SPDX-License-Identifier: Apache-2.0
"""Host lists: every hostile or malformed line is an error that names its line (L11); filters list what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import hosts
from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

POOL = {"worker-0": 4, "worker-1": 2}


def test_hostfile_keeps_order_and_skips_comments_and_blank_lines() -> None:
    text = "# a cluster\n\nworker-1 slots=2  # the small one\n\tworker-0\tslots=4\n10.0.0.7 slots=1"
    assert list(hosts.parse_hostfile(text.splitlines(keepends=True)).items()) == [
        ("worker-1", 2),
        ("worker-0", 4),
        ("10.0.0.7", 1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=id slots=1",
        "-h slots=2",
        "h;id slots=1",
        "$(id) slots=1",
        "`id` slots=1",
        "^hosts slots=1",
        "/node.*/ slots=1",
        "node[0-3] slots=1",
        "root@node slots=1",
        "h\u00f6st slots=1",
        "h slots=4x",
        "h slots=0",
        "h slots=-1",
        "h slots=",
        "h slots=\u0664",
        "h slots = 4",
        "h",
        "h slots=1 slots=2",
        "h slots=1\r",
        "h\x00 slots=1",
        "good slots=1",
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"hostfile, line 3: ") as caught:
        hosts.parse_hostfile(["# first\n", "good slots=1\n", line + "\n"])
    assert isinstance(caught.value, LauncherError)


def test_an_empty_hostfile_names_the_expected_form() -> None:
    with pytest.raises(ValueError, match="names no host: expected 'HOST slots=N'"):
        hosts.parse_hostfile(["# nothing\n"])


def test_fetch_hostfile(tmp_path: Path) -> None:
    assert fetch_hostfile(tmp_path / "absent") is None
    path = tmp_path / "hosts"
    path.write_bytes(b"a slots=1\r\n")
    with pytest.raises(ValueError, match=f"{path}, line 1: carriage return"):
        fetch_hostfile(path)
    path.write_bytes(b"a slots=1\n\xff slots=1\n")
    with pytest.raises(ValueError, match="not a UTF-8 text file"):
        fetch_hostfile(str(path))
    path.write_bytes(b"a slots=1\n")
    assert fetch_hostfile(path) == {"a": 1}


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        ("", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}),
        ("worker-1", "", {"worker-1": [0, 1]}),
        ("worker-1:1@worker-0:3,1", "", {"worker-0": [1, 3], "worker-1": [1]}),
        ("worker-0:0@worker-0:2", "", {"worker-0": [0, 2]}),
        ("", "worker-0", {"worker-1": [0, 1]}),
        ("", "worker-0:0,1@worker-1:0", {"worker-0": [2, 3], "worker-1": [1]}),
    ],
)
def test_filters(include: str, exclude: str, chosen: dict[str, list[int]]) -> None:
    found = parse_inclusion_exclusion(POOL, include, exclude)
    assert list(found.items()) == list(chosen.items())


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-9", "", "unknown host 'worker-9': the hosts are worker-0, worker-1"),
        ("worker-1:2", "", "host 'worker-1' has no slot 2: its slots are 0,1"),
        ("", "worker-1:7", "host 'worker-1' has no slot 7: its slots are 0,1"),
        ("worker-1:x", "", "'x' is no device"),
        ("worker-1:1,1", "", "occurs twice"),
        ("worker-1:", "", "cannot read 'worker-1:'"),
        ("@", "", "cannot read ''"),
        ("worker-0", "worker-1", "exclude each other"),
        ("", "worker-0@worker-1", "leaves no slot"),
    ],
)
def test_wrong_filters(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_inclusion_exclusion(POOL, include, exclude)


def test_world_info_round_trip_and_rejection() -> None:
    world: dict[str, list[hosts.Slot]] = {"a": [0, 2], "b": ["GPU-1f/2"]}
    text = hosts.encode_world_info(world)
    assert hosts.decode_world_info(text) == world
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    for bad in ("", "!!", "e30=", hosts.encode_world_info({"-x": [0]}), hosts.encode_world_info({"a": []})):
        with pytest.raises(ValueError):
            hosts.decode_world_info(bad)


def test_first_hosts_and_slots() -> None:
    pool: dict[str, list[hosts.Slot]] = {"a": [0, 1], "b": [4, 5, 6]}
    assert hosts.first_hosts(pool, 1) == {"a": [0, 1]}
    assert hosts.first_slots(pool, 2) == {"a": [0, 1], "b": [4, 5]}
    with pytest.raises(ValueError, match="names 2 host"):
        hosts.first_hosts(pool, 3)
    with pytest.raises(ValueError, match=r"host 'a' has 2 slot\(s\) \(0,1\)"):
        hosts.first_slots(pool, 3)
