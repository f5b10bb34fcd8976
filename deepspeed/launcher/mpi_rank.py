# SPDX-License-Identifier: Apache-2.0
"""Between an MPI or Slurm launcher and a rank: `python -m deepspeed.launcher.mpi_rank COMMAND…`.

What must hold: the rank sees the same variables as under the other backends; a signal and the exit code pass through;
a rank that fails ends the job, although it never spoke to MPI.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from deepspeed.errors import LauncherError
from deepspeed.launcher.constants import cpu_environment, grace_period, setup_logging
from deepspeed.launcher.slots import cpu_only
from deepspeed.launcher.spawn import Child, spawn
from deepspeed.launcher.supervise import Inbox, heed_signals, supervise

__all__ = ["main", "rank_variables"]

# (rank, world size, local rank, local size), as each launcher names them
_SOURCES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK and CROSS_SIZE from the launcher's own variables.

    Raises:
        LauncherError: none of the known launchers started this process.
    """
    for rank, world_size, local_rank, local_size in _SOURCES:
        if all(name in environ for name in (rank, world_size, local_rank)):
            local_text = environ.get(local_size, "").partition("(")[0]
            values = {
                "RANK": environ[rank],
                "WORLD_SIZE": environ[world_size],
                "LOCAL_RANK": environ[local_rank],
            }
            if local_text.isdecimal():
                values["LOCAL_SIZE"] = values["LOCAL_WORLD_SIZE"] = local_text
            return values
    raise LauncherError(
        "no MPI or Slurm launcher started this process: one of the variables "
        + ", ".join(names[0] for names in _SOURCES)
        + " and its companions must be set"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run the rank's command, and exit with its code."""
    heed_signals()
    argv = list(sys.argv[1:] if args is None else args)
    setup_logging("info", quiet=False)
    try:
        env = {**os.environ, **rank_variables(os.environ)}
        if cpu_only(env):
            env.update(cpu_environment(env, int(env.get("LOCAL_SIZE", "1"))))
        with Inbox() as inbox:
            child = spawn(Child, f"rank {env['RANK']}", argv, env, pass_fds=_pmi_descriptors(env))
            code = supervise([child], inbox, grace_period(env))
    except LauncherError as err:
        print(f"deepspeed: error: {err}", file=sys.stderr)
        code = 2
    if code:
        _abort(code)
    sys.exit(code)


def _pmi_descriptors(environ: Mapping[str, str]) -> list[int]:
    """The connection to Hydra, which a rank that uses MPI itself needs."""
    text = environ.get("PMI_FD", "")
    return [int(text)] if text.isdecimal() else []


def _abort(code: int) -> None:
    """Tell Hydra that the job has failed: it ignores the exit code of a process that did not initialise MPI."""
    for descriptor in _pmi_descriptors(os.environ):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"cmd=abort exitcode=%d\n" % code)


if __name__ == "__main__":
    main()
