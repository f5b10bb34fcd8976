# SPDX-License-Identifier: Apache-2.0
"""Runs on each host of a job: `python -m deepspeed.launcher.launch`, started by the runner.

What must hold: every rank gets the whole environment of rank discovery; a rank that fails ends the others, and its exit
code becomes ours; whatever ends this process, its ranks end (spawn.py, guard.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deepspeed.errors import LauncherError
from deepspeed.launcher import command, private_files
from deepspeed.launcher.constants import DEFAULT_PORT, cpu_environment, grace_period, setup_logging
from deepspeed.launcher.cores import cores_by_rank
from deepspeed.launcher.guard import MARK, Guard
from deepspeed.launcher.hosts import Slot, decode_world_info
from deepspeed.launcher.slots import cpu_only, device_count, port_is_free
from deepspeed.launcher.spawn import Child, spawn
from deepspeed.launcher.supervise import ORPHAN_GRACE, Inbox, heed_signals, supervise

__all__ = ["Node", "main", "parse_args", "rank_environments"]

logger = logging.getLogger("deepspeed.launcher")


@dataclass(frozen=True)
class Node:
    """This host's place in the job."""

    world: Mapping[str, Sequence[Slot]]
    index: int

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of this host."""
        return list(self.world.values())[self.index]

    @property
    def first_rank(self) -> int:
        """Global rank of this host's local rank 0."""
        return sum(len(slots) for slots in list(self.world.values())[: self.index])


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options that the runner writes."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", allow_abbrev=False)
    parser.add_argument("--world_info", required=True, help="slots by host, URL-safe base64 of JSON")
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=DEFAULT_PORT)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--node_rank", type=int, default=0, help="index of this host")
    place.add_argument("--node_host", help="name of this host in the world info")
    parser.add_argument("--module", action="store_true", help="run the script as 'python -m'")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("--control_stdin", action="store_true", help="end when standard input closes")
    parser.add_argument("--check_slots", action="store_true", help="the slots are device indices that must exist")
    parser.add_argument("--save_pid", type=int, help="id under which to record the pids of the ranks")
    parser.add_argument("--enable_each_rank_log", default="None", metavar="DIR")
    parser.add_argument("--bind_cores_to_rank", action="store_true")
    parser.add_argument("--bind_core_list")
    parser.add_argument("--elastic_training", action="store_true")
    parser.add_argument("--min_elastic_nodes", type=int, default=-1)
    parser.add_argument("--max_elastic_nodes", type=int, default=-1)
    parser.add_argument("--max_restarts", type=int, default=3)
    parser.add_argument("--log_level", default="info")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def rank_environments(
    node: Node, master_addr: str, master_port: int, environ: Mapping[str, str], *, on_cpu: bool
) -> list[dict[str, str]]:
    """The environment of each local rank: `environ` plus everything that rank discovery reads.

    `CUDA_VISIBLE_DEVICES` lists all of the host's slots in every rank, in slot order; the local rank is the index into
    it. On the CPU no GPU is visible, and `OMP_NUM_THREADS` shares the cores out unless it is set.
    """
    local_size = len(node.slots)
    base = dict(environ)
    base.update(
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
        WORLD_SIZE=str(sum(len(slots) for slots in node.world.values())),
        LOCAL_SIZE=str(local_size),
        LOCAL_WORLD_SIZE=str(local_size),
        CROSS_RANK=str(node.index),
        CROSS_SIZE=str(len(node.world)),
        NODE_RANK=str(node.index),
        GROUP_RANK=str(node.index),
    )
    if on_cpu:
        base.update(cpu_environment(environ, local_size))
    else:
        base["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.slots))
    return [{**base, "RANK": str(node.first_rank + local), "LOCAL_RANK": str(local)} for local in range(local_size)]


def main(args: Sequence[str] | None = None) -> None:
    """Start this host's ranks, wait for them, exit with the first failure's code."""
    heed_signals()
    options = parse_args(args)
    setup_logging(options.log_level, options.quiet)
    try:
        code = run(options)
    except LauncherError as err:
        logger.error("%s", err)
        code = 2
    sys.exit(code)


def run(options: argparse.Namespace) -> int:
    """Run the job's part on this host; returns the exit code.

    Raises:
        LauncherError: something is wrong before the first rank was started.
    """
    node = _locate(options)
    if node.index == 0 and not options.elastic_training and not port_is_free(options.master_port):
        raise LauncherError(
            f"port {options.master_port} of this host is taken: end the job that uses it, or choose another with "
            "--master_port"
        )
    on_cpu = cpu_only(os.environ)
    if options.check_slots and not on_cpu:
        _check_slots(node)
    envs = rank_environments(node, options.master_addr, options.master_port, os.environ, on_cpu=on_cpu)
    cores: Sequence[Sequence[int] | None] = [None] * len(envs)
    if options.bind_cores_to_rank:
        shares = cores_by_rank(len(envs), options.bind_core_list)
        for env, share in zip(envs, shares, strict=True):
            env.setdefault("KMP_AFFINITY", "granularity=fine,compact,1,0")
            env["OMP_NUM_THREADS"] = str(len(share))
        cores = shares
    _prepare_logs(options)
    grace = grace_period(os.environ)
    guard = Guard()
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(Inbox())
        stdin = None
        if options.control_stdin:
            stdin = stack.enter_context(open(os.devnull, "rb"))
            _obey(sys.stdin.buffer, inbox)
        children: list[Child] = []
        try:
            if options.elastic_training:
                children.append(_spawn_agent(options, node, envs[0] | {MARK: guard.mark}, stdin))
                guard.watch(children[0].pid)
            else:
                for env, mine in zip(envs, cores, strict=True):
                    children.append(_spawn_rank(options, env | {MARK: guard.mark}, mine, stdin))
                    guard.watch(children[-1].pid)
            if options.save_pid is not None:
                stack.enter_context(private_files.pid_file(options.save_pid, [child.pid for child in children]))
        except BaseException:
            for child in children:
                child.signal_all(signal.SIGKILL)
            raise
        # On another host the connection is our parent: its loss may be the runner's way to end the job in order.
        code = supervise(children, inbox, grace, orphan_grace=grace if options.control_stdin else ORPHAN_GRACE)
    guard.dismiss()
    return code


def _locate(options: argparse.Namespace) -> Node:
    world = decode_world_info(options.world_info)
    if options.node_host is not None:
        if options.node_host not in world:
            raise LauncherError(f"--node_host {options.node_host!r}: the hosts are {', '.join(world)}")
        return Node(world, list(world).index(options.node_host))
    if not 0 <= options.node_rank < len(world):
        raise LauncherError(f"--node_rank {options.node_rank}: the job has {len(world)} host(s), numbered from 0")
    return Node(world, options.node_rank)


def _check_slots(node: Node) -> None:
    count = device_count()
    missing = [slot for slot in node.slots if isinstance(slot, int) and slot >= count]
    if missing:
        host = list(node.world)[node.index]
        raise LauncherError(
            f"host {host!r} has no device {', '.join(map(str, missing))}: its devices are 0 to {count - 1}; correct "
            "the hostfile, or choose slots with --include"
        )


def _prepare_logs(options: argparse.Namespace) -> None:
    if options.enable_each_rank_log != "None":
        private_files.make_log_dir(Path(options.enable_each_rank_log))


def _spawn_rank(
    options: argparse.Namespace, env: Mapping[str, str], cpus: Sequence[int] | None, stdin: IO[bytes] | None
) -> Child:
    argv = command.script_command(
        sys.executable,
        options.training_script,
        options.training_script_args,
        module=options.module,
        no_python=options.no_python,
        local_rank=None if options.no_local_rank else int(env["LOCAL_RANK"]),
    )
    name = f"rank {env['RANK']}"
    if options.enable_each_rank_log == "None":
        return spawn(Child, name, argv, env, cpus=cpus, stdin=stdin)
    stamp = time.strftime("%Y%m%d%H%M%S")
    path = Path(options.enable_each_rank_log) / f"{stamp}_rank{env['RANK']}.log"
    with private_files.new_file(path) as log:
        return spawn(Child, name, argv, env, cpus=cpus, stdin=stdin, stdout=log, stderr=log)


def _spawn_agent(options: argparse.Namespace, node: Node, env: dict[str, str], stdin: IO[bytes] | None) -> Child:
    nodes = len(node.world)
    spec = command.LaunchSpec(
        world=node.world,
        master_addr=options.master_addr,
        master_port=options.master_port,
        script=options.training_script,
        script_args=options.training_script_args,
        module=options.module,
        no_python=options.no_python,
        python=sys.executable,
    )
    argv = command.torchrun_command(
        spec,
        ranks=len(node.slots),
        min_nodes=options.min_elastic_nodes if options.min_elastic_nodes > 0 else 1,
        max_nodes=options.max_elastic_nodes if options.max_elastic_nodes > 0 else nodes,
        max_restarts=options.max_restarts,
        job_id=f"deepspeed-{options.master_port}",
        is_host=node.index == 0,
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    # The agent ends its workers on SIGTERM; it must have the chance to when this process dies.
    return spawn(Child, "elastic agent", argv, env, stdin=stdin, death_signal=signal.SIGTERM)


def _obey(control: IO[bytes], inbox: Inbox) -> None:
    """Take orders from the runner through standard input: `signal N` lines, and its end as a loss of the runner."""
    descriptor = control.fileno()
    os.set_blocking(descriptor, False)
    pending = bytearray()

    def on_readable() -> bool:
        data = os.read(descriptor, 4096)
        if not data:
            logger.info("the connection to the runner is closed")
            inbox.post(signal.SIGTERM)
            return False
        pending.extend(data)
        *lines, rest = bytes(pending).split(b"\n")
        pending[:] = rest
        for line in lines:
            words = line.split()
            if len(words) == 2 and words[0] == b"signal" and words[1] in (b"1", b"2", b"15"):
                inbox.post(int(words[1]))
        return True

    inbox.watch(descriptor, on_readable)


if __name__ == "__main__":
    main()
