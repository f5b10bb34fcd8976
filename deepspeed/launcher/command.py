# SPDX-License-Identifier: Apache-2.0
"""Pure: every command that the launcher runs, as a list of arguments, and the only place that quotes for a shell.

What must hold: text of the user (arguments, paths, values) is either one element of an argument list or quoted by
`remote_command`; a shell on another host gets it back byte for byte.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.errors import LauncherError
from deepspeed.launcher.envfile import EnvValue, Reference
from deepspeed.launcher.hosts import Slot, check_host, encode_world_info

__all__ = [
    "LaunchSpec",
    "launch_command",
    "remote_command",
    "script_command",
    "split_launcher_args",
    "ssh_command",
    "torchrun_command",
]


@dataclass(frozen=True)
class LaunchSpec:
    """What one job runs, and where; enough to write the command of any of its hosts."""

    world: Mapping[str, Sequence[Slot]]
    """Slots by host, in the order of the ranks."""
    master_addr: str
    master_port: int
    script: str
    script_args: Sequence[str] = ()
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    options: Sequence[str] = field(default=())
    """Further options of `deepspeed.launcher.launch`, such as `--quiet`."""
    python: str = "python3"

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(len(slots) for slots in self.world.values())


def launch_command(spec: LaunchSpec, node: Sequence[str]) -> list[str]:
    """The command that runs on one host; `node` is the option that says which, such as `["--node_rank=0"]`."""
    flags = {"--module": spec.module, "--no_python": spec.no_python, "--no_local_rank": spec.no_local_rank}
    return [
        spec.python,
        "-u",
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={encode_world_info(spec.world)}",
        f"--master_addr={spec.master_addr}",
        f"--master_port={spec.master_port}",
        *node,
        *(flag for flag, given in flags.items() if given),
        *spec.options,
        spec.script,
        *spec.script_args,
    ]


def script_command(
    python: str, script: str, args: Sequence[str], *, module: bool, no_python: bool, local_rank: int | None = None
) -> list[str]:
    """The command of one rank; `--local_rank=N` comes first among its arguments where `local_rank` is given."""
    prefix = [] if no_python else [python, "-u", *(["-m"] if module else [])]
    return [*prefix, script, *([] if local_rank is None else [f"--local_rank={local_rank}"]), *args]


def torchrun_command(
    spec: LaunchSpec, *, ranks: int, min_nodes: int, max_nodes: int, max_restarts: int, job_id: str, is_host: bool
) -> list[str]:
    """The elastic agent of one host: torch's own, which starts the ranks and restarts them.

    `is_host`: this host holds the rendezvous. The agent would guess it from host names, which fails where an address
    and a host's own name do not match.
    """
    return [
        spec.python,
        "-u",
        "-m",
        "torch.distributed.run",
        f"--nnodes={min_nodes}:{max_nodes}",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={spec.master_addr}:{spec.master_port}",
        f"--rdzv-id={job_id}",
        f"--rdzv-conf=is_host={'true' if is_host else 'false'}",
        *(["--no-python"] if spec.no_python else []),
        *(["--module"] if spec.module else []),
        spec.script,
        *spec.script_args,
    ]


def remote_command(
    argv: Sequence[str], *, env: Mapping[str, EnvValue], cwd: str, venv_script: str | None = None
) -> str:
    """The text that a POSIX shell on another host runs: environment, working directory, then `argv` in its place."""
    steps = [f". {_quote_path(venv_script)}"] if venv_script else []
    steps += [f"export {name}={_quote_value(value)}" for name, value in env.items()]
    steps += [f"cd -- {_quote_path(cwd)}", f"exec {_quote_all(argv)}"]
    return " && ".join(steps)


def ssh_command(host: str, command: str, *, port: int | None = None, options: Sequence[str] = ()) -> list[str]:
    """Run the shell text `command` on `host`; the host is validated and cannot be taken for an option."""
    return ["ssh", *options, *([] if port is None else ["-p", str(port)]), "--", check_host(host), command]


def split_launcher_args(text: str) -> list[str]:
    """`--launcher_args` as separate arguments, by the quoting rules of a POSIX shell but without one.

    Raises:
        LauncherError: an unclosed quote.
    """
    try:
        return shlex.split(text)
    except ValueError as err:
        raise LauncherError(f"--launcher_args {text!r}: {err}") from None


def _quote_all(argv: Sequence[str]) -> str:
    return " ".join(_quote(item) for item in argv)


def _quote(text: str) -> str:
    if "\0" in text:
        raise LauncherError("an argument holds a NUL character, which no command can carry")
    return shlex.quote(text)


def _quote_path(path: str) -> str:
    """A path that neither `.` nor `cd` can take for an option or look up elsewhere (`PATH`, `CDPATH`, `-`)."""
    return _quote(path if path.startswith("/") else f"./{path}")


def _quote_value(value: EnvValue) -> str:
    return "".join(f'"${{{piece.name}}}"' if isinstance(piece, Reference) else _quote(piece) for piece in value)
