# SPDX-License-Identifier: Apache-2.0
"""init_distributed: make a default process group, or adopt the one that is there.

What must hold: calling it twice is harmless; nothing is compiled or downloaded on this path; a process that no launcher
started becomes a job of one rank without opening a port; every wait has a timeout (DEEPSPEED_TIMEOUT, minutes).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm import comm, discovery
from deepspeed.errors import CollectiveTimeout, UsageError
from deepspeed.utils.logging import log_dist, logger

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_TIMEOUT_MINUTES = 10.0


def default_timeout() -> timedelta:
    """DEEPSPEED_TIMEOUT in minutes, 10 where it is unset. Raises UsageError where it is no positive number."""
    text = os.environ.get("DEEPSPEED_TIMEOUT", str(DEFAULT_TIMEOUT_MINUTES))
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise UsageError(f"DEEPSPEED_TIMEOUT is {text!r}; it must be a positive number of minutes")
    return timedelta(minutes=minutes)


def _backend(requested: str | None) -> str:
    """gloo on CPU; on CUDA nccl for device tensors plus gloo for the CPU tensors of the control plane."""
    if requested is None:
        from deepspeed.accelerator import get_accelerator

        requested = get_accelerator().communication_backend_name()
    return "cpu:gloo,cuda:nccl" if requested == "nccl" else requested


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from what MPI or Slurm says.

    Raises UsageError where neither started this process, or where the first host cannot be known.
    """
    try:
        place = discovery.discover(os.environ, distributed_port)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    if place is None:
        raise UsageError("neither MPI nor Slurm started this process: start it with the deepspeed launcher or torchrun")
    values = place.env()
    if "MASTER_ADDR" not in values:
        values["MASTER_ADDR"] = _ask_mpi_for_master(place.source)
    os.environ.update(values)
    if verbose:
        log_dist(
            f"{place.source}: rank {place.rank} of {place.world_size}, local rank {place.local_rank}, "
            f"master {values['MASTER_ADDR']}:{place.master_port}"
        )


def _ask_mpi_for_master(source: str) -> str:
    """The address of rank 0's host, by way of mpi4py where it is installed."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]
    except ImportError as exc:
        raise UsageError(
            f"{source} started this process on several hosts, but no variable says which is the first: "
            "set MASTER_ADDR, or install mpi4py so that the ranks can agree on it"
        ) from exc
    import socket

    return str(MPI.COMM_WORLD.bcast(socket.gethostbyname(socket.gethostname()), root=0))


def _settle_environment(auto_mpi_discovery: bool, port: int, verbose: bool) -> bool:
    """Make the env:// variables complete. Returns False for a process that no launcher started (a job of one)."""
    env = os.environ
    if not discovery.has_rendezvous(env):
        if auto_mpi_discovery and discovery.discover(env, port) is not None:
            mpi_discovery(port, verbose)
            return True
        if "RANK" in env or int(env.get("WORLD_SIZE", "1")) > 1:
            found = {name: env[name] for name in discovery.ENV_NAMES if name in env}
            raise UsageError(
                f"the environment describes only part of a job: {found}. RANK and WORLD_SIZE must both be set; "
                "start the script with the deepspeed launcher or torchrun"
            )
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK=env.get("LOCAL_RANK", "0"))
        return False
    if "MASTER_ADDR" not in env:
        if int(env["WORLD_SIZE"]) > 1:
            raise UsageError("WORLD_SIZE is above 1 but MASTER_ADDR is not set: set it to the address of rank 0's host")
        return False
    env.setdefault("MASTER_PORT", str(port))
    return True


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise torch.distributed unless somebody has done so already; then apply `config`'s comms_logger section.

    `dist_backend` None: nccl plus gloo on CUDA, gloo on CPU. `timeout` None: DEEPSPEED_TIMEOUT minutes. `rank` and
    `world_size` go with an `init_method`; otherwise the environment, MPI or Slurm say who this is.
    `dist_init_required` False: never create a group. Raises UsageError for contradictory or incomplete information.
    """
    if config is not None:
        comm.configure(config)
    if comm.is_initialized():
        if verbose:
            logger.debug("adopting the process group that torch.distributed has already")
        return
    if dist_init_required is False:
        return
    timeout = default_timeout() if timeout is None else timeout
    backend = _backend(dist_backend)
    if init_method is not None or rank >= 0 or world_size > 0:
        kwargs: dict[str, Any] = {"init_method": init_method}
        if rank >= 0 or world_size > 0:
            if rank < 0 or world_size <= 0 or rank >= world_size:
                raise UsageError(
                    f"rank {rank} and world_size {world_size} must be given together, with rank < world_size"
                )
            kwargs.update(rank=rank, world_size=world_size)
        elif discovery.has_rendezvous(os.environ):
            kwargs.update(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        if init_method is None:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
            kwargs.pop("init_method")
    elif _settle_environment(auto_mpi_discovery, distributed_port, verbose):
        kwargs = {"init_method": "env://"}
    else:
        kwargs = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    _create(backend, timeout, kwargs, verbose)


def _create(backend: str, timeout: timedelta, kwargs: dict[str, Any], verbose: bool) -> None:
    comm.forget_groups()
    if "nccl" in backend and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend, timeout=timeout, **kwargs)
    except RuntimeError as error:
        rank, world = kwargs.get("rank", os.environ.get("RANK")), kwargs.get("world_size", os.environ.get("WORLD_SIZE"))
        method = kwargs.get("init_method", "env://")
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if method == "env://" else method
        raise CollectiveTimeout(
            f"rank {rank} of {world}: joining the process group at {at} failed or timed out ({timeout}). Every rank "
            "must start, and reach that address; DEEPSPEED_TIMEOUT (minutes), or the timeout of init_distributed, "
            f"bounds the wait. Cause: {error}"
        ) from error
    _tell_accelerate(backend)
    os.environ.setdefault("LOCAL_RANK", "0" if dist.get_world_size() == 1 else str(_guess_local_rank()))
    if verbose:
        log_dist(f"process group of {dist.get_world_size()} ranks on {backend}, timeout {timeout}", ranks=[0])


def is_initialized() -> bool:
    """Whether torch.distributed has a default group, whoever made it."""
    there = comm.is_initialized()
    if there and dist.get_backend() == "gloo":
        _tell_accelerate("gloo")
    return there


def _tell_accelerate(backend: str) -> None:
    """Where accelerate's state is just being built and asks for this group without naming a backend, name it.

    accelerate derives the backend from the kind of accelerator. On a machine without one it would take itself for a job
    of one process although it had us make a group: every rank would train on the same data, and `"auto"` batch sizes
    would not fit the world size. So a Trainer script runs on the CPU without `use_cpu`.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    being_built = isinstance(shared, dict) and "num_processes" not in shared and shared.get("backend", "") is None
    if being_built and backend == "gloo":
        shared["backend"] = backend  # type: ignore[index]


def _guess_local_rank() -> int:
    """LOCAL_RANK where no launcher set it: ranks fill hosts in order, one a device."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else dist.get_world_size()
    return dist.get_rank() % max(1, devices)
