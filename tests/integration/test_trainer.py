# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer over ZeRO-3: the losses of a plain Trainer with the same global batch, and everything around
them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration import tiny

STEPS = 6


@dataclass
class Run:
    """One training. `hpz` None means plain torch in one process, with `world` times the batch."""

    model: str
    out: str
    hpz: int | None
    world: int = 4
    accum: int = 1
    checkpointing: str | None = None
    best: bool = False
    resume: str | None = None
    steps: int = STEPS
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def _arguments(run: Run) -> Any:
    from transformers import TrainingArguments

    plain = run.hpz is None
    return TrainingArguments(
        output_dir=run.out,
        max_steps=run.steps,
        per_device_train_batch_size=2 * (run.world if plain else 1),
        per_device_eval_batch_size=2 * (run.world if plain else 1),
        gradient_accumulation_steps=run.accum,
        learning_rate=2e-2,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps" if run.best else "no",
        eval_steps=2,
        save_strategy="steps" if run.best else "no",
        save_steps=2,
        load_best_model_at_end=run.best,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the best is then the first, so that loading it changes the weights
        gradient_checkpointing=run.checkpointing is not None,
        gradient_checkpointing_kwargs={"use_reentrant": run.checkpointing == "reentrant"}
        if run.checkpointing
        else None,
        deepspeed=None if plain else tiny.ds_config(run.hpz or 1, **run.config),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=5,
        **run.arguments,
    )


def train(run: Run) -> dict[str, Any]:
    """Runs on every rank."""
    import transformers

    tiny.forget_clients()
    if run.hpz is None:
        tiny.alone()
    transformers.logging.set_verbosity_error()
    arguments = _arguments(run)  # before the model: from_pretrained then builds it under zero.Init
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model)
    sharded_at_load = all(hasattr(param, "ds_id") for param in model.parameters())
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=tiny.samples(64),
        eval_dataset=tiny.samples(16, start=3),
    )
    trainer.train(resume_from_checkpoint=run.resume)
    log = trainer.state.log_history
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(run.out + "/final")
    weights = tiny.full_weights(trainer.model)
    result = {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in log if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in log if "loss" in entry],
        "eval_losses": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "last_eval": evaluated,
        "best": trainer.state.best_model_checkpoint,
        "sharded_at_load": sharded_at_load,
        "weights": weights,
        "engine": type(trainer.model_wrapped).__name__,
    }
    trainer.accelerator.free_memory()
    tiny.forget_clients()
    return result


def plain(run: Run) -> dict[str, Any]:
    [result] = run_ranks(train, 1, run, init_group=False, timeout=120)
    return result


def sharded(run: Run) -> dict[str, Any]:
    """The result of rank 0, after making sure that the ranks agree."""
    first, *others = run_ranks(train, run.world, run, timeout=180)
    for other in others:
        assert other["losses"] == first["losses"]
        assert all(torch.equal(other["weights"][name], weight) for name, weight in first["weights"].items())
    assert first["engine"] == "DeepSpeedEngine"
    assert first["sharded_at_load"]
    return first


def same_training(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-4) -> None:
    assert got["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert got["norms"] == pytest.approx(expected["norms"], rel=2e-3)
    assert got["rates"] == pytest.approx(expected["rates"])
    assert got["last_eval"] == pytest.approx(expected["last_eval"], abs=tolerance)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=1e-2, atol=2e-3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2"):
        run_ranks(tiny.save_model, 1, str(folder / kind), kind, init_group=False)
    return {kind: str(folder / kind) for kind in ("llama", "gpt2")}


@pytest.fixture(scope="module")
def expected(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plain trainings, by name."""
    out = tmp_path_factory.mktemp("plain")
    return {
        "llama": plain(Run(models["llama"], str(out / "llama"), None, best=True)),
        "llama-accum": plain(Run(models["llama"], str(out / "accum"), None, accum=2, world=2)),
        "gpt2": plain(Run(models["gpt2"], str(out / "gpt2"), None, world=2)),
    }


@pytest.mark.parametrize("hpz", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_train_evaluate_best_model_resume(
    hpz: int, models: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(models["llama"], str(tmp_path), hpz, best=True)
    got = sharded(run)
    same_training(got, expected["llama"])
    assert got["eval_losses"] == pytest.approx(expected["llama"]["eval_losses"], abs=2e-4)
    assert Path(got["best"]).name == Path(expected["llama"]["best"]).name == "checkpoint-2"
    assert got["last_eval"] == pytest.approx(got["eval_losses"][0], abs=1e-6)
    checkpoint = tmp_path / "checkpoint-4"
    assert list(checkpoint.glob("global_step*")) and (checkpoint / "latest").read_text() == "global_step4"
    assert json.loads((tmp_path / "final" / "config.json").read_text())["vocab_size"] == tiny.VOCAB
    saved = run_ranks(read_saved, 1, str(tmp_path / "final"), init_group=False)[0]
    for name, weight in got["weights"].items():
        assert torch.equal(saved[name], weight), name
    resumed = sharded(Run(models["llama"], str(tmp_path), hpz, best=True, resume=str(checkpoint)))
    assert resumed["losses"] == pytest.approx(got["losses"], abs=1e-6)
    assert resumed["last_eval"] == pytest.approx(got["last_eval"], abs=1e-6)


def read_saved(path: str) -> dict[str, torch.Tensor]:
    import transformers

    tiny.alone()
    return dict(transformers.AutoModelForCausalLM.from_pretrained(path).named_parameters())


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("hpz", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradient_checkpointing_and_accumulation(
    checkpointing: str, hpz: int, models: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(models["llama"], str(tmp_path), hpz, world=2, accum=2, checkpointing=checkpointing)
    same_training(sharded(run), expected["llama-accum"])


def test_tied_gpt2(models: dict[str, str], expected: dict[str, Any], tmp_path: Path) -> None:
    same_training(sharded(Run(models["gpt2"], str(tmp_path), 2, world=2)), expected["gpt2"])


def test_optimizer_and_scheduler_of_the_config(models: dict[str, str], tmp_path: Path) -> None:
    """The config's sections on "auto", as in the documentation of transformers; warm-up steps come out as 0."""
    sections = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    }
    got = sharded(Run(models["llama"], str(tmp_path), 2, world=2, config=sections))
    assert got["losses"][-1] < got["losses"][0] - 0.5
    assert got["rates"][-1] == pytest.approx(2e-2)


def test_bf16(models: dict[str, str], tmp_path: Path) -> None:
    run = Run(models["llama"], str(tmp_path), 2, world=2, config={"bf16": {"enabled": True}}, arguments={"bf16": True})
    got = sharded(run)
    assert got["losses"][-1] < got["losses"][0] - 0.5
    assert {weight.dtype for weight in got["weights"].values()} == {torch.bfloat16}


def evaluate_only(path: str, out: str, hpz: int | None) -> dict[str, Any]:
    """Runs on every rank: a Trainer that never trains; transformers drops optimizer and scheduler from the config."""
    import transformers

    tiny.forget_clients()
    if hpz is None:
        tiny.alone()
    transformers.logging.set_verbosity_error()
    arguments = transformers.TrainingArguments(
        output_dir=out,
        per_device_eval_batch_size=2 if hpz else 8,
        deepspeed=tiny.ds_config(hpz) if hpz else None,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    trainer = transformers.Trainer(model=model, args=arguments, eval_dataset=tiny.samples(16, start=3))
    first = trainer.evaluate()["eval_loss"]
    unseen: Any = tiny.samples(8)
    predicted = trainer.predict(unseen)
    again = trainer.evaluate()["eval_loss"]
    trainer.accelerator.free_memory()
    tiny.forget_clients()
    return {"losses": [first, again], "logits": torch.tensor(predicted.predictions)}


@pytest.mark.parametrize("hpz", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_evaluate_and_predict_without_training(hpz: int, models: dict[str, str], tmp_path: Path) -> None:
    [want] = run_ranks(evaluate_only, 1, models["llama"], str(tmp_path / "plain"), None, init_group=False, timeout=120)
    for got in run_ranks(evaluate_only, 4, models["llama"], str(tmp_path / "sharded"), hpz, timeout=120):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-5)
        torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-5, atol=1e-5)
