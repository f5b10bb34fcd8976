# SPDX-License-Identifier: Apache-2.0
"""A process that has imported the package and forks ranks on request: each fault test gets processes of its own.

A fork has everything imported and nothing started, as a fresh interpreter would, for a hundredth of the time. The
zygote reads one JSON request per line from standard input and answers with one line; it ends with its test run.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank(request: dict[str, Any], rank: int, folder: Path) -> None:
    """One rank, from fork to exit."""
    _end_with_parent()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    import torch
    import torch.distributed as dist

    world = request["world"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), FAULT_FOLDER=str(folder))
    os.environ.update(request["env"])
    torch.manual_seed(1234)
    answer: dict[str, Any] = {}
    try:
        store = dist.FileStore(str(folder / "store"), world)
        timeout = datetime.timedelta(seconds=request["group_timeout"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()
        module, name = request["fn"].split(":")
        answer["value"] = getattr(importlib.import_module(module), name)(*request["args"])
    except BaseException as error:
        answer.update(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    code = 1 if "error" in answer else 0
    if request["whole"]:
        sys.exit(code)  # through the interpreter's own shutdown
    os._exit(code)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    folder, start = Path(request["folder"]), time.monotonic()
    pids: dict[int, int] = {}
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(request, rank, folder)
            except SystemExit:
                raise
            except BaseException:
                os._exit(99)
        pids[pid] = rank
    ended: dict[int, list[float]] = {}
    asked = False
    while len(ended) < len(pids):
        for pid, rank in pids.items():
            if rank not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[rank] = [os.waitstatus_to_exitcode(status), time.monotonic() - start]
        late = time.monotonic() - start - request["limit"]
        if late > 0:
            for pid, rank in pids.items():
                if rank not in ended:
                    os.kill(pid, signal.SIGKILL if late > 0.5 else signal.SIGUSR1)
            time.sleep(0.0 if asked else 0.4)
            asked = True
        time.sleep(0.005)
    return {"ended": [ended[rank] for rank in range(request["world"])]}


def _warm_up() -> None:
    """Import what a training step imports on first use; which modules these are, a fork finds out by a step."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        from tests.faults import scenarios
        from tests.harness import models

        scenarios.step(scenarios.build(models.blocks()), 0)
        os.write(send, "\n".join(sys.modules).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as names:
        for name in names.read().split("\n"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    os.waitpid(pid, 0)


def main() -> None:
    _end_with_parent()
    import torch

    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    _warm_up()
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_serve(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
