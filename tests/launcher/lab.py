# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: a network namespace each, joined by a bridge, with a real sshd in each.

They share the file system and the table of processes, which is what lets a test see what is left of a job. Everything
is made and removed by the test session itself, and nothing is reachable from outside the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.skips import MULTIHOST_TOOLS, needs
from tests.launcher import jobs

SSHD = "/usr/sbin/sshd"
PORT = 2222


@dataclass
class Lab:
    """The hosts, by address. Jobs are started on the first one."""

    name: str
    folder: Path
    hosts: list[str]

    def prefix(self, host: int = 0) -> list[str]:
        """What makes a command run on a host."""
        return ["ip", "netns", "exec", f"{self.name}-{host}"]

    def interface(self, host: int) -> str:
        """Name of a host's network interface; the same on every host."""
        return "lab0"

    def path(self, *first: Path) -> str:
        """A PATH on which `ssh` uses this lab's key and port."""
        return ":".join(map(str, [*first, self.folder / "bin", os.environ["PATH"], "/usr/sbin"]))

    def hostfile(self, folder: Path, slots: Sequence[int]) -> Path:
        """Write a hostfile with one entry of `slots` a host."""
        path = folder / "hosts"
        path.write_text("".join(f"{host} slots={n}\n" for host, n in zip(self.hosts, slots, strict=False)))
        return path


def missing() -> str:
    """Why there can be no lab here; empty if there can."""
    if os.geteuid() != 0:
        return needs("network namespaces, which only root can make", "make test as root")
    lacking = [name for name in ("ip", "ssh", "ssh-keygen", SSHD) if shutil.which(name) is None]
    if lacking:
        return needs(", ".join(lacking), MULTIHOST_TOOLS)
    probe = f"dsprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return needs(f"a network namespace: {made.stderr.strip()}", "a container with CAP_SYS_ADMIN")
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[Lab]:
    """Make `count` hosts, and remove them afterwards."""
    lab = Lab(f"ds{os.getpid()}", folder, [f"10.231.7.{index + 1}" for index in range(count)])
    try:
        _wire(lab)
        _serve(lab)
        yield lab
    finally:
        for path in folder.glob("sshd*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
        for space in [f"{lab.name}-{index}" for index in range(count)] + [f"{lab.name}-sw"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _wire(lab: Lab) -> None:
    switch = f"{lab.name}-sw"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "br0", "up")
    for index, address in enumerate(lab.hosts):
        space = f"{lab.name}-{index}"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run(
            *("ip", "-n", space, "link", "add", "lab0", "type", "veth"),
            *("peer", "name", f"port{index}", "netns", switch),
        )
        _run("ip", "-n", switch, "link", "set", f"port{index}", "master", "br0", "up")
        _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "lab0")
        _run("ip", "-n", space, "link", "set", "lab0", "up")


def _serve(lab: Lab) -> None:
    folder = lab.folder
    for key in ("hostkey", "userkey"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "authorized").write_text((folder / "userkey.pub").read_text())
    Path("/run/sshd").mkdir(exist_ok=True)
    for index, address in enumerate(lab.hosts):
        config = folder / f"sshd{index}.conf"
        config.write_text(
            f"Port {PORT}\nListenAddress {address}\nHostKey {folder}/hostkey\nAuthorizedKeysFile {folder}/authorized\n"
            f"PidFile {folder}/sshd{index}.pid\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nMaxStartups 100\n"
        )
        _run(*lab.prefix(index), SSHD, "-f", str(config), "-E", str(folder / f"sshd{index}.log"))
        jobs.wait_until((folder / f"sshd{index}.pid").exists, 10, "sshd did not start")
    (folder / "ssh_config").write_text(
        f"Host *\n IdentityFile {folder}/userkey\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"
        " LogLevel ERROR\n"
    )
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
