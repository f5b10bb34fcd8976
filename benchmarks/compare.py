# SPDX-License-Identifier: Apache-2.0
"""The same training under this package, upstream and FSDP2, interleaved: ``python -m benchmarks.compare --help``.

Every variant's ranks are started once per number of ranks and kept; the measured rounds go round the variants
(A B C, B C A, ...), so that drift of the machine hits all alike. Start-up and building are outside the timing. Every
command to a variant has a time limit; a variant that fails or hangs costs its own row only. The JSON is written after
every work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import report
from .pool import Pool, Setting, WorkerFailed
from .works import SETS, WORKS, Work, select

TRACED = 3
"""Steps under the profiler."""
LEFT_LIMIT = 256 << 20
"""Device bytes that a closed trainer may leave behind before its processes are replaced."""


class Comparison:
    """Runs works one after another and keeps the pools between them."""

    def __init__(self, setting: Setting, options: argparse.Namespace) -> None:
        self.setting, self.options = setting, options
        self.pools: dict[tuple[str, int], Pool] = {}
        self.end = time.monotonic() + options.time_limit
        self.cost: dict[int, float] = {}

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    def measure(self, work: Work) -> dict[str, Any]:
        """All variants on one work."""
        failed: dict[str, str] = {}
        rows: dict[str, dict[str, Any]] = {}
        started = time.monotonic()
        names = [v for v in self.options.variants if v != "single" or work.hpz == 1]
        self._start(names, work, failed)
        names = [v for v in names if v not in failed]
        for variant in names:
            answer = self._ask(variant, work, failed, "build", self.options.build_limit, {"work": work.as_dict()})
            if answer is not None:
                rows[variant] = {"init_s": max(a["init_s"] for a in answer), "init_peak": answer[0]["init_peak"]}
                rows[variant]["torch"] = answer[0]["torch"]
        rounds: dict[str, list[Any]] = {v: [] for v in rows}
        order = list(rows)
        for index in range(self.options.rounds):
            for variant in order[index % len(order) :] + order[: index % len(order)] if order else []:
                if variant in failed:
                    continue
                warmup = self.options.warmup if index == 0 else self.options.rewarm
                arguments = {"warmup": warmup, "steps": self.options.steps}
                answer = self._ask(variant, work, failed, "run", self.options.run_limit, arguments)
                if answer is not None:
                    rounds[variant].append(answer)
        losses = {}
        for variant in order:
            if not rounds[variant]:
                rows.pop(variant)
                continue
            tokens = work.tokens if variant != "single" else work.tokens // work.ranks
            rows[variant].update(report.summarise(rounds[variant], tokens))
            losses[variant] = rows[variant]["losses"] = report.mean_losses(rounds[variant][-1])
            if variant not in failed:
                counted = self._ask(variant, work, failed, "count", self.options.run_limit)
                rows[variant].update(counted[0] if counted else {})
            if self.options.trace and self.setting.device == "cuda" and variant not in failed:
                arguments = {"steps": TRACED, "folder": str(self.options.out.resolve())}
                traced = self._ask(variant, work, failed, "trace", self.options.run_limit, arguments)
                rows[variant].update(report.mean_trace(traced) if traced else {})
        for variant in order:
            if variant not in failed:
                answer = self._ask(variant, work, failed, "close", 60)
                if answer is None or max(a["left"] for a in answer) > LEFT_LIMIT:
                    self._drop(variant, work)
        return {
            "work": work.as_dict(),
            "rows": rows,
            "ratios": report.ratios(rows),
            "failed": failed,
            "disagree": report.disagreement(losses, work.dtype),
            "seconds": time.monotonic() - started,
        }

    # -- pools

    def _key(self, variant: str, work: Work) -> tuple[str, int]:
        return variant, 1 if variant == "single" else work.ranks

    def _start(self, names: list[str], work: Work, failed: dict[str, str]) -> None:
        """Start what does not run yet, all at once, and let go of pools of other sizes."""
        wanted = {self._key(v, work) for v in names}
        for key in [key for key in self.pools if key not in wanted]:
            self.pools.pop(key).quit()
        fresh = []
        for variant in names:
            key = self._key(variant, work)
            if key not in self.pools:
                self.pools[key] = Pool(*key, self.setting)
                fresh.append(variant)
                self._try(variant, work, failed, lambda key=key: self.pools[key].tell("hello"))
        for variant in fresh:
            if variant not in failed:
                key = self._key(variant, work)
                self._try(
                    variant, work, failed, lambda key=key: self.pools[key].hear("hello", self.options.start_limit)
                )

    def _try(self, variant: str, work: Work, failed: dict[str, str], call: Any) -> Any:
        try:
            return call()
        except WorkerFailed as error:
            failed[variant] = str(error)
            print(f"  {error}", flush=True)
            self.pools.pop(self._key(variant, work), None)
            return None

    def _ask(
        self,
        variant: str,
        work: Work,
        failed: dict[str, str],
        name: str,
        limit: float,
        arguments: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]] | None:
        pool = self.pools[self._key(variant, work)]
        limit = max(5.0, min(limit, self.left))
        return self._try(variant, work, failed, lambda: pool.ask(name, limit, **(arguments or {})))

    def _drop(self, variant: str, work: Work) -> None:
        pool = self.pools.pop(self._key(variant, work), None)
        if pool is not None:
            pool.quit()

    def close(self) -> None:
        """End every process."""
        for pool in self.pools.values():
            pool.quit()
        self.pools.clear()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.split("\n")[0])
    names = ", ".join([*SETS, *WORKS])
    parser.add_argument("--works", nargs="+", default=None, help=f"names of works or sets: {names}")
    parser.add_argument("--variants", default="ours,fsdp2,upstream", help="comma-separated, see variants.py")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--upstream", default=None, help="folder that holds upstream's package, put on its PYTHONPATH")
    parser.add_argument("--upstream-python", default=None, help="interpreter for upstream, where it needs its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round, waited for, and as many not")
    parser.add_argument("--warmup", type=int, default=4, help="untimed steps before the first round")
    parser.add_argument("--rewarm", type=int, default=2, help="untimed steps before every other round")
    parser.add_argument("--trace", action="store_true", help="also profile the device: communication hidden or not")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds after which no work is begun")
    parser.add_argument("--start-limit", type=float, default=180.0)
    parser.add_argument("--build-limit", type=float, default=120.0)
    parser.add_argument("--run-limit", type=float, default=120.0)
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    return options


def _setting(options: argparse.Namespace) -> Setting:
    import torch

    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    device = options.device if options.device != "auto" else ("cuda" if gpus else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    logs = options.out / "logs"
    logs.mkdir(exist_ok=True)
    setting = Setting(device, gpus, logs)
    if options.upstream:
        setting.paths["upstream"] = str(Path(options.upstream).resolve())
    if options.upstream_python:
        setting.python["upstream"] = options.upstream_python
    return setting


def _about(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": setting.device,
        "gpus": setting.gpus,
        "rounds": options.rounds,
        "steps": options.steps,
    }
    if setting.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name(0)
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        about["nccl_limits"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_MAX_")}
    return about


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; 1 where a variant failed or losses disagree."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that workers are ended
    setting = _setting(options)
    works = select(options.works or (["gpu2", "gpu4"] if setting.device == "cuda" else ["cpu"]))
    results: list[dict[str, Any]] = []
    about = _about(setting, options)
    comparison = Comparison(setting, options)
    longest = 0.0
    try:
        for work in works:
            if comparison.left < longest:
                print(f"{work.name}: not begun, {comparison.left:.0f} s are left", flush=True)
                continue
            result = comparison.measure(work)
            longest = max(longest, min(result["seconds"], 90.0))
            results.append(result)
            path = options.out / "compare.json"
            path.write_text(json.dumps({"about": about, "results": results}, indent=1))
            print(report.table([result]), f"  ({result['seconds']:.0f} s)", flush=True)
    finally:
        comparison.close()
    text = report.table(results)
    (options.out / "compare.txt").write_text(text + "\n")
    report.plot(results, options.out / "compare.png")
    print("\n" + text)
    for result in results:
        for peer, values in result["ratios"].items():
            shown = ", ".join(f"{key.removesuffix('_ms')} {value:.3f}" for key, value in values.items())
            print(f"{result['work']['name']}: ours / {peer}: {shown}")
    return 1 if any(result["failed"] or result["disagree"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
