# SPDX-License-Identifier: Apache-2.0
"""What saving and loading cost, beside another installation of `deepspeed`: ratios from one run.

    python tests/checkpoint/cost_upstream.py --upstream-python PATH [--millions 24] [--rounds 3]

Both packages train the same fp32 model one step on two CPU ranks, then save (three new tags) and load (three times),
in turn.  Times are the median of all repeats and rounds; memory is the peak of anonymous memory above the level before
the call, on rank 0.  Hashing is part of this package's numbers, `fsync` too.  A load is measured as a new job meets it,
with the files dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD, REPEATS, WIDTH = 2, 3, 1024


class Meter:
    """Seconds and peak growth of anonymous memory (MB) of a call."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {}

    @staticmethod
    def anonymous() -> float:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))

    def measure(self, what: str, call: Callable[[], Any]) -> None:
        base, peak, done = self.anonymous(), [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                peak[0] = max(peak[0], self.anonymous())

        thread = threading.Thread(target=watch)
        thread.start()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        done.set()
        thread.join()
        self.found.setdefault(what, []).append((seconds, max(0.0, peak[0] - base)))


def forget(folder: Path) -> None:
    """Drop the files of a tag from the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def worker(layers: int, folder: Path, store: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank = int(os.environ["RANK"])
    import torch
    import torch.distributed as dist

    import deepspeed

    backend = sys.modules.get("deepspeed.comm.torch")
    if backend is not None:
        backend.build_shm_op = lambda: None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, WIDTH)).float().pow(2).mean())
    engine.step()
    meter = Meter()
    for repeat in range(REPEATS):
        tag = f"t{repeat}"
        dist.barrier()
        meter.measure("save", lambda tag=tag: engine.save_checkpoint(str(folder), tag=tag))
    for _ in range(REPEATS):
        if rank == 0:
            forget(folder / "t1")
        dist.barrier()
        meter.measure("load", lambda: engine.load_checkpoint(str(folder), tag="t1"))
    if rank == 0:
        (folder / "cost.json").write_text(json.dumps(meter.found))
    dist.barrier()
    os._exit(0)


def run(python: str, ours: bool, layers: int) -> dict[str, list[list[float]]]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29523", PYTHONWARNINGS="ignore")
    env.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", WORLD_SIZE=str(WORLD))
    if ours:
        env["PYTHONPATH"] = str(ROOT)
    scratch = Path(tempfile.mkdtemp())
    try:
        command = [python, __file__, "--layers", str(layers), "--folder", str(scratch), "--store", f"{scratch}/store"]
        procs = [
            subprocess.Popen(
                command,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(WORLD)
        ]
        outputs = [proc.communicate(timeout=400)[0] for proc in procs]
        if any(proc.returncode for proc in procs):
            raise SystemExit("\n".join(outputs)[-3000:])
        found: dict[str, list[list[float]]] = json.loads((scratch / "cost.json").read_text())
        return found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python")
    parser.add_argument("--millions", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    for name in ("layers", "folder", "store"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        worker(int(args.layers), Path(args.folder), args.store)
    if not args.upstream_python:
        parser.error("--upstream-python is needed")
    layers = max(1, round(args.millions * 1e6 / (WIDTH * WIDTH)))
    mine: dict[str, list[list[float]]] = {}
    other: dict[str, list[list[float]]] = {}
    for _ in range(args.rounds):
        for python, ours, into in ((args.upstream_python, False, other), (sys.executable, True, mine)):
            for what, entries in run(python, ours, layers).items():
                into.setdefault(what, []).extend(entries)
    print(f"{layers} layers of {WIDTH}x{WIDTH}: largest parameter {WIDTH * WIDTH * 4 / 2**20:.0f} MB, state per rank "
          f"{layers * WIDTH * WIDTH * 12 / WORLD / 2**20:.0f} MB")  # fmt: skip
    for what in mine:
        seconds = [statistics.median(entry[0] for entry in side[what]) for side in (mine, other)]
        best = [min(entry[0] for entry in side[what]) for side in (mine, other)]
        memory = [statistics.median(entry[1] for entry in side[what]) for side in (mine, other)]
        print(f"{what}: {seconds[0]:.2f} s, other {seconds[1]:.2f} s, ratio {seconds[0] / seconds[1]:.2f}")
        print(f"  best {best[0]:.2f} s, other {best[1]:.2f} s, ratio {best[0] / best[1]:.2f}")
        print(f"  extra memory {memory[0]:.0f} MB, other {memory[1]:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
