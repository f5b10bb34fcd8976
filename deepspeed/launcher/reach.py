# SPDX-License-Identifier: Apache-2.0
"""Asking other hosts by ssh: can they be reached, and which address has the first one?

What must hold: a failure names the host, the command and what it printed; no wait is without end.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from deepspeed.errors import LauncherError
from deepspeed.launcher.command import ssh_command

__all__ = ["SSH_OPTIONS", "address_of", "check_hosts"]

SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_AT_ONCE = 32
_LIMIT = 30.0


def check_hosts(hosts: Sequence[str], port: int | None) -> None:
    """Run `hostname` on every host.

    Raises:
        LauncherError: some host cannot be reached; names each of them and the reason.
    """
    failures = [
        failure
        for start in range(0, len(hosts), _AT_ONCE)
        for failure, _ in _ask(hosts[start : start + _AT_ONCE], "hostname", port)
        if failure
    ]
    if failures:
        raise LauncherError(
            "cannot reach every host by ssh without a password (--no_ssh_check skips this test):\n"
            + "\n".join(failures)
        )


def address_of(host: str, port: int | None) -> str:
    """The first address that `hostname -I` prints on the host.

    Raises:
        LauncherError: the host does not say; names the remedy.
    """
    ((failure, output),) = _ask([host], "hostname -I", port)
    words = output.split()
    if failure or not words:
        raise LauncherError(
            f"host {host!r} does not tell its address; give it with --master_addr\n{failure or '(it printed nothing)'}"
        )
    return words[0]


def _ask(hosts: Sequence[str], remote: str, port: int | None) -> list[tuple[str, str]]:
    """(failure or "", standard output) of a command on each host, in parallel."""
    commands = [ssh_command(host, remote, port=port, options=SSH_OPTIONS) for host in hosts]
    try:
        running = [
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            for argv in commands
        ]
    except OSError as err:
        raise LauncherError(f"cannot run ssh: {err.strerror}; install an ssh client") from err
    answers = []
    for host, argv, popen in zip(hosts, commands, running, strict=True):
        try:
            output, errors = popen.communicate(timeout=_LIMIT)
            reason = f"exit code {popen.returncode}" if popen.returncode else ""
        except subprocess.TimeoutExpired:
            popen.kill()
            output, errors = popen.communicate()
            reason = f"no answer within {_LIMIT:g} s"
        failure = f"  host {host}: {shlex.join(argv)}: {reason}: {errors.strip() or 'no message'}" if reason else ""
        answers.append((failure, output))
    return answers
