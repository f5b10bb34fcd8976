# SPDX-License-Identifier: Apache-2.0
"""Which cores a rank of this host is bound to, and the numactl command that does it. Standard library only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def parse_range_list(text: str) -> list[int]:
    """`"0,2-4"` -> [0, 2, 3, 4]. Raises ValueError for anything but increasing numbers and ranges without overlap."""
    cores: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"{part.strip()!r} in the core list {text!r} is neither a number nor a range like 0-3")
        first, last = int(low), int(high) if dash else int(low)
        if first > last or (cores and first <= cores[-1]):
            raise ValueError(f"{part.strip()!r} in the core list {text!r}: cores must increase and not repeat")
        cores.extend(range(first, last + 1))
    return cores


def cores_of_rank(num_local_procs: int, local_rank: int, core_list: str | None = None) -> list[int]:
    """The share of a rank in the given cores (default: those this process may use): equal runs, the rest left idle.

    Raises ValueError where there are fewer cores than ranks.
    """
    cores = parse_range_list(core_list) if core_list else sorted(os.sched_getaffinity(0))
    share = len(cores) // num_local_procs
    if share == 0:
        raise ValueError(f"{len(cores)} core(s) cannot be split between {num_local_procs} ranks")
    return cores[local_rank * share : (local_rank + 1) * share]


def numa_nodes_of(cores: list[int], sysfs: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The NUMA nodes that the cores lie on, empty where the system does not say."""
    nodes = []
    for entry in sysfs.glob("node[0-9]*"):
        listed = entry / "cpulist"
        text = listed.read_text().strip() if listed.exists() else ""
        if text and set(parse_range_list(text)) & set(cores):
            nodes.append(int(entry.name[4:]))
    return sorted(nodes)


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[list[str], int]:
    """The numactl words to put before a rank's command, and the number of cores it gets.

    Raises ValueError for a bad core list, FileNotFoundError where numactl is not installed.
    """
    cores = cores_of_rank(num_local_procs, local_rank, bind_core_list)
    if shutil.which("numactl") is None:
        raise FileNotFoundError("numactl is not installed; it is needed to bind ranks to cores")
    command = ["numactl", "-C", ",".join(map(str, cores))]
    nodes = numa_nodes_of(cores)
    if len(nodes) == 1:
        command += ["-m", str(nodes[0])]
    return command, len(cores)
