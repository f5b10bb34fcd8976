# SPDX-License-Identifier: Apache-2.0
"""A taken port is a clear error before anything starts, or, where none was asked for, another port (L7)."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed.launcher.constants import DEFAULT_PORT
from deepspeed.launcher.slots import free_port, port_is_free
from tests.harness.skips import needs
from tests.launcher import jobs

StartJob = Callable[..., jobs.Job]


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[Callable[[int], int]]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:

        def listen(port: int) -> int:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deadline = time.monotonic() + 20
            while True:
                try:
                    sock.bind((request.param, port))
                    sock.listen(1)
                    return int(sock.getsockname()[1])
                except OSError as err:  # somebody else's job listens there, or there is no such address
                    if err.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                        pytest.skip(needs(f"to listen on {request.param} port {port}: {err}", "end what uses the port"))
                    time.sleep(0.1)

        yield listen


def test_a_taken_port_is_seen_on_any_address(listener: Callable[[int], int]) -> None:
    port = listener(0)
    assert not port_is_free(port)
    assert port_is_free(free_port())


def test_an_explicit_port_that_is_taken_is_an_error(job: StartJob, listener: Callable[[int], int]) -> None:
    port = listener(0)
    run = job("--num_gpus", "1", "--master_port", str(port))
    code, text = run.wait()
    assert code == 2
    assert f"port {port} of this host is taken" in text
    assert "--master_port" in text
    assert not list(run.out.iterdir())


def test_the_default_port_gives_way(job: StartJob, listener: Callable[[int], int]) -> None:
    listener(DEFAULT_PORT)
    run = job("--num_gpus", "1")
    assert run.wait()[0] == 0
    port = json.loads((run.out / "facts0").read_text())["env"]["MASTER_PORT"]
    assert int(port) != DEFAULT_PORT


def test_two_jobs_that_start_together_meet_at_different_ports(job: StartJob, tmp_path: Path) -> None:
    """Neither rank 0 listens yet, so the port itself does not tell."""
    ports = []
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.append(job("--num_gpus", "1", worker=("sleep",), folder=tmp_path / name))
        runs[-1].pids(1)
        ports.append(json.loads((runs[-1].out / "facts0").read_text())["env"]["MASTER_PORT"])
    assert ports[0] != ports[1]
    code, text = job("--num_gpus", "1", "--master_port", ports[0], folder=tmp_path).wait()
    if ports[0] == str(DEFAULT_PORT):  # else somebody listens on the default port, and a free one was not claimed
        assert code == 2 and f"port {ports[0]} of this host is taken" in text
    for run in runs:
        run.popen.terminate()
        assert run.wait()[0] == 143


def test_the_launcher_of_the_first_host_checks_too(job: StartJob, listener: Callable[[int], int]) -> None:
    """What another host's runner chose may be taken here."""
    port = listener(0)
    run = job("--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(port))
    code, text = run.wait()
    assert code == 2
    assert f"port {port} of this host is taken" in text
    assert not list(run.out.iterdir())
