# SPDX-License-Identifier: Apache-2.0
"""Write the golden folders with another installation of `deepspeed`, run as a black box.

    PYTHON tests/checkpoint/make_golden.py OUT [--world 2] [--variant NAME ...]

PYTHON is the interpreter of the environment that has the package to record.  For each variant of `golden_model` two
CPU ranks train two steps, save, and train five more; `expected.pt` holds the mean losses of those five steps, the
full fp32 weights at the time of saving and the Adam moments.  Converter scripts that the save leaves in the folder
are not kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TAG = "global_step2"


def worker(variant: str, out: Path, store: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    import deepspeed

    backend = sys.modules.get("deepspeed.comm.torch")
    if backend is not None:
        backend.build_shm_op = lambda: None
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # CPU kernels exist; the recorded package refuses by default
    sys.path.insert(0, str(HERE))
    import golden_model as gm

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    spec = gm.VARIANTS[variant]
    model = gm.build(**spec["model"])
    parameters = gm.param_groups(model, 0.01) if spec["groups"] else [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=gm.config(variant))

    def train(step: int) -> float:
        loss = engine(*gm.batch(step, rank))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        return mean.item() / world

    before = [train(step) for step in range(2)]
    engine.save_checkpoint(str(out), client_state={"note": "golden", "epoch": 3})
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    weights, moments = {}, {}
    for name, param in engine.module.named_parameters():
        full = safe_get_full_fp32_param(param)
        if full is None:
            with deepspeed.zero.GatheredParameters(param):
                full = param.detach().float()
        weights[name] = full.clone().cpu()
        if param.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                moments[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).clone().cpu()
    scales = [float(getattr(engine.optimizer, "cur_scale", 1.0))]
    after = []
    for step in range(2, 7):
        after.append(train(step))
        scales.append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
    if rank == 0:
        torch.save(
            {
                "before": before,
                "after": after,
                "loss_scales": scales,
                "skipped_steps": engine.skipped_steps,
                "weights": weights,
                "moments": moments,
                "version": deepspeed.__version__,
            },
            out / "expected.pt",
        )
        print(variant, before, after, scales, flush=True)
    dist.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--variant", nargs="*")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.variant[0], args.out, args.worker)
        return 0
    sys.path.insert(0, str(HERE))
    import golden_model as gm

    for variant in args.variant or list(gm.VARIANTS):
        target = args.out / variant
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            env = dict(os.environ, WORLD_SIZE=str(args.world), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29501")
            procs = [
                subprocess.Popen(
                    [sys.executable, __file__, str(target), "--variant", variant, "--worker", f"{scratch}/store"],
                    env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank)),
                )
                for rank in range(args.world)
            ]
            codes = [proc.wait() for proc in procs]
        if any(codes):
            print(f"{variant}: FAILED {codes}")
            return 1
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (target / script).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
