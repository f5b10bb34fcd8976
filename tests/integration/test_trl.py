# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers over ZeRO-3 against the same trainers, on as many ranks, without it: losses, norms, weights.

TRL reads the head's weight without calling the head, takes the hooks off for generation and gives one module to two
engines.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.skips import needs
from tests.integration import tiny

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=needs(name)) for name in ("trl", "peft")
]
TEXT = tiny.TEXT.decode()
STEPS = 4


@dataclass(frozen=True)
class Run:
    """One training. `hpz` None: without deepspeed, data parallel over the same ranks."""

    kind: str
    folder: str
    out: str
    hpz: int | None
    lora: bool = False
    own_reference: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    kind: str
    lora: bool = False
    own_reference: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()


GENERATION = (("num_generations", 2), ("max_completion_length", 8))
CASES = {
    "sft": Case("sft"),
    "sft, packed": Case("sft", arguments=(("packing", True), ("max_length", 16))),
    "sft, lora": Case("sft", lora=True),
    "dpo": Case("dpo"),
    "dpo, own reference": Case("dpo", own_reference=True),
    "dpo, reference computed before": Case("dpo", arguments=(("precompute_ref_log_probs", True),)),
    "dpo, reference follows": Case("dpo", arguments=(("sync_ref_model", True), ("ref_model_sync_steps", 2))),
    "dpo, lora": Case("dpo", lora=True),
    "reward": Case("reward"),
    "grpo": Case("grpo", arguments=GENERATION),
    "grpo, not gathered": Case("grpo", arguments=(*GENERATION, ("ds3_gather_for_generation", False))),
    "grpo, reference": Case("grpo", arguments=(*GENERATION, ("beta", 0.1), ("num_iterations", 2))),
    "grpo, lora": Case("grpo", lora=True, arguments=(*GENERATION, ("beta", 0.1))),
}
QUICK = ("sft", "dpo, reference computed before", "dpo, lora", "reward", "grpo")


def save_inputs(folder: str) -> None:
    """Models with a tokenizer of bytes, and the data of each trainer (on disk: TRL caches beside it)."""
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *letters])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tiny.save_model(f"{folder}/causal")
    scored = tiny.config()
    scored.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(scored).save_pretrained(f"{folder}/reward")
    for name in ("causal", "reward"):
        tokenizer.save_pretrained(f"{folder}/{name}")
    pairs = [
        {
            "prompt": TEXT[7 * i :][:6],
            "chosen": TEXT[7 * i + 6 :][: 6 + i % 4],
            "rejected": TEXT[300 + 5 * i :][: 5 + i % 3],
        }
        for i in range(32)
    ]
    data = {
        "sft": [{"text": TEXT[7 * i :][: 12 + i % 5]} for i in range(32)],
        "dpo": pairs,
        "reward": pairs,
        "grpo": [{"prompt": TEXT[7 * i :][: 4 + i % 5]} for i in range(32)],
    }
    for name, rows in data.items():
        Dataset.from_list(rows).save_to_disk(f"{folder}/{name}-train")
        Dataset.from_list(rows[:8]).save_to_disk(f"{folder}/{name}-eval")


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on what was generated."""
    return [sum(letter in "aeiou" for letter in text) + 0.1 * len(text) for text in completions]


def _trainer(run: Run) -> Any:
    import datasets
    import peft
    import transformers
    import trl

    config, trainer = {
        "sft": (trl.SFTConfig, trl.SFTTrainer),
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "reward": (trl.RewardConfig, trl.RewardTrainer),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
    }[run.kind]
    section = None
    if run.hpz is not None:
        section = tiny.ds_config(run.hpz)
        section["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    arguments = config(
        output_dir=run.out,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        deepspeed=section,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=5,
        **run.arguments,
    )
    path = f"{run.folder}/{'reward' if run.kind == 'reward' else 'causal'}"
    more: dict[str, Any] = {"model": path}
    if run.kind == "grpo":
        more["reward_funcs"] = vowels
    if run.lora:
        more["peft_config"] = peft.LoraConfig(
            r=3, lora_alpha=60, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
        )
    if run.own_reference:
        more["ref_model"] = transformers.AutoModelForCausalLM.from_pretrained(path)
    return trainer(
        args=arguments,
        train_dataset=datasets.load_from_disk(f"{run.folder}/{run.kind}-train"),
        eval_dataset=datasets.load_from_disk(f"{run.folder}/{run.kind}-eval"),
        **more,
    )


def train(run: Run) -> dict[str, Any]:
    """Runs on every rank."""
    import datasets
    import transformers

    tiny.forget_clients()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    trainer = _trainer(run)
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(run.out + "/final")
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "losses": [entry["loss"] for entry in log],
        "norms": [float(entry["grad_norm"]) for entry in log],
        "rewards": [entry["reward"] for entry in log if "reward" in entry],
        "eval": evaluated["eval_loss"],
        "engine": type(trainer.model_wrapped).__name__,
        "weights": tiny.full_weights(trainer.model),
    }
    trainer.accelerator.free_memory()
    tiny.forget_clients()
    return result


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("trl"))
    run_ranks(save_inputs, 1, folder, init_group=False, timeout=120)
    return folder


@functools.cache
def without_deepspeed(case: Case, world: int, inputs: str) -> dict[str, Any]:
    arguments = {key: value for key, value in case.arguments if key != "ds3_gather_for_generation"}
    run = Run(case.kind, inputs, f"{inputs}/plain", None, case.lora, case.own_reference, arguments)
    return run_ranks(train, world, run, timeout=240)[0]


@pytest.mark.parametrize(
    ("name", "world", "hpz"),
    [
        pytest.param(name, world, hpz, marks=() if name in QUICK and hpz == 2 else pytest.mark.slow)
        for name in CASES
        for world, hpz in ((2, 1), (4, 1), (4, 2))
    ],
)
def test_a_trainer_equals_itself_without_deepspeed(
    name: str, world: int, hpz: int, inputs: str, tmp_path: Path
) -> None:
    case = CASES[name]
    wanted = without_deepspeed(case, world, inputs)
    run = Run(case.kind, inputs, str(tmp_path), hpz, case.lora, case.own_reference, dict(case.arguments))
    got, *others = run_ranks(train, world, run, timeout=240)
    assert (got["engine"], wanted["engine"]) == ("DeepSpeedEngine", "DistributedDataParallel")
    assert len(got["losses"]) == STEPS and max(got["norms"]) > 0
    # Losses of GRPO are differences around zero; what it generated shows in the rewards.
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5, abs=1e-6)
    assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert got["eval"] == pytest.approx(wanted["eval"], rel=1e-5)
    assert got["rewards"] == wanted["rewards"]
    for other in others:
        assert all(torch.equal(other["weights"][key], weight) for key, weight in got["weights"].items())
    for key, weight in wanted["weights"].items():
        torch.testing.assert_close(
            got["weights"][key], weight, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    saved = run_ranks(read_saved, 1, str(tmp_path / "final"), init_group=False)[0]
    assert saved and all(torch.equal(tensor, _of(got["weights"], key)) for key, tensor in saved.items())


def _of(weights: dict[str, torch.Tensor], saved: str) -> torch.Tensor:
    """The weight that was saved under a name: PEFT's leave out the adapter's."""
    return weights[saved] if saved in weights else weights[saved.replace(".weight", ".default.weight")]


def read_saved(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    [file] = Path(path).glob("*.safetensors")
    return load_file(str(file))
