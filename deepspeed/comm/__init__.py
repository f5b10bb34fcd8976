# SPDX-License-Identifier: Apache-2.0
"""`import deepspeed.comm as dist`: torch.distributed's functions, init_distributed, and a logger of the traffic.

Names that are not defined here are torch.distributed's own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as _torch_distributed
from torch.distributed import ProcessGroup, ReduceOp

from deepspeed.comm import comms_logger
from deepspeed.comm.comm import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    configure,
    destroy_process_group,
    gather,
    get_all_ranks_from_group,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    inference_all_reduce,
    irecv,
    is_available,
    isend,
    log_summary,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from deepspeed.comm.init import TORCH_DISTRIBUTED_DEFAULT_PORT, init_distributed, is_initialized, mpi_discovery

__all__ = [
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_torch_distributed, name)
    except AttributeError:
        raise AttributeError(f"neither {__name__} nor torch.distributed has {name!r}") from None
