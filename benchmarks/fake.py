# SPDX-License-Identifier: Apache-2.0
"""One rank of many, in one process: ``python -m benchmarks.fake --ranks 8 64 1024 [--hpz 8]``.

Under torch's ``fake`` process group nothing is sent, so rank 0 of 1024 ranks runs alone: what it allocates, the
collectives that it issues and what it costs the host are true, its weights and losses are not, and times hold no
communication. Every probe is a process of its own. ``plain`` is the model in plain torch with the same optimizer on
the same data: its host cost is what any runtime adds to, its memory that of one unsharded rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("ours", "fsdp2", "plain")


@dataclass(frozen=True)
class Probe:
    """One measurement: rank 0 of ``ranks``."""

    variant: str
    ranks: int
    hpz: int = 1
    model: str = "30m"
    micro: int = 1
    length: int = 128
    accumulation: int = 1
    dtype: str = "bf16"
    device: str = "cpu"
    steps: int = 3


def run(probe: Probe) -> dict[str, Any]:
    """Measure in this process, which must have no process group yet.

    Returns: ``state`` and ``peak`` (bytes of tensors between steps and at most in a step), ``python_calls``, ``cpu_ms``
    (CPU time of all threads) and ``host_ms`` (until the step's last call returns), each per step; collectives and the
    bytes that a rank would receive; ``init_s``.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ["DS_ACCELERATOR"] = probe.device
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from . import measure, models, variants
    from .works import Work

    torch.set_num_threads(1)
    device = torch.device(probe.device)
    sharded = probe.variant != "plain"
    if sharded:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=probe.ranks)
    work = Work(
        "fake",
        probe.model,
        probe.ranks,
        probe.micro,
        probe.length,
        probe.accumulation,
        hpz=probe.hpz,
        dtype=probe.dtype,
    )
    name = probe.variant if sharded else "single"
    variants.prepare(name, device)
    start = time.perf_counter()
    trainer = variants.make(name, work, device)
    init_s = time.perf_counter() - start
    vocab = models.SHAPES[work.model].vocab
    batch = models.batches(vocab, work.micro, work.length, work.accumulation, 0, 0, device)
    for _ in range(
        3
    ):  # the optimizer's state and the order of units exist after the first step, reuse after the second
        trainer.step(batch)
    cpu, host = [], []
    for _ in range(probe.steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun, busy = time.perf_counter(), time.process_time()
        trainer.step(batch)
        host.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - busy)
    found = measure.count_collectives(lambda: trainer.step(batch))
    found["python_calls"] = measure.count_python_calls(lambda: trainer.step(batch))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["state"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.step(batch)
        found["peak"] = torch.cuda.max_memory_allocated()
    else:
        found["state"] = measure.allocated_on_cpu()
        found["peak"] = measure.peak_on_cpu(lambda: trainer.step(batch))
    found |= {"init_s": init_s, "cpu_ms": statistics.median(cpu) * 1e3, "host_ms": statistics.median(host) * 1e3}
    trainer.close()
    if sharded:
        dist.destroy_process_group()
    return found


def spawn(probe: Probe, limit: float) -> dict[str, Any]:
    """Measure in a new process; ``{"failed": why}`` where that did not work within ``limit`` seconds."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "benchmarks.fake", "--probe", json.dumps(asdict(probe))]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {limit:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Text table; every row is a probe's fields and what was found."""
    head = (
        f"{'ranks':>6} {'hpz':>4} {'variant':<8} {'state MB':>9} {'peak MB':>9} {'py calls':>9} {'CPU ms':>8} "
        f"{'host ms':>8} {'coll':>5} {'recv MB':>9} {'init s':>7}"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        start = f"{row['ranks']:>6} {row['hpz']:>4} {row['variant']:<8}"
        if "failed" in row:
            lines.append(f"{start} FAILED: {row['failed'][:120]}")
            continue
        lines.append(
            f"{start} {row['state'] / 1e6:>9.2f} {row['peak'] / 1e6:>9.2f} {row['python_calls']:>9} "
            f"{row['cpu_ms']:>8.1f} {row['host_ms']:>8.1f} {row['calls_total']:>5} {row['received_total'] / 1e6:>9.1f} "
            f"{row['init_s']:>7.2f}"
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fake", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--hpz", type=int, default=1, help="hpZ partition; FSDP2 reshards to as many")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--model", default="30m", help="a shape of benchmarks/models.py")
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one probe")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"--variants: {unknown[0]!r} is none of {', '.join(VARIANTS)}")
    odd = [ranks for ranks in options.ranks if ranks < 2 or options.hpz < 1 or ranks % options.hpz]
    if odd:
        parser.error(f"--ranks {odd[0]}: at least 2, and a multiple of --hpz {options.hpz}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 1 where a probe failed."""
    options = parse(arguments)
    if options.probe:
        print(json.dumps(run(Probe(**json.loads(options.probe)))))
        return 0
    same = {
        key: getattr(options, key) for key in ("model", "micro", "length", "accumulation", "dtype", "device", "steps")
    }
    probes = [Probe(v, n, options.hpz, **same) for n in options.ranks for v in options.variants if v != "plain"]
    if "plain" in options.variants:
        probes.append(Probe("plain", 1, **same))
    rows = []
    for probe in probes:
        rows.append({**asdict(probe), **spawn(probe, options.limit)})
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
