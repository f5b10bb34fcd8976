# SPDX-License-Identifier: Apache-2.0
"""Environments that launchers leave behind, and the place in the job that each describes."""

from __future__ import annotations

import pytest

from deepspeed.comm.discovery import Place, discover, first_host, has_rendezvous

_OMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
_SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_open_mpi_over_several_hosts_needs_a_master() -> None:
    assert discover(_OMPI, 29500) == Place("Open MPI", 5, 8, 1, 4, None, 29500)
    assert discover({**_OMPI, "MASTER_ADDR": "h0", "MASTER_PORT": "123"}, 29500) == Place(
        "Open MPI", 5, 8, 1, 4, "h0", 123
    )


def test_one_host_is_its_own_master() -> None:
    place = discover({**_OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 29501)
    assert place is not None and place.env() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
    }


def test_hydra_and_mvapich() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert discover(hydra, 1) == Place("Hydra MPI", 1, 2, 1, 2, "127.0.0.1", 1)
    mvapich = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1"}
    assert discover(mvapich, 1) == Place("MVAPICH", 0, 1, 0, None, "127.0.0.1", 1)


def test_azure_names_the_master() -> None:
    aml = {**_OMPI, "AZUREML_EXPERIMENT_ID": "x", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6105"}
    assert discover(aml, 29500) == Place("Open MPI", 5, 8, 1, 4, "10.0.0.4", 6105)


def test_slurm_step() -> None:
    assert discover(_SLURM, 29500) == Place("Slurm", 3, 4, 1, 2, "gpu07", 29500)


def test_a_slurm_allocation_without_a_step_is_no_job() -> None:
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a,b"}, 1) is None
    assert discover({}, 1) is None


@pytest.mark.parametrize("broken", ["", "x", "-1"])
def test_a_torn_set_names_the_variable(broken: str) -> None:
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE"):
        discover({**_OMPI, "OMPI_COMM_WORLD_SIZE": broken}, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[03-05,9],x", "n03"), ("n[7,9]", "n7"), ("r[1-2]n[4-5]", "r1n4"), ("", None)],
)
def test_first_host(nodes: str, first: str | None) -> None:
    assert first_host(nodes) == first


def test_rendezvous_needs_both() -> None:
    assert has_rendezvous({"RANK": "0", "WORLD_SIZE": "1"})
    assert not has_rendezvous({"RANK": "0"})
