# SPDX-License-Identifier: Apache-2.0
"""Many hosts: one class a backend, each of which only writes commands; `run` starts and supervises them.

Two kinds. Under pdsh and ssh, each host runs `deepspeed.launcher.launch`, which ends its ranks when standard input
closes; a signal reaches it as a line of text (ssh) or as that closing (pdsh). Under MPI and Slurm, the backend starts
each rank itself, through `deepspeed.launcher.mpi_rank`.

What must hold: whatever ends the runner or any host's part, every other host hears of it; user text reaches another
host only quoted (`command.remote_command`) or as separate arguments; wherever the backend allows it, values of
variables stand in the environment, not on a command line.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed.errors import LauncherError
from deepspeed.launcher import command, constants, reach, runner
from deepspeed.launcher.envfile import EnvValue, literal, parse_env_file, resolve, travelling
from deepspeed.launcher.spawn import Child, spawn
from deepspeed.launcher.supervise import Inbox, supervise

__all__ = ["BACKENDS", "Backend", "Job", "collect_environment", "run"]

logger = logging.getLogger("deepspeed.launcher")


@dataclass(frozen=True)
class Job:
    """What a backend needs to know."""

    spec: command.LaunchSpec
    env: Mapping[str, EnvValue]
    """Variables that travel."""
    cwd: str
    launcher_args: Sequence[str] = ()
    ssh_port: int | None = None
    venv_script: str | None = None

    @property
    def hosts(self) -> list[str]:
        """Hosts in the order of their ranks."""
        return list(self.spec.world)

    def remote_text(self, node: str) -> str:
        """The shell text that starts a host's part; `node` is the option that says which host it is."""
        argv = command.launch_command(self.spec, [node, "--control_stdin"])
        return command.remote_command(argv, env=self.env, cwd=self.cwd, venv_script=self.venv_script)

    def rank_command(self) -> list[str]:
        """The command of a rank under a backend that starts ranks itself."""
        spec = self.spec
        inner = command.script_command(
            spec.python, spec.script, spec.script_args, module=spec.module, no_python=spec.no_python
        )
        return [spec.python, "-u", "-m", "deepspeed.launcher.mpi_rank", *inner]

    def rank_environment(self) -> dict[str, str]:
        """Variables that ranks need and that such a backend must hand over."""
        values = {name: resolve(value, os.environ) for name, value in self.env.items()}
        return {**values, "MASTER_ADDR": self.spec.master_addr, "MASTER_PORT": str(self.spec.master_port)}


class Backend(ABC):
    """A way to start processes on other hosts."""

    name: str
    program: str
    """What must be on PATH."""
    needs_ssh = True

    def available(self) -> bool:
        """Whether its program is installed here."""
        return shutil.which(self.program) is not None

    def check(self, options: argparse.Namespace, job: Job) -> None:
        """Refuse what the backend cannot do.

        Raises:
            LauncherError: names the option and the remedy.
        """
        if not self.available():
            raise LauncherError(
                f"--launcher {self.name}: there is no {self.program!r} on PATH: install it, or use another of "
                f"{', '.join(BACKENDS)}"
            )

    @abstractmethod
    def start(self, job: Job, inbox: Inbox) -> list[Child]:
        """Start the job; everything that is returned is supervised."""


# --- backends under which each host runs deepspeed.launcher.launch ---


class SshChild(Child):
    """An ssh connection whose far end takes signals as lines on standard input."""

    def signal(self, signum: int) -> None:
        if signum == signal.SIGKILL or self.popen.stdin is None:
            super().signal(signum)
            return
        with contextlib.suppress(OSError):  # the far end has gone: its exit code is on its way
            self.popen.stdin.write(b"signal %d\n" % signum)
            self.popen.stdin.flush()


class Ssh(Backend):
    """One ssh connection a host."""

    name = program = "ssh"

    def start(self, job: Job, inbox: Inbox) -> list[Child]:
        children: list[Child] = []
        options = [*reach.SSH_OPTIONS, *job.launcher_args]
        for rank, host in enumerate(job.hosts):
            argv = command.ssh_command(host, job.remote_text(f"--node_rank={rank}"), port=job.ssh_port, options=options)
            children.append(
                spawn(
                    SshChild,
                    f"host {host}",
                    argv,
                    os.environ,
                    stdin=subprocess.PIPE,
                    death_signal=signal.SIGTERM,
                )
            )
        return children


class PdshChild(Child):
    """pdsh, which forwards no input: ending it closes the input of every host's launcher, which then ends its ranks."""

    failed: int | None = None

    def exit_code(self) -> int | None:
        ended = super().exit_code()
        return ended if ended is None or self.failed is None else self.failed

    def signal(self, signum: int) -> None:
        super().signal(signal.SIGKILL if signum == signal.SIGKILL else signal.SIGTERM)

    def signal_all(self, signum: int) -> None:
        # The ssh processes that pdsh leaves behind end by themselves once their hosts have finished.
        if signum == signal.SIGKILL:
            super().signal_all(signum)


class Pdsh(Backend):
    """One pdsh for all hosts."""

    name = program = "pdsh"
    _EXITED = re.compile(rb"pdsh@[^:\n]*: ([^:\n]+): (?:ssh )?exited with exit code (\d+)")

    def start(self, job: Job, inbox: Inbox) -> list[Child]:
        text = job.remote_text("--node_rank=NODE_RANK_HERE").replace("%", "%%")
        text = text.replace("--node_rank=NODE_RANK_HERE", "--node_rank=%n", 1)
        argv = ["pdsh", "-S", "-f", "1024", *job.launcher_args, "-w", ",".join(job.hosts), text]
        port = [] if job.ssh_port is None else ["-p", str(job.ssh_port)]
        appended = [os.environ.get("PDSH_SSH_ARGS_APPEND", ""), *reach.SSH_OPTIONS, *port]
        env = {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": " ".join(appended).strip()}
        child = spawn(
            PdshChild,
            "pdsh",
            argv,
            env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            death_signal=signal.SIGTERM,
        )
        self._watch_for_failures(child, inbox)
        return [child]

    def _watch_for_failures(self, child: PdshChild, inbox: Inbox) -> None:
        """Pass standard error on, and end the job as soon as pdsh reports a host's failure; pdsh itself would wait."""
        assert child.popen.stderr is not None
        source = child.popen.stderr.fileno()
        os.set_blocking(source, False)
        line = bytearray()

        def on_readable() -> bool:
            try:
                data = os.read(source, 65536)
            except BlockingIOError:
                return True
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            line.extend(data)
            *complete, rest = bytes(line).split(b"\n")
            line[:] = rest[-65536:]
            for text in complete:
                match = self._EXITED.match(text)
                if match and child.failed is None:
                    child.failed = int(match[2])
                    logger.error("host %s failed with exit code %d", match[1].decode(errors="replace"), child.failed)
                    child.signal(signal.SIGTERM)
            return bool(data)

        inbox.watch(source, on_readable)


# --- backends that start the ranks themselves ---


class MpiChild(Child):
    """mpirun or srun: it forwards SIGINT and SIGTERM to its ranks, SIGHUP it would die of."""

    def signal(self, signum: int) -> None:
        super().signal(signal.SIGTERM if signum == signal.SIGHUP else signum)


class RankBackend(Backend):
    """Base of the backends that start the ranks themselves."""

    needs_equal_slots = False
    program = "mpirun"

    def check(self, options: argparse.Namespace, job: Job) -> None:
        super().check(options, job)
        sizes = {len(slots) for slots in job.spec.world.values()}
        if self.needs_equal_slots and len(sizes) > 1:
            raise LauncherError(
                f"--launcher {self.name} needs the same number of slots on every host, the hostfile has "
                f"{sorted(sizes)}: correct it, or use --launcher pdsh or ssh"
            )
        for flag, given in self._not_for_ranks(options).items():
            if given:
                raise LauncherError(
                    f"--launcher {self.name} starts the ranks itself and does not know {flag}: leave it out (the "
                    "hostfile chooses the slots, --launcher_args passes the backend's own options), or use --launcher "
                    "pdsh or ssh"
                )

    @staticmethod
    def _not_for_ranks(options: argparse.Namespace) -> dict[str, bool]:
        return {
            "--include": bool(options.include),
            "--exclude": bool(options.exclude),
            "--num_nodes": options.num_nodes != -1,
            "--num_gpus": options.num_gpus != -1,
            "--elastic_training": options.elastic_training,
            "--bind_cores_to_rank": options.bind_cores_to_rank,
            "--enable_each_rank_log": options.enable_each_rank_log != "None",
            "--save_pid": options.save_pid,
            "--venv_script": options.venv_script is not None,
        }

    def environment(self, job: Job) -> dict[str, str]:
        """Further variables of the backend's own process."""
        return {}

    @abstractmethod
    def command(self, job: Job, names: Sequence[str]) -> list[str]:
        """The command line; `names` are the variables to hand over, which stand in its environment."""

    def start(self, job: Job, inbox: Inbox) -> list[Child]:
        values = job.rank_environment()
        env = {**os.environ, **values, **self.environment(job)}
        argv = self.command(job, sorted(values))
        return [spawn(MpiChild, self.program, argv, env, stdin=subprocess.DEVNULL, death_signal=signal.SIGTERM)]


class OpenMpi(RankBackend):
    """Open MPI's mpirun."""

    name = "openmpi"

    def command(self, job: Job, names: Sequence[str]) -> list[str]:
        places = ",".join(f"{host}:{len(slots)}" for host, slots in job.spec.world.items())
        # By default Open MPI gives each rank one core, which would hold back every thread of a rank.
        binding = [] if any("bind-to" in word for word in job.launcher_args) else ["--bind-to", "none"]
        port = [] if job.ssh_port is None else ["--mca", "plm_rsh_args", f"-p {job.ssh_port}"]
        exports = [word for name in names for word in ("-x", name)]
        head = ["mpirun", "-n", str(job.spec.world_size), "--host", places, "--map-by", "slot", "-wdir", job.cwd]
        return [*head, *binding, *port, *job.launcher_args, *exports, *job.rank_command()]


class Mpich(RankBackend):
    """MPICH's Hydra."""

    name = "mpich"

    def environment(self, job: Job) -> dict[str, str]:
        return {} if job.ssh_port is None else {"HYDRA_LAUNCHER_EXTRA_ARGS": f"-p {job.ssh_port}"}

    def command(self, job: Job, names: Sequence[str]) -> list[str]:
        places = ",".join(f"{host}:{len(slots)}" for host, slots in job.spec.world.items())
        head = ["mpirun", "-n", str(job.spec.world_size), "-hosts", places, "-wdir", job.cwd]
        return [*head, *job.launcher_args, "-genvlist", ",".join(names), *job.rank_command()]


class IntelMpi(Mpich):
    """Intel MPI: Hydra with one block of arguments a rank."""

    name = "impi"
    needs_equal_slots = True

    def command(self, job: Job, names: Sequence[str]) -> list[str]:
        per_host = job.spec.world_size // len(job.hosts)
        argv = ["mpirun", "-ppn", str(per_host), "-hosts", ",".join(job.hosts), "-wdir", job.cwd, *job.launcher_args]
        argv += ["-genvlist", ",".join(names)]
        for rank in range(job.spec.world_size):
            argv += [":"] if rank else []
            argv += ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(rank % per_host)]
            argv += job.rank_command()
        return argv


class Mvapich(Mpich):
    """MVAPICH, whose mpirun is Hydra too."""

    name = "mvapich"


class Slurm(RankBackend):
    """srun."""

    name = "slurm"
    program = "srun"
    needs_ssh = False
    needs_equal_slots = True

    def command(self, job: Job, names: Sequence[str]) -> list[str]:
        hosts = job.hosts
        head = ["srun", f"--ntasks={job.spec.world_size}", f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}"]
        head += [f"--ntasks-per-node={job.spec.world_size // len(hosts)}", f"--chdir={job.cwd}"]
        head += ["--export=ALL", "--kill-on-bad-exit=1"]
        return [*head, *job.launcher_args, *job.rank_command()]


BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Pdsh(), Ssh(), OpenMpi(), Mpich(), IntelMpi(), Slurm(), Mvapich())
}


def collect_environment(environ: Mapping[str, str], folders: Sequence[Path], cwd: str) -> dict[str, EnvValue]:
    """The variables that travel: by prefix, `PYTHONPATH` with the working directory first, then the lines of
    `.deepspeed_env` in each of `folders`, of which a later one wins.

    Raises:
        EnvFileError: a malformed line; names the file and the line.
    """
    prefixes = [*constants.EXPORT_ENVS, *constants.ALSO_EXPORT]
    values = travelling(environ, prefixes)
    python_path = environ.get("PYTHONPATH")
    values["PYTHONPATH"] = literal(f"{cwd}:{python_path}" if python_path else cwd)
    for folder in folders:
        path = folder / constants.DEEPSPEED_ENVIRONMENT_NAME
        if path.is_file():
            with path.open(encoding="utf-8", errors="surrogateescape") as file:
                values.update(parse_env_file(file, str(path)))
    return values


def choose_backend(options: argparse.Namespace) -> Backend:
    """The backend that was asked for; where none was, pdsh, or ssh if pdsh is not installed."""
    if options.launcher:
        return BACKENDS[options.launcher.lower()]
    if BACKENDS["pdsh"].available():
        return BACKENDS["pdsh"]
    logger.info("pdsh is not installed: using ssh")
    return BACKENDS["ssh"]


def run(options: argparse.Namespace, world: runner.World, grace: float) -> int:
    """Start the job on many hosts and wait for it; returns the exit code.

    Raises:
        LauncherError: something is wrong before anything was started.
    """
    backend = choose_backend(options)
    cwd = os.getcwd()
    port = options.master_port or constants.DEFAULT_PORT
    spec = runner.job_spec(options, world, options.master_addr, port, check_slots=True)
    env = collect_environment(os.environ, [Path.home(), Path(".")], cwd)
    launcher_args = command.split_launcher_args(options.launcher_args)
    job = Job(spec, env, cwd, launcher_args, options.ssh_port, options.venv_script)
    backend.check(options, job)
    if backend.needs_ssh and not options.no_ssh_check:
        reach.check_hosts(job.hosts, options.ssh_port)
    if not options.master_addr:
        first = job.hosts[0]
        address = reach.address_of(first, options.ssh_port) if backend.needs_ssh else first
        job = replace(job, spec=replace(spec, master_addr=address))
    logger.info(
        "starting %d ranks on %d host(s) with %s; rank 0 at %s:%d; exported variables: %s",
        spec.world_size,
        len(world),
        backend.name,
        job.spec.master_addr,
        port,
        ", ".join(env),
    )
    with Inbox() as inbox:
        children = backend.start(job, inbox)
        return supervise(children, inbox, grace, relay=True)
