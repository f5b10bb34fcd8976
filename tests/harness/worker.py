# SPDX-License-Identifier: Apache-2.0
"""The process behind one rank: imports torch once, then serves jobs until its pipe closes.

What must hold: a job leaves nothing behind (environment, process groups, default dtype, seeds, working directory), and
the process ends when the test run ends, even while its main thread is stuck: a second thread owns the pipe.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import os
import queue
import random
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from tests.harness.wire import READY, Job, Reply, dump, load_job

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the test run dies (Linux; elsewhere the pipe thread does it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_jobs(conn: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            jobs.put(conn.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _set_up(job: Job) -> None:
    import torch

    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(job.rank),
        LOCAL_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    os.environ.update(job.env)
    random.seed(1234)
    torch.manual_seed(1234)
    if job.init_group:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(job.store, job.world_size),
            rank=job.rank,
            world_size=job.world_size,
            timeout=datetime.timedelta(seconds=job.group_timeout),
        )
        # a rank whose job ends at once would hang up while the others still connect to it
        torch.distributed.barrier()


def _tear_down() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    gc.collect()


def _failure(exc: BaseException) -> Reply:
    return Reply(error_type=type(exc).__name__, error_text=str(exc), traceback=traceback.format_exc())


def serve_one(frame: bytes) -> Reply:
    """Run one job; never raises: every exception, also one while the job is decoded, becomes a Reply."""
    saved_env, saved_dir = dict(os.environ), os.getcwd()
    try:
        job = load_job(frame)
        _set_up(job)
        reply = Reply(value=job.fn(*job.args))
        _tear_down()
    except BaseException as exc:
        reply = _failure(exc)
    finally:
        os.environ.clear()
        os.environ.update(saved_env)
        os.chdir(saved_dir)
    return reply


def _answer(conn: Connection, reply: Reply) -> None:
    try:
        frame = dump(reply)
    except Exception as exc:  # the value cannot be pickled
        frame = dump(_failure(exc))
    conn.send_bytes(frame)


def main() -> None:
    _end_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    conn, once = Connection(int(sys.argv[1])), sys.argv[2] == "once"
    import torch

    torch.set_num_threads(1)
    conn.send_bytes(READY)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(conn, jobs), daemon=True).start()
    while True:
        reply = serve_one(jobs.get())
        _answer(conn, reply)
        if once:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if reply.error_type is None else 1)


if __name__ == "__main__":
    main()
