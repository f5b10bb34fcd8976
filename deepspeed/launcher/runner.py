# SPDX-License-Identifier: Apache-2.0
"""The `deepspeed` command: chooses hosts and slots, then starts the job on this host or through a backend.

What must hold: everything is checked before anything is started; an option that is not built is an error that names the
remedy; the exit code is that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import LauncherError
from deepspeed.launcher.command import LaunchSpec, launch_command
from deepspeed.launcher.constants import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEFAULT_PORT,
    DLTS_HOSTFILE,
    EXPORT_ENVS,
    grace_period,
    setup_logging,
)
from deepspeed.launcher.hosts import (
    HostListError,
    Slot,
    first_hosts,
    first_slots,
    parse_hostfile,
    parse_inclusion_exclusion,
)
from deepspeed.launcher.private_files import claim_port
from deepspeed.launcher.slots import cpu_only, device_count, free_port, is_local, port_is_free, visible_devices
from deepspeed.launcher.spawn import Child, spawn
from deepspeed.launcher.supervise import Inbox, heed_signals, supervise

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
]

logger = logging.getLogger("deepspeed.launcher")

LAUNCHERS = ("pdsh", "ssh", "openmpi", "mpich", "impi", "slurm", "mvapich")

World = dict[str, list[Slot]]


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. What follows the script is passed through untouched."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a training script on every accelerator of one host or of many, and end all of it together.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    hosts = parser.add_argument_group("hosts and slots")
    hosts.add_argument("-H", "--hostfile", default=None, metavar="PATH", help=f"'HOST slots=N' lines ({DLTS_HOSTFILE})")
    hosts.add_argument("-i", "--include", default="", metavar="HOST:SLOT,SLOT@HOST", help="use only these")
    hosts.add_argument("-e", "--exclude", default="", metavar="HOST:SLOT,SLOT@HOST", help="leave these out")
    hosts.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="the first N hosts of the hostfile")
    hosts.add_argument(
        "--num_gpus", "--num_accelerators", dest="num_gpus", type=int, default=-1, metavar="N",
        help="the first N slots of each host; without a GPU, N ranks on the CPU",
    )  # fmt: skip
    hosts.add_argument("--force_multi", action="store_true", help="use the backend for many hosts even for one")
    meet = parser.add_argument_group("rendezvous")
    meet.add_argument(
        "--master_port", type=int, default=None, metavar="P",
        help=f"port of rank 0 ({DEFAULT_PORT}, or on one host a free one if that is taken)",
    )  # fmt: skip
    meet.add_argument("--master_addr", default="", metavar="A", help="address of rank 0 (found by ssh if not given)")
    backend = parser.add_argument_group("many hosts")
    backend.add_argument("--launcher", default="", metavar="NAME", help=f"backend: {', '.join(LAUNCHERS)} (pdsh)")
    backend.add_argument("--launcher_args", default="", metavar="ARGS", help="further arguments of the backend")
    backend.add_argument("--no_ssh", action="store_true", help="every host runs this command itself")
    backend.add_argument("--node_rank", type=int, default=-1, metavar="R", help="this host's index, with --no_ssh")
    backend.add_argument("--no_ssh_check", action="store_true", help="do not try whether the hosts can be reached")
    backend.add_argument("--ssh_port", type=int, default=None, metavar="P", help="port of the ssh servers")
    backend.add_argument("--venv_script", default=None, metavar="PATH", help="sourced on each host before the start")
    run = parser.add_argument_group("ranks")
    run.add_argument("--module", action="store_true", help="run the script as 'python -m'")
    run.add_argument("--no_python", action="store_true", help="execute the script directly")
    run.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    run.add_argument("--enable_each_rank_log", default="None", metavar="DIR", help="one log file a rank")
    run.add_argument("--save_pid", action="store_true", help="record the pids of the ranks while they run")
    run.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank cores of its own")
    run.add_argument("--bind_core_list", default=None, metavar="LIST", help="cores to share out, such as 0-3,8")
    run.add_argument("--elastic_training", action="store_true", help="restart failed ranks through torchrun's agent")
    run.add_argument("--min_elastic_nodes", type=int, default=-1, metavar="N", help="hosts needed to go on")
    run.add_argument("--max_elastic_nodes", type=int, default=-1, metavar="N", help="hosts that may take part")
    run.add_argument("--max_restarts", type=int, default=3, metavar="N", help="restarts before the job fails")
    run.add_argument("--autotuning", default="", choices=["tune", "run", ""], help="not built")
    add("--log_level", default="info", metavar="LEVEL", help="debug, info, warning, error or critical")
    add("-q", "--quiet", action="store_true", help="only errors")
    add("user_script", help="script, module (--module) or program (--no_python)")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> dict[str, int] | None:
    """Slots by host of a hostfile; `None`, with a warning, where there is no such file.

    Raises:
        HostListError: (a `ValueError`) the file cannot be read as a hostfile; names the line.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("no hostfile %s: using this machine only", path)
        return None
    try:
        # newline="": a carriage return is an error of the file, not a line end
        with path.open(encoding="utf-8", newline="") as file:
            return parse_hostfile(file, str(path))
    except UnicodeDecodeError as err:
        raise HostListError(f"{path}: not a UTF-8 text file: {err.reason} at byte {err.start}") from None


def main(args: Sequence[str] | None = None) -> None:
    """Run the command. Ends the process with the job's exit code.

    Raises:
        LauncherError: something is wrong before anything was started; only if `args` is given. As a command it prints
            the message and exits with code 2.
    """
    heed_signals()
    options = parse_args(args)
    try:
        setup_logging(options.log_level, options.quiet)
        code = run(options)
    except KeyboardInterrupt:  # while hosts are asked; afterwards signals are recorded, not raised
        code = 128 + signal.SIGINT
    except LauncherError as err:
        if args is not None:
            raise
        print(f"deepspeed: error: {err}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(options: argparse.Namespace) -> int:
    """Check the options, start the job, wait for it; returns the exit code.

    Raises:
        LauncherError: see `main`.
    """
    _refuse_contradictions(options)
    world, from_hostfile = _choose_world(options)
    grace = grace_period(os.environ)
    if _is_multi_node(options, world, from_hostfile):
        from deepspeed.launcher import multinode_runner

        return multinode_runner.run(options, world, grace)
    return _run_here(options, world, grace, check_slots=from_hostfile)


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if options.autotuning:
        raise LauncherError(
            "--autotuning is not built: leave it out, and set train_micro_batch_size_per_gpu and the stage3_* sizes of "
            "the configuration by hand"
        )
    if options.launcher and options.launcher.lower() not in LAUNCHERS:
        raise LauncherError(f"--launcher {options.launcher!r} is unknown: use one of {', '.join(LAUNCHERS)}")
    if options.module and options.no_python:
        raise HostListError("--module and --no_python exclude each other: give one of them")
    if options.num_gpus != -1 and (options.include or options.exclude):
        raise HostListError("--num_gpus and --include/--exclude exclude each other: name the slots in one way")
    if options.num_nodes != -1 and (options.include or options.exclude):
        raise HostListError("--num_nodes and --include/--exclude exclude each other: name the hosts in one way")
    if options.no_ssh and (options.node_rank < 0 or not options.master_addr):
        raise HostListError("--no_ssh needs --node_rank (from 0) and --master_addr: no host can ask another for them")
    if options.node_rank >= 0 and not options.no_ssh:
        raise HostListError("--node_rank is only for --no_ssh: otherwise the backend numbers the hosts")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise HostListError(f"--master_port {options.master_port}: use a port from 1 to 65535")
    if options.bind_core_list and not options.bind_cores_to_rank:
        raise LauncherError("--bind_core_list needs --bind_cores_to_rank")
    elastic = (options.min_elastic_nodes, options.max_elastic_nodes)
    if not options.elastic_training and elastic != (-1, -1):
        raise LauncherError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training")


def _choose_world(options: argparse.Namespace) -> tuple[World, bool]:
    """Slots by host after all filters, and whether the hosts come from a hostfile."""
    path = DLTS_HOSTFILE if options.hostfile is None else options.hostfile
    pool = fetch_hostfile(path) if options.hostfile is not None or os.path.isfile(path) else None
    if pool is None:
        if options.num_nodes > 1:
            raise HostListError(f"--num_nodes {options.num_nodes}: no hostfile {path}; name one with --hostfile")
        return _local_world(options), False
    world = parse_inclusion_exclusion(pool, options.include, options.exclude)
    if options.num_nodes != -1:
        world = first_hosts(world, options.num_nodes)
    if options.num_gpus != -1:
        world = first_slots(world, options.num_gpus)
    return world, True


def _local_world(options: argparse.Namespace) -> World:
    host = "localhost"
    if cpu_only(os.environ):
        return {host: _cpu_slots(options)}
    found = device_count()
    visible = visible_devices(os.environ)
    if options.include or options.exclude:
        # An explicit choice goes by the ids of real devices; what the environment hides may be named as well.
        known: list[Slot] = list(range(found))
        known += [slot for slot in visible or [] if slot not in known]
        return parse_inclusion_exclusion({host: known}, options.include, options.exclude)
    slots: list[Slot] = list(range(found)) if visible is None else visible
    if not slots:
        kind = os.environ.get("DS_ACCELERATOR")
        raise LauncherError(
            f"DS_ACCELERATOR={kind!r}, but no GPU is visible: unset it; `ds_report` shows what is found"
        )
    return {host: slots} if options.num_gpus == -1 else first_slots({host: slots}, options.num_gpus)


def _cpu_slots(options: argparse.Namespace) -> list[Slot]:
    """Without a GPU the number of ranks is the user's to choose."""
    if options.include:
        host, _, text = options.include.partition(":")
        count = 1 + max((int(slot) for slot in text.split(",") if slot.isdecimal()), default=0)
        return parse_inclusion_exclusion({"localhost": count}, options.include, "")["localhost"]
    if options.num_gpus > 0:
        logger.info("no GPU: running %d rank(s) on the CPU", options.num_gpus)
        return list(range(options.num_gpus))
    if options.num_gpus == -1 and os.environ.get("DS_ACCELERATOR") == "cpu" and not options.exclude:
        return [0]
    raise LauncherError(
        "no GPU is visible: give --num_gpus N to run N ranks on the CPU; `ds_report` shows what is found"
    )


def _is_multi_node(options: argparse.Namespace, world: World, from_hostfile: bool) -> bool:
    """Whether a backend is needed to start processes elsewhere."""
    if options.no_ssh:
        return False
    return options.force_multi or len(world) > 1 or (from_hostfile and not is_local(next(iter(world))))


def _run_here(options: argparse.Namespace, world: World, grace: float, *, check_slots: bool) -> int:
    if not options.module and not options.no_python and not os.path.exists(options.user_script):
        raise LauncherError(f"no script {options.user_script!r} in {os.getcwd()}: check the path, or use --module")
    with contextlib.ExitStack() as stack:
        if options.no_ssh:  # the other hosts run the same command: nothing may be chosen that they could not know
            node_rank, port = options.node_rank, options.master_port or DEFAULT_PORT
        else:
            node_rank, port = 0, _pick_port(options, stack)
        spec = job_spec(options, world, options.master_addr or "127.0.0.1", port, check_slots=check_slots)
        inbox = stack.enter_context(Inbox())
        argv = launch_command(spec, [f"--node_rank={node_rank}"])
        child = spawn(Child, "the launcher of this host", argv, local_environment(), death_signal=signal.SIGTERM)
        return supervise([child], inbox, grace, relay=True)


def _pick_port(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """The port of rank 0, claimed until `stack` closes."""
    wanted = options.master_port or DEFAULT_PORT
    if port_is_free(wanted) and stack.enter_context(claim_port(wanted)):
        return int(wanted)
    if options.master_port is None:
        return free_port()
    raise LauncherError(
        f"port {wanted} of this host is taken: end the job that uses it, give another --master_port, or leave the "
        "option out and a free port is chosen"
    )


def job_spec(
    options: argparse.Namespace, world: World, master_addr: str, master_port: int, *, check_slots: bool
) -> LaunchSpec:
    """The job in the form that `command` takes; `check_slots` where a file, not a device list, gave the slots."""
    flags = [f"--log_level={options.log_level}"]
    if check_slots:
        flags.append("--check_slots")
    if options.quiet:
        flags.append("--quiet")
    if options.save_pid:
        flags.append(f"--save_pid={os.getpid()}")
    if options.enable_each_rank_log != "None":
        flags.append(f"--enable_each_rank_log={os.path.abspath(options.enable_each_rank_log)}")
    if options.bind_cores_to_rank:
        flags.append("--bind_cores_to_rank")
    if options.bind_core_list:
        flags.append(f"--bind_core_list={options.bind_core_list}")
    if options.elastic_training:
        flags += [
            "--elastic_training",
            f"--min_elastic_nodes={options.min_elastic_nodes}",
            f"--max_elastic_nodes={options.max_elastic_nodes}",
            f"--max_restarts={options.max_restarts}",
        ]
    return LaunchSpec(
        world=world,
        master_addr=master_addr,
        master_port=master_port,
        script=options.user_script,
        script_args=options.user_args,
        module=options.module,
        no_python=options.no_python,
        no_local_rank=options.no_local_rank,
        options=flags,
        python=sys.executable,
    )


def local_environment() -> dict[str, str]:
    """Our environment for a launcher on this host: the choice of devices is in the world info, not in a variable."""
    env = dict(os.environ)
    if not cpu_only(env):
        with contextlib.suppress(KeyError):
            del env["CUDA_VISIBLE_DEVICES"]
    return env


if __name__ == "__main__":
    main()
