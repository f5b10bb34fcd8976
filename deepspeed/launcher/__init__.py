# SPDX-License-Identifier: Apache-2.0
"""Starting the ranks of a job, on one host or many, and ending all of them together.

    runner.py       the command line: which hosts, which slots, which backend
    hosts.py        pure: hostfile, --include, --exclude
    envfile.py      pure: .deepspeed_env and the variables that travel
    command.py      pure: every command that is run, and the only quoting
    constants.py    pure: names, defaults, the environment of ranks on the CPU
    slots.py        what accelerators this host has, free ports, local addresses
    cores.py        which cores each rank runs on
    multinode_runner.py   one class a backend: pdsh, ssh, Open MPI, MPICH, Intel MPI, MVAPICH, Slurm
    reach.py        asks other hosts by ssh before anything is started
    launch.py       runs on each host: environment, spawning, per-rank logs
    mpi_rank.py     between an MPI or Slurm launcher and a rank
    private_files.py      logs, pid files and claims of ports, safely created
    spawn.py        one child process that cannot outlive its parent
    guard.py        ends recorded sessions when the launcher itself was killed
    supervise.py    waits for children and signals; one grace period in total

What must hold: no module here imports torch, so that the command starts at once; nothing is ever run by a local shell;
and only processes that were started here are signalled.
"""
