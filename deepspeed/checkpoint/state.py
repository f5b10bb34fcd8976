# SPDX-License-Identifier: Apache-2.0
"""What the training core and the checkpoint package hand to each other.

These dataclasses are the only thing exchanged.  The core fills one from its live shards (views, no copies) and the
checkpoint package writes it; on load the checkpoint package fills one from files (mapped, re-sliced where the world
size differs) and the core copies it in.

What must hold: a shard of a parameter of ``numel`` elements in a world of ``w`` ranks has exactly ``ceil(numel / w)``
elements on every rank; rank ``r`` holds elements ``[r * s, (r + 1) * s)`` of the row-major flattened parameter; the
tail beyond ``numel`` is padding whose content means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.runtime.zero.core.layout import shard_numel

__all__ = ["SubGroupState", "Zero3State", "shard_numel"]


@dataclass
class SubGroupState:
    """One optimizer sub-group as this rank holds it.

    ``param_group``: index of the optimizer parameter group that the sub-group belongs to.
    ``names``, ``shapes``: its parameters in optimizer order with their full shapes.
    ``fp32``: 1-D fp32 master, the concatenation of this rank's shards of ``names`` in order, no gaps.
    ``state``: optimizer state by name; 1-D tensors as long as ``fp32``, 0-d tensors or plain numbers (``step``).
    Empty where the optimizer has not made state yet.
    ``own_scalars``: by name, the 0-d tensors and numbers of ``state`` for parameters that missed steps, because no rank
    used them; None for one that was never stepped.
    """

    param_group: int
    names: list[str]
    shapes: list[torch.Size]
    fp32: torch.Tensor
    state: dict[str, torch.Tensor | float | int] = field(default_factory=dict)
    own_scalars: dict[str, dict[str, Any] | None] = field(default_factory=dict)


@dataclass
class Zero3State:
    """Everything of a ZeRO-3 rank that a checkpoint holds, apart from counters, scheduler and client state.

    ``sub_groups``: in optimizer order; a sequence, so that a reader may make each entry on access.
    ``param_groups``: the hyper-parameters of every optimizer parameter group, without ``params``.
    ``frozen``: name -> (full shape, this rank's 1-D shard in the parameter's own dtype); in an engine without an
    optimizer every parameter is here.
    ``shared``: alias of a tied parameter -> name under which the parameter is listed.
    ``buffers``: persistent buffers by name, whole.
    """

    world_size: int
    rank: int
    sub_groups: Sequence[SubGroupState]
    param_groups: list[dict[str, Any]]
    frozen: Mapping[str, tuple[torch.Size, torch.Tensor]]
    shared: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_scaler: object | None = None
    dynamic_loss_scale: bool = False
    overflow: bool = False
    param_dtype: torch.dtype = torch.float32
