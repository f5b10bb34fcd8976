# SPDX-License-Identifier: Apache-2.0
"""Who am I in this job? Answered from environment variables alone, so that it can be tested without a cluster.

`discover(environ, port)` looks for MPI launchers, then Slurm, and returns the variables that `env://` rendezvous
needs. Markers of hosted platforms (AzureML, SageMaker) only decide where the master's address comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ENV_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process in its job. `master_addr` is None where the variables do not say who the first host is."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int | None
    master_addr: str | None
    master_port: int

    def env(self) -> dict[str, str]:
        values = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_PORT": str(self.master_port),
        }
        if self.local_size is not None:
            values["LOCAL_SIZE"] = str(self.local_size)
        if self.master_addr is not None:
            values["MASTER_ADDR"] = self.master_addr
        return values


# launcher -> rank, size, local rank, local size
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "Hydra MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def in_aml(environ: Mapping[str, str]) -> bool:
    """Is this an Azure Machine Learning job?"""
    return "AZUREML_EXPERIMENT_ID" in environ


def in_aws_sm(environ: Mapping[str, str]) -> bool:
    """Is this a SageMaker training job?"""
    return "SM_TRAINING_ENV" in environ


def in_dlts(environ: Mapping[str, str]) -> bool:
    """Is this a DLTS job?"""
    return "DLTS_JOB_ID" in environ


def has_rendezvous(environ: Mapping[str, str]) -> bool:
    """Are RANK and WORLD_SIZE there, as torchrun, accelerate and the deepspeed launcher set them?"""
    return "RANK" in environ and "WORLD_SIZE" in environ


def discover(environ: Mapping[str, str], port: int) -> Place | None:
    """This process's place according to MPI or Slurm; None if neither started it. Raises ValueError for a torn set."""
    port = int(environ.get("MASTER_PORT", port))
    for source, names in _MPI.items():
        if names[0] in environ:
            return _from_mpi(source, names, environ, port)
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _from_slurm(environ, port)
    return None


def _number(environ: Mapping[str, str], name: str, source: str) -> int:
    text = environ.get(name, "")
    if not text.strip().isdigit():
        raise ValueError(f"{source} started this process, but {name} is {text!r} where a number is needed")
    return int(text)


def _from_mpi(source: str, names: tuple[str, str, str, str], environ: Mapping[str, str], port: int) -> Place:
    rank, world = _number(environ, names[0], source), _number(environ, names[1], source)
    local_rank = _number(environ, names[2], source) if names[2] in environ or world > 1 else 0
    local_size = _number(environ, names[3], source) if names[3] in environ else None
    master, aml_port = environ.get("MASTER_ADDR"), None
    if master is None and in_aml(environ):
        master, aml_port = _aml_master(environ, single_node=local_size == world)
    if master is None and (world == 1 or local_size == world):
        master = "127.0.0.1"
    return Place(source, rank, world, local_rank, local_size, master, aml_port or port)


def _aml_master(environ: Mapping[str, str], single_node: bool) -> tuple[str | None, int | None]:
    text = environ.get("AZ_BATCHAI_MPI_MASTER_NODE" if single_node else "AZ_BATCH_MASTER_NODE", "")
    host, _, port = text.partition(":")
    return host or None, int(port) if port.isdigit() else None


def _from_slurm(environ: Mapping[str, str], port: int) -> Place:
    rank, world = _number(environ, "SLURM_PROCID", "Slurm"), _number(environ, "SLURM_STEP_NUM_TASKS", "Slurm")
    local_rank = _number(environ, "SLURM_LOCALID", "Slurm")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0]
    local_size = int(per_node) if per_node.isdigit() else None
    master = environ.get("MASTER_ADDR")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if master is None:
        master = first_host(nodes) or ("127.0.0.1" if world == 1 else None)
    return Place("Slurm", rank, world, local_rank, local_size, master, port)


def first_host(nodelist: str) -> str | None:
    """The first host of a Slurm node list: `n[03-05,9],x` -> `n03`; None for an empty list."""
    match = re.match(r"[^,\[]*", nodelist.strip())
    head = match.group(0) if match else ""
    rest = nodelist.strip()[len(head) :]
    while rest.startswith("["):
        inside, _, rest = rest[1:].partition("]")
        head += re.split(r"[,-]", inside, maxsplit=1)[0]
        more = re.match(r"[^,\[]*", rest)
        head += more.group(0) if more else ""
        rest = rest[len(more.group(0)) if more else 0 :]
    return head or None
