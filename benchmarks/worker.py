# SPDX-License-Identifier: Apache-2.0
"""One rank of one variant: takes commands as JSON lines, answers with JSON lines on a pipe of its own.

Started by ``pool``; standard output and error go to the worker's log. Commands: build, run, count, trace,
close, quit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
LOSSES_KEPT = 8


class Worker:
    """State of one rank between commands."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from . import variants

        self.variant = spec["variant"]
        self.rank, self.world = spec["rank"], spec["world"]
        variants.isolate(self.variant, ROOT)
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.variants = torch, dist, variants
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.device = torch.device("cpu")
        if spec["device"] == "cuda":
            self.device = torch.device("cuda", spec["local_rank"])
            torch.cuda.set_device(self.device)
        self.grouped = self.world > 1
        if self.grouped:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"file://{spec['rendezvous']}",
                rank=self.rank,
                world_size=self.world,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=self.device if spec.get("bind_device") and self.device.type == "cuda" else None,
            )
        variants.prepare(self.variant, self.device)
        self.trainer: Any = None
        self.losses: list[Any] = []
        self.steps = 0

    # -- commands

    def build(self, work: dict[str, Any]) -> dict[str, Any]:
        """Build the trainer; time it from the model on."""
        from .works import Work

        self.work = Work(**work)
        self.losses, self.steps = [], 0
        self.synchronize()
        self.reset_peak()
        start = time.perf_counter()
        self.trainer = self.variants.make(self.variant, self.work, self.device)
        self.synchronize()
        seconds = time.perf_counter() - start
        self.variants.check_origin(self.variant, ROOT)
        peak = self.peaks()
        self.variants.forget()
        return {"init_s": seconds, "init_peak": peak["allocated"], "torch": self.torch.__version__}

    def run(self, warmup: int, steps: int) -> dict[str, Any]:
        """Warm up, then time ``steps`` steps that are each waited for, then as many that are not."""
        data = [self.batch(self.steps + i) for i in range(warmup + 2 * steps)]
        for batch in data[:warmup]:
            self.step(batch)
        self.reset_peak()
        waited, host, cpu = [], [], []
        for batch in data[warmup : warmup + steps]:
            self.barrier()
            start, busy = time.perf_counter(), time.process_time()
            self.step(batch)
            returned, used = time.perf_counter(), time.process_time()
            self.synchronize()
            waited.append(time.perf_counter() - start)
            host.append(returned - start)
            cpu.append(used - busy)
        self.barrier()
        start = time.perf_counter()
        for batch in data[warmup + steps :]:
            self.step(batch)
        self.synchronize()
        free = (time.perf_counter() - start) / max(steps, 1)
        result = {"step_s": waited, "host_s": host, "cpu_s": cpu, "free_s": free, **self.peaks()}
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()
        result["losses"] = [[float(x) for x in step] for step in self.losses[:LOSSES_KEPT]]
        return result

    def count(self) -> dict[str, Any]:
        """Collectives, bytes and Python calls of one step each; on a CPU also the peak of its tensors."""
        from . import measure

        batch = self.batch(0)
        found = measure.count_collectives(lambda: self.step(batch))
        found["python_calls"] = measure.count_python_calls(lambda: self.step(batch))
        if self.device.type == "cpu":
            found["cpu_peak"] = measure.peak_on_cpu(lambda: self.step(batch))
        self.synchronize()
        return found

    def trace(self, steps: int, folder: str | None) -> dict[str, Any]:
        """Steps under the profiler: how much communication is hidden. Rank 0 leaves the trace in ``folder``."""
        from . import overlap

        batch = self.batch(0)
        path = f"{folder}/{self.work.name}-{self.variant}.json.gz" if folder and self.rank == 0 else None
        self.barrier()
        return {"trace": overlap.trace(lambda: self.step(batch), steps, path)}

    def close(self) -> dict[str, Any]:
        """Drop the trainer; says how much device memory is left allocated."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None
        self.losses = []
        self.variants.forget()
        left = self.torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        return {"left": left}

    # -- help

    def batch(self, step: int) -> Any:
        """This rank's micro-batches of ``step``."""
        work, models = self.work, self.variants.models
        vocab = models.SHAPES[work.model].vocab
        return models.batches(vocab, work.micro, work.length, work.accumulation, self.rank, step, self.device)

    def step(self, batch: Any) -> None:
        losses = self.trainer.step(batch)
        if len(self.losses) < LOSSES_KEPT:
            self.losses.append(losses)
        self.steps += 1

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def barrier(self) -> None:
        self.synchronize()
        if self.grouped:
            self.dist.barrier()
            self.synchronize()

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {"allocated": 0, "reserved": 0}
        return {
            "allocated": self.torch.cuda.max_memory_allocated(),
            "reserved": self.torch.cuda.max_memory_reserved(),
        }


def _follow(parent: int) -> None:
    """End this process when the coordinator is gone, whatever it does then."""
    while os.getppid() == parent:
        time.sleep(2.0)
    os._exit(1)


def serve(spec: dict[str, Any]) -> int:
    """Answer commands until told to quit or the coordinator is gone."""
    answers = os.fdopen(spec["answer_fd"], "w", buffering=1)
    threading.Thread(target=_follow, args=(spec["parent"],), daemon=True).start()
    worker: Worker | None = None
    status = 0
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "quit":
            break
        try:
            if worker is None:
                worker = Worker(spec)
            answer = {} if name == "hello" else getattr(worker, name)(**command)
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
            status = 1
        answers.write(json.dumps(answer) + "\n")
        if status:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no teardown: a rank that failed must not wait for the others in a destructor


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
