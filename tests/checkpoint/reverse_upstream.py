# SPDX-License-Identifier: Apache-2.0
"""The reverse of the golden folders: what this package writes, another installation of `deepspeed` loads.

    python tests/checkpoint/reverse_upstream.py --upstream-python PATH [--keep DIR]

PATH is the interpreter of an environment that has the other package; it runs as a black box.  For each variant of
`golden_model`, on two CPU ranks: this package trains two steps, saves and trains five more; the other package loads
the folder and trains the same five; its own zero_to_fp32 and ds_to_universal read the folder as well, and it loads the
universal folder that this package converts.  Losses, weights and moments are compared.  Ends with PASS or FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORLD = 2
STEPS = range(2, 7)
TOLERANCE = {"fp32": 1e-6, "bf16_groups": 2e-3, "fp16_scaler": 2e-3}


# -- what a rank does (under either package) ------------------------------------------------------------------------


def worker(variant: str, action: str, folder: Path, answer: Path, store: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank = int(os.environ["RANK"])
    import torch
    import torch.distributed as dist

    import deepspeed

    backend = sys.modules.get("deepspeed.comm.torch")
    if backend is not None:
        backend.build_shm_op = lambda: None
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    sys.path.insert(0, str(HERE))
    import golden_model as gm

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo")
    spec, config = gm.VARIANTS[variant], gm.config(variant)
    if action == "load_universal":
        config["checkpoint"] = {"load_universal": True}
    model = gm.build(7 if action == "save" else 99, **spec["model"])
    trained = gm.param_groups(model, 0.01) if spec["groups"] else [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    facts: dict[str, Any] = {}
    if action == "save":
        _train(engine, gm, rank, range(2))
        engine.save_checkpoint(str(folder), client_state={"note": "ours", "epoch": 3})
    else:
        tag = "universal" if action == "load_universal" else None
        path, client = engine.load_checkpoint(str(folder), tag=tag)
        facts["client"] = [client.get("note"), client.get("epoch")] if client else None
        facts["path"] = str(path)
    facts["frozen"] = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    facts["steps"] = [engine.global_steps, engine.skipped_steps]
    weights = _full(engine)
    facts["losses"] = _train(engine, gm, rank, STEPS)
    facts["scale"] = float(getattr(engine.optimizer, "cur_scale", 1.0))
    if rank == 0:
        torch.save(weights, f"{answer}.pt")
        answer.write_text(json.dumps(facts))
    dist.barrier()
    os._exit(0)


def _train(engine: Any, gm: Any, rank: int, steps: range) -> list[float]:
    import torch.distributed as dist

    losses = []
    for step in steps:
        loss = engine(*gm.batch(step, rank))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    return losses


def _full(engine: Any) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param).clone().cpu()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).clone().cpu()
        else:
            with deepspeed.zero.GatheredParameters(param):
                found[name] = param.detach().float().clone().cpu()
    return found


def convert(folder: Path, answer: Path) -> None:
    """The other package's zero_to_fp32 on a folder of this one."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    torch.save({name: tensor.detach().float().clone() for name, tensor in state.items()}, answer)


# -- the driver -----------------------------------------------------------------------------------------------------


def _run(python: str, ours: bool, *arguments: str, ranks: int = 1) -> str:
    """Run this file (or a module) under an interpreter; returns the output of a failure, "" on success."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    env.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", PYTHONWARNINGS="ignore")
    env.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    if ours:
        env["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        procs = []
        for rank in range(ranks):
            extra = ["--store", f"{scratch}/store"] if ranks > 1 else []
            procs.append(
                subprocess.Popen(
                    [python, *arguments, *extra],
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=scratch,
                )
            )
        outputs = [proc.communicate(timeout=300)[0] for proc in procs]
        failed = [output for proc, output in zip(procs, outputs, strict=True) if proc.returncode]
    return "\n".join(failed)[-3000:]


class Report:
    """Lines of the table and whether all were good."""

    def __init__(self) -> None:
        self.good = True

    def line(self, variant: str, what: str, good: bool, detail: str = "") -> None:
        self.good &= good
        print(f"{variant:<12} {what:<46} {'ok' if good else 'FAIL'}  {detail}", flush=True)


def _largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one, other, strict=True))


def _equal(one: dict[str, Any], other: dict[str, Any]) -> str:
    import torch

    wrong = [name for name in one if name not in other or not torch.equal(one[name].float(), other[name].float())]
    return ", ".join(wrong)


def check(variant: str, upstream: str, base: Path, report: Report) -> None:
    import torch

    folder, me = base / "folder", str(Path(__file__).resolve())
    ours, theirs, uni = base / "ours.json", base / "theirs.json", base / "universal.json"
    common = ["--variant", variant, "--folder", str(folder)]
    problem = _run(sys.executable, True, me, *common, "--action", "save", "--answer", str(ours), ranks=WORLD)
    report.line(variant, "this package trains and saves", not problem, problem)
    if problem:
        return
    mine, full = json.loads(ours.read_text()), torch.load(f"{ours}.pt", weights_only=True)

    problem = _run(upstream, False, me, *common, "--action", "load", "--answer", str(theirs), ranks=WORLD)
    report.line(variant, "the other package loads and trains", not problem, problem)
    if not problem:
        got = json.loads(theirs.read_text())
        wrong = _equal(full, torch.load(f"{theirs}.pt", weights_only=True))
        report.line(variant, "  weights and moments equal", not wrong, wrong)
        report.line(
            variant, "  counters and client state", got["steps"] == mine["steps"] and got["client"] == ["ours", 3]
        )
        off = _largest_difference(mine["losses"], got["losses"])
        report.line(variant, "  losses of 5 steps", off <= TOLERANCE[variant], f"largest relative difference {off:.1e}")
        report.line(variant, "  loss scale after", got["scale"] == mine["scale"], f"{got['scale']:g}")

    fp32 = base / "fp32.pt"
    problem = _run(upstream, False, me, *common, "--action", "convert", "--answer", str(fp32))
    report.line(variant, "its zero_to_fp32 reads the folder", not problem, problem)
    if not problem:
        weights = {name: tensor for name, tensor in full.items() if not name.endswith(("exp_avg", "exp_avg_sq"))}
        wrong = _equal(weights, torch.load(fp32, weights_only=True))
        report.line(variant, "  full weights equal", not wrong, wrong)

    tool = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder / "global_step2")]
    problem = _run(upstream, False, *tool, "--output_folder", str(base / "theirs_universal"))
    report.line(variant, "its ds_to_universal reads the folder", not problem, problem)
    problem = problem or _run(sys.executable, True, *tool, "--output_folder", str(folder / "universal"))
    if not problem:
        wrong = _same_universal(base / "theirs_universal", folder / "universal")
        report.line(variant, "  same tensors as ours", not wrong, wrong)
    problem = _run(upstream, False, me, *common, "--action", "load_universal", "--answer", str(uni), ranks=WORLD)
    report.line(variant, "it loads our universal folder", not problem, problem)
    if not problem:
        got = json.loads(uni.read_text())
        frozen = set(mine["frozen"])  # the other package leaves these as built when it loads any universal folder
        trained = {name: tensor for name, tensor in full.items() if name not in frozen}
        wrong = _equal(trained, torch.load(f"{uni}.pt", weights_only=True))
        report.line(variant, "  trained weights and moments equal", not wrong, wrong)
        own = base / "own.json"
        (base / "own").mkdir()
        (base / "theirs_universal").rename(base / "own" / "universal")
        arguments = ["--variant", variant, "--folder", str(base / "own"), "--answer", str(own)]
        problem = _run(upstream, False, me, *arguments, "--action", "load_universal", ranks=WORLD)
        same = not problem and json.loads(own.read_text())["losses"] == got["losses"]
        report.line(variant, "  losses as from its own universal folder", same, problem)


def _same_universal(theirs: Path, ours: Path) -> str:
    import torch

    wrong = []
    for path in sorted((theirs / "zero").glob("*/*.pt")):
        mine = ours / "zero" / path.parent.name / path.name
        if not mine.is_file():
            wrong.append(f"{path.parent.name}/{path.name} missing")
            continue
        one, two = (torch.load(file, weights_only=True) for file in (path, mine))
        if not torch.equal(one, two):
            wrong.append(f"{path.parent.name}/{path.name}")
    return ", ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", help="interpreter of the environment with the other package")
    parser.add_argument("--keep", type=Path, help="work in this folder and keep it")
    for name in ("variant", "action", "folder", "answer", "store"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action == "convert":
        convert(Path(args.folder), Path(args.answer))
        return 0
    if args.action:
        worker(args.variant, args.action, Path(args.folder), Path(args.answer), args.store)
    if not args.upstream_python:
        parser.error("--upstream-python is needed")
    sys.path.insert(0, str(HERE))
    import golden_model as gm

    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        for variant in [args.variant] if args.variant else gm.VARIANTS:
            base = (args.keep or Path(scratch)) / variant
            base.mkdir(parents=True)
            check(variant, args.upstream_python, base, report)
    print("PASS" if report.good else "FAIL")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
