# SPDX-License-Identifier: Apache-2.0
"""A stock Hugging Face Trainer script: fine-tune a causal language model on the documentation that Python carries.

Nothing in it knows how it is run; each of these works:

    python examples/train.py --model MODEL --output_dir OUT                     (one process, plain torch)
    deepspeed --num_gpus 4 examples/train.py --deepspeed CONFIG.json ...        (four ranks, ZeRO-3)
    torchrun --nproc_per_node 4 examples/train.py --deepspeed CONFIG.json ...
    accelerate launch --use_deepspeed --deepspeed_config_file CONFIG.json --num_processes 4 examples/train.py ...

What must hold: the arguments are parsed before the model is loaded, so that `from_pretrained` builds it sharded.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers

HELD_BACK = 0.5
"""The share of the text that fine-tuning sees; the rest made the model that it begins with (`finetune_demo.py`)."""


def text(first: float, last: float) -> bytes:
    """A part of the documentation of the Python language, as shares of its length."""
    whole = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return whole[int(first * len(whole)) : int(last * len(whole))]


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of a text; a token is a byte."""

    def __init__(self, data: bytes, length: int) -> None:
        self.rows = torch.tensor(list(data[: len(data) // length * length])).view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@dataclass
class ScriptArguments:
    """Arguments of this script beside those of the Trainer."""

    model: str
    window: int = 128
    report: str | None = None


class Report(transformers.TrainerCallback):
    """Writes one JSON line a step: the loss, the time, and what this rank gathered so far."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.trainer: transformers.Trainer | None = None
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if not state.is_world_process_zero or "loss" not in logs:
            return
        line: dict[str, Any] = {"step": state.global_step, "loss": logs["loss"]}
        line["seconds"] = time.perf_counter() - self.started
        engine = self.trainer.model_wrapped if self.trainer is not None else None
        if hasattr(engine, "communication_stats"):  # an engine of ZeRO-3; plain torch has none
            line |= engine.communication_stats()
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = transformers.HfArgumentParser((ScriptArguments, transformers.TrainingArguments))
    script, arguments = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(script.model, dtype=torch.float32)
    report = [Report(script.report)] if script.report else []
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(text(HELD_BACK, 1.0), script.window),
        callbacks=report,
    )
    for callback in report:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()
