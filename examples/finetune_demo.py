# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the `deepspeed` launcher and a stock Trainer script fine-tune a small language model, with and without
hpZ, and every loss is compared with that of plain torch.

A base model is trained on the words of one half of Python's own documentation and saved once. Then `train.py`
fine-tunes it on the other half as it stands: in one process with the global batch (plain torch), on several ranks with
ZeRO-3, and with ZeRO-3 + hpZ. The sharded runs are then resumed from their checkpoint, each in fresh processes. Exits
with 1 if a curve differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from demo_report import Run, failures, plot, print_tables
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "train.py"
BASE_STEPS = 30
STEPS, CHECKPOINT = 24, 14
WINDOW, GLOBAL_MICRO_BATCH, ACCUMULATION = 128, 16, 2

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Layout:
    """Where the ranks run."""

    ranks: int
    hpz: int
    cuda: bool
    why: str

    def environment(self, plain: bool) -> dict[str, str]:
        """The environment of a run; plain torch is one process that sees at most one GPU."""
        env = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore:.*pin_memory.*")
        if not self.cuda:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        elif plain:
            env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return env


def choose_layout(ranks: int | None, device: str) -> Layout:
    """A rank on every GPU where there are at least two, else four on the CPU; hpZ groups of two ranks."""
    gpus = torch.cuda.device_count()
    cuda = device == "cuda" or (device == "auto" and gpus >= 2)
    if cuda and not gpus:
        raise SystemExit("--device cuda: torch sees no GPU; leave the option out to use the CPU")
    if ranks is None:
        ranks = max(n for n in (1, 2, 4, 8, 16) if n <= gpus) if cuda else 4
    if GLOBAL_MICRO_BATCH % ranks:
        raise SystemExit(f"--ranks {ranks}: use a divisor of {GLOBAL_MICRO_BATCH}")
    if cuda and ranks > gpus:
        raise SystemExit(f"--ranks {ranks}: this machine has {gpus} GPU(s); NCCL takes one rank each")
    hpz = 2 if ranks % 2 == 0 else 1
    if cuda:
        why = f"{gpus} GPU(s) found"
    elif device == "cpu":
        why = "as asked"
    elif gpus:
        why = "one GPU cannot show sharding, so the ranks run on the CPU (--device cuda uses it all the same)"
    else:
        why = "no GPU found"
    return Layout(ranks, hpz, cuda, why)


@dataclass
class Job:
    """One launch of the training script."""

    title: str
    key: str
    config: str | None
    resume: bool = False
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = STEPS - CHECKPOINT if self.resume else STEPS


def jobs() -> list[Job]:
    """What is run, in order."""
    return [
        Job("plain torch", "plain", None),
        Job("ZeRO-3", "zero3", "zero3.json"),
        Job("ZeRO-3, resumed", "zero3", "zero3.json", resume=True),
        Job("ZeRO-3 + hpZ", "hpz", "zero3_hpz.json"),
        Job("ZeRO-3 + hpZ, resumed", "hpz", "zero3_hpz.json", resume=True),
    ]


def make_base(path: Path) -> Iterator[float]:
    """Train a small Llama from scratch on the words of the first half of the text and save it; yields losses."""
    import transformers
    from train import HELD_BACK, Windows, text

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=WINDOW, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    words = re.sub(rb"[^a-z]+", b" ", text(0.0, HELD_BACK).lower())
    rows = Windows(words, WINDOW).rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(BASE_STEPS):
        chosen = rows[torch.randint(len(rows), (16,))]
        loss = model(input_ids=chosen, labels=chosen).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    model.save_pretrained(path)


def command(job: Job, layout: Layout, model: Path, out: Path) -> list[str]:
    """The command line of a job: the `deepspeed` launcher, or python for plain torch."""
    ranks = 1 if job.config is None else layout.ranks
    if job.config is None:
        start = [sys.executable, str(SCRIPT)]
    else:
        launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or shutil.which("deepspeed")
        if launcher is None:
            raise SystemExit("no `deepspeed` command beside this python: install the package (`make demo` does)")
        start = [launcher, "--num_gpus", str(ranks), str(SCRIPT), "--deepspeed", str(_config(job.config, layout, out))]
    arguments = {
        "model": model,
        "report": _report(job, out),
        "window": WINDOW,
        "output_dir": out / job.key,
        "max_steps": STEPS,
        "per_device_train_batch_size": GLOBAL_MICRO_BATCH // ranks,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": 5e-4,
        "adam_epsilon": 1e-5,  # the sign of a gradient of rounding size does not decide a step
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": CHECKPOINT,
        "save_strategy": "no" if job.resume or job.config is None else "steps",
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 1,
    }
    if job.resume:
        arguments["resume_from_checkpoint"] = out / job.key / f"checkpoint-{CHECKPOINT}"
    return start + [part for name, value in arguments.items() for part in (f"--{name}", str(value))]


def _report(job: Job, out: Path) -> Path:
    return out / f"{job.key}{'-resumed' if job.resume else ''}.jsonl"


def _config(name: str, layout: Layout, out: Path) -> Path:
    """The configuration beside this file, with the hpZ size of this layout.

    A model this small would stay gathered between forward and backward; `stage3_max_reuse_distance` 0 makes it gather
    as often as a large one.
    """
    config = json.loads((HERE / name).read_text())
    zero = config["zero_optimization"]
    zero["stage3_max_reuse_distance"] = 0
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = layout.hpz
    path = out / name
    path.write_text(json.dumps(config, indent=2))
    return path


def run_job(job: Job, layout: Layout, model: Path, out: Path) -> Iterator[int]:
    """Run a job and yield the number of finished steps as it grows.

    Raises:
        SystemExit: it failed; the end of its log is printed.
    """
    report = _report(job, out)
    log_path = report.with_suffix(".log")
    with log_path.open("w") as log:
        child = subprocess.Popen(
            command(job, layout, model, out), env=layout.environment(job.config is None), stdout=log, stderr=log
        )
        try:
            while child.poll() is None:
                time.sleep(0.2)
                yield len(report.read_bytes().splitlines()) if report.exists() else 0
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if child.returncode:
        console.print("".join(log_path.read_text().splitlines(keepends=True)[-40:]), markup=False, highlight=False)
        raise SystemExit(f"{job.title} failed with exit code {child.returncode}; the whole log is in {log_path}")
    yield job.steps


def read_run(job: Job, out: Path) -> Run:
    """What a job wrote."""
    lines = [json.loads(line) for line in _report(job, out).read_text().splitlines()]
    return Run(job.title, job.key, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the results (demo-output)")
    parser.add_argument("--ranks", type=int, help="number of ranks (every GPU, or 4 on the CPU)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    layout = choose_layout(options.ranks, options.device)
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    device = "GPU" if layout.cuda else "CPU"
    console.print(f"[bold]{layout.ranks} ranks on the {device}[/], hpZ groups of {layout.hpz} ({layout.why})")
    started = time.perf_counter()
    todo = jobs()
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {job.title: progress.add_task(job.title, total=job.steps, start=False) for job in todo}
        base = progress.add_task("base model", total=BASE_STEPS)
        for _ in make_base(out / "base"):
            progress.advance(base)
        for job in todo:
            progress.start_task(tasks[job.title])
            for done in run_job(job, layout, out / "base", out):
                progress.update(tasks[job.title], completed=done)
            progress.stop_task(tasks[job.title])
    runs = {job.title: read_run(job, out) for job in todo}
    print_tables(console, runs, CHECKPOINT)
    picture = out / "loss.png"
    plot(picture, runs, CHECKPOINT, f"{layout.ranks} {device} ranks, hpZ {layout.hpz}")
    console.print(f"\n{time.perf_counter() - started:.0f} s; plot: {picture}; losses and logs: {out}")
    wrong = failures(runs, CHECKPOINT, ACCUMULATION, exact=not layout.cuda, hpz=1 < layout.hpz < layout.ranks)
    for text in wrong:
        console.print(f"[bold red]FAILED[/] {text}")
    if not wrong:
        console.print("[bold green]PASSED[/] every loss of ZeRO-3, with and without hpZ, is that of plain torch")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
