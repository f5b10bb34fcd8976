# SPDX-License-Identifier: Apache-2.0
"""Process groups by role. Data parallelism spans the world here; hpZ splits it into runs of consecutive ranks.

What must hold: all users of hpZ with the same size in one process share one set of groups (two engines, two
`zero.Init`); the set dies with the default group that it was made under.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.comm import comm
from deepspeed.errors import ConfigError, NotSupportedError


class _HpzGroups:
    """The hpZ groups made so far under one default group: P -> this rank's group."""

    def __init__(self) -> None:
        self.default: ProcessGroup | None = None
        self.by_size: dict[int, ProcessGroup] = {}

    def under(self, default: ProcessGroup | None) -> dict[int, ProcessGroup]:
        if self.default is not default:
            self.default, self.by_size = default, {}
        return self.by_size


_hpz = _HpzGroups()


def _timeout(group: ProcessGroup | None) -> timedelta | None:
    """The timeout that a group was made with; None (torch's default) where its backend does not tell."""
    device = torch.device("cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend(group)) else "cpu")
    try:
        found = group._get_backend(device).options._timeout if group is not None else None
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def hpz_group(world_size: int, partition_size: int) -> ProcessGroup | None:
    """This rank's group of `partition_size` consecutive ranks; None for size 1, the world for size `world_size`.

    Collective over the default group when first called for a size. Raises ConfigError for a size that does not divide
    the world size.
    """
    if partition_size < 1 or world_size % partition_size != 0:
        allowed = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {partition_size}, which does not divide the world size "
            f"{world_size}; allowed: {', '.join(map(str, allowed))}"
        )
    if partition_size == 1:
        return None
    world = comm.get_world_group()
    if partition_size == world_size:
        return world
    made = _hpz.under(world)
    if partition_size not in made:
        mine = comm.get_rank() // partition_size
        for index in range(world_size // partition_size):
            ranks = list(range(index * partition_size, (index + 1) * partition_size))
            group = comm.new_group(ranks, timeout=_timeout(world))
            if index == mine:
                comm.name_group(group, "hpz")
                made[partition_size] = group
    return made[partition_size]


def _get_data_parallel_group() -> ProcessGroup | None:
    return comm.get_world_group()


def _get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def _get_data_parallel_rank() -> int:
    return comm.get_rank()


def _get_sequence_data_parallel_group() -> ProcessGroup | None:
    return comm.get_world_group()


def _get_sequence_data_parallel_world_size() -> int:
    return comm.get_world_size()


def _get_sequence_data_parallel_rank() -> int:
    return comm.get_rank()


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> ProcessGroup:
    """Raises NotSupportedError: a sequence is never split here, so there is no such group."""
    raise NotSupportedError("sequence parallelism is not supported: use a sequence-parallel size of 1")


def _get_model_parallel_world_size() -> int:
    return 1


def _get_model_parallel_rank() -> int:
    return 0


def _get_model_parallel_group() -> ProcessGroup:
    """Raises NotSupportedError: there is no tensor parallelism here."""
    raise NotSupportedError("tensor parallelism is not supported: use a tensor-parallel size of 1")
