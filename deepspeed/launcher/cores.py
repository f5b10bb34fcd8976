# SPDX-License-Identifier: Apache-2.0
"""Pure but for one question to the kernel: which cores each rank of a host runs on.

What must hold: ranks get disjoint, equally large, contiguous runs of the allowed cores, and never none.
"""

from __future__ import annotations

import os
import re

from deepspeed.errors import LauncherError

__all__ = ["cores_by_rank", "parse_core_list"]


def parse_core_list(text: str) -> list[int]:
    """Read `0-3,8,10-11`.

    Raises:
        LauncherError: another form, or a core that occurs twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise LauncherError(f"--bind_core_list {text!r}: cannot read {part!r}; expected a form like '0-3,8,10-11'")
        cores += range(first, last + 1)
    if len(set(cores)) != len(cores):
        raise LauncherError(f"--bind_core_list {text!r}: a core occurs twice")
    return cores


def cores_by_rank(ranks: int, core_list: str | None) -> list[list[int]]:
    """Share the cores of `core_list` (default: all that this process may use) among `ranks` local ranks.

    Raises:
        LauncherError: fewer cores than ranks, or a core that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores = parse_core_list(core_list) if core_list else allowed
    foreign = sorted(set(cores) - set(allowed))
    if foreign:
        raise LauncherError(f"--bind_core_list: core(s) {foreign} are not among those of this process, {allowed}")
    share = len(cores) // ranks
    if share == 0:
        raise LauncherError(f"--bind_cores_to_rank: {ranks} ranks on this host, but only {len(cores)} core(s)")
    return [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
