# SPDX-License-Identifier: Apache-2.0
"""torch.distributed under another name, with one addition: a collective is counted while the comms logger is on.

What must hold: arguments and results are torch's own; a disabled logger costs one attribute test per call; counting
never adds a collective.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp, Work

from deepspeed.comm.comms_logger import LOGGER
from deepspeed.utils.logging import log_dist

P = ParamSpec("P")
R = TypeVar("R")
Group = ProcessGroup | None

_group_names: dict[ProcessGroup, str] = {}


def name_group(group: Group, name: str) -> None:
    """Give a process group the name under which its traffic is reported."""
    if group is not None:
        _group_names[group] = name


def forget_groups() -> None:
    """Drop the names of groups that no longer exist."""
    _group_names.clear()


def group_name(group: Group) -> str:
    """The reported name of a group: the one it was given, "world", or its ranks."""
    if group is None or group is dist.group.WORLD:
        return "world"
    if group not in _group_names:
        ranks = dist.get_process_group_ranks(group)
        _group_names[group] = "ranks " + ",".join(str(rank) for rank in ranks)
    return _group_names[group]


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_nbytes(item) for item in value)
    return 0


def _wait_for_device(tensors: Any) -> None:
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
    if isinstance(first, torch.Tensor) and first.is_cuda:
        torch.cuda.synchronize(first.device)


def _counted(argument: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Report calls of a collective with the bytes of the named argument (the larger side of the transfer)."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not LOGGER.enabled:
                return fn(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            payload = bound.get(argument)
            blocking = not bound.get("async_op", False)
            if blocking:
                _wait_for_device(payload)
            start = time.perf_counter()
            result = fn(*args, **kwargs)
            if blocking:
                _wait_for_device(payload)
            seconds = time.perf_counter() - start if blocking else 0.0
            LOGGER.record(fn.__name__, group_name(bound.get("group")), _nbytes(payload), 1, seconds)
            return result

        return call

    return decorate


class _Works:
    """Several pending operations that are waited for together."""

    def __init__(self, works: list[Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# ---------------------------------------------------------------------------------------------- who and where


def is_available() -> bool:
    return dist.is_available()


def is_initialized() -> bool:
    """Whether torch.distributed has a default group, whoever made it."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    return dist.get_rank(group)


def get_world_size(group: Group = None) -> int:
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """LOCAL_RANK of this process. Raises RuntimeError before init_distributed."""
    import os

    if not is_initialized() or "LOCAL_RANK" not in os.environ:
        raise RuntimeError("LOCAL_RANK is not known: call deepspeed.init_distributed() first")
    return int(os.environ["LOCAL_RANK"])


def get_world_group() -> ProcessGroup | None:
    return dist.group.WORLD


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """The global ranks of a group, in its order."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def new_group(ranks: list[int] | None = None, **kwargs: Any) -> Any:
    """torch.distributed.new_group; every rank of the default group must call it."""
    return dist.new_group(ranks, **kwargs)


def destroy_process_group(group: Group = None) -> None:
    dist.destroy_process_group(group)
    if group is None:
        forget_groups()


# ---------------------------------------------------------------------------------------------- collectives


@_counted("tensor")
def broadcast(tensor: torch.Tensor, src: int, group: Group = None, async_op: bool = False) -> Work | None:
    return dist.broadcast(tensor, src=src, group=group, async_op=async_op)


def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None
) -> None:
    dist.broadcast_object_list(object_list, src=src, group=group, device=device)


@_counted("tensor")
def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """All-reduce in place, then hand the tensor back."""
    all_reduce(tensor, op=op, group=group)
    return tensor


@_counted("tensors")
def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> _Works | None:
    works = _Works([dist.all_reduce(tensor, op=op, group=group, async_op=True) for tensor in tensors])
    if async_op:
        return works
    works.wait()
    return None


@_counted("tensor")
def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    return dist.reduce(tensor, dst=dst, op=op, group=group, async_op=async_op)


@_counted("tensor_list")
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)


@_counted("output_tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@_counted("output_tensors")
def all_gather_coalesced(
    output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Group = None, async_op: bool = False
) -> _Works | None:
    """One all_gather_into_tensor per pair. Raises ValueError if the lists differ in length."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = _Works([dist.all_gather_into_tensor(out, inp, group=group, async_op=True) for out, inp in pairs])
    if async_op:
        return works
    works.wait()
    return None


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    dist.all_gather_object(object_list, obj, group=group)


@_counted("gather_list")
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    return dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)


@_counted("scatter_list")
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    return dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)


@_counted("input_list")
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    return dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)


@_counted("input")
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)


@_counted("input")
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)


@_counted("input_tensor_list")
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)


def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Work | None:
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


def monitored_barrier(group: Group = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)


# ---------------------------------------------------------------------------------------------- point to point


@_counted("tensor")
def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    dist.send(tensor, dst=dst, group=group, tag=tag)


@_counted("tensor")
def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    return dist.recv(tensor, src=src, group=group, tag=tag)


def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> Work | None:
    return dist.isend(tensor, dst=dst, group=group, tag=tag)


def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Work | None:
    return dist.irecv(tensor, src=src, group=group, tag=tag)


# ---------------------------------------------------------------------------------------------- comms logger


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set the comms logger from a config's `comms_logger` section and from the keywords that are not None."""
    section = getattr(deepspeed_config, "comms_logger", None)
    if section is None and isinstance(deepspeed_config, dict):
        section = deepspeed_config.get("comms_logger")
    LOGGER.configure(section, enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def log_summary(show_straggler: bool = False) -> None:
    """Log rank 0's table of operations, bytes and groups.

    With `show_straggler` (a collective: every rank must call) the slowest and fastest rank by time spent in blocking
    calls are named too.
    """
    text = LOGGER.summary()
    if show_straggler and is_initialized():
        seconds: list[Any] = [None] * get_world_size()
        dist.all_gather_object(seconds, sum(total.seconds for total in LOGGER.totals.values()))
        slow, fast = max(seconds), min(seconds)
        text += (
            f"\nlongest in blocking calls: rank {seconds.index(slow)} ({slow * 1e3:.2f} ms), "
            f"shortest: rank {seconds.index(fast)} ({fast * 1e3:.2f} ms); the shortest is who the others waited for"
        )
    log_dist(f"communication of rank 0\n{text}", ranks=[0])
