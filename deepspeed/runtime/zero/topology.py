# SPDX-License-Identifier: Apache-2.0
"""From the configuration and torch.distributed to the groups and devices that parameters are sharded over."""

from __future__ import annotations

import os
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.utils import groups as process_groups

from .core.param import ShardGroups
from .core.wire import Channel


def shard_groups(hpz: int, group: Any = None, hpz_group: Any = None) -> ShardGroups:
    """Groups for ``hpz`` ranks per secondary shard; collective the first time a size is asked for.

    Args:
        group: process group of the primary shards (default: all ranks).
        hpz_group: process group of the secondary shards, where the caller made it.

    Raises:
        UsageError: several processes were started, and each would train alone.
    """
    primary = Channel.of(group)
    if primary.size == 1 and int(os.environ.get("WORLD_SIZE") or 1) > 1 and group is None:
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the process group has one rank: call "
            "deepspeed.init_distributed() (or torch.distributed.init_process_group) before sharding a model"
        )
    if hpz_group is not None:
        return ShardGroups(primary, Channel.of(hpz_group))
    if hpz <= 1 or primary.size == 1:
        return ShardGroups(primary)
    if hpz == primary.size:
        return ShardGroups(primary, primary)
    return ShardGroups(primary, Channel.of(process_groups.hpz_group(primary.size, hpz)))


def ensure_distributed() -> None:
    """Initialise torch.distributed unless that was done."""
    if not comm.is_initialized():
        comm.init_distributed()


def current_device() -> torch.device:
    """The accelerator device of this rank."""
    return torch.device(get_accelerator().current_device_name())
