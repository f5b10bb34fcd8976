# SPDX-License-Identifier: Apache-2.0
"""LoRA through PEFT and the Trainer: frozen sharded weights, recomputation, adapters saved at full size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.skips import needs
from tests.integration import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason=needs("peft"))
WORLD = 4


def lora(path: str, out: str, hpz: int | None, checkpointing: bool) -> dict[str, Any]:
    """Runs on every rank. `hpz` None: plain, one process, the global batch."""
    import peft
    import transformers

    tiny.forget_clients()
    if hpz is None:
        tiny.alone()
    transformers.logging.set_verbosity_error()
    arguments = transformers.TrainingArguments(
        output_dir=out,
        max_steps=4,
        per_device_train_batch_size=2 * WORLD if hpz is None else 2,
        learning_rate=5e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        deepspeed=None if hpz is None else tiny.ds_config(hpz),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(21)
    model = peft.get_peft_model(
        base,
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]),
    )
    # Known adapters: their random initial values depend on who draws them.
    for index, (name, param) in enumerate(sorted(model.named_parameters(), key=lambda item: item[0])):
        if "lora_A" in name:
            _set(param, 0.05 * torch.randn(_shape(param), generator=torch.Generator().manual_seed(index)))
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=tiny.samples(64))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(out + "/adapter")
    weights = tiny.full_weights(trainer.model)
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    trainer.accelerator.free_memory()
    tiny.forget_clients()
    return {"losses": losses, "weights": weights, "frozen": frozen}


def _shape(param: torch.nn.Parameter) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)


def _set(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    if not hasattr(param, "ds_id"):
        param.data.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            param.data.copy_(value)


def read_adapter(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path + "/adapter_model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("models") / "llama")
    run_ranks(tiny.save_model, 1, path, init_group=False)
    return path


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(lora, 1, model, str(tmp_path_factory.mktemp("plain")), None, False, init_group=False)[0]


@pytest.mark.parametrize(
    ("hpz", "checkpointing"), [pytest.param(1, False, marks=pytest.mark.slow), (2, False), (2, True)]
)
def test_lora_equals_plain_and_saves_full_tensors(
    hpz: int, checkpointing: bool, model: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(lora, WORLD, model, str(tmp_path), hpz, checkpointing, timeout=150)
    for got in results:
        assert got["losses"] == pytest.approx(expected["losses"], abs=2e-4)
        assert got["frozen"] == expected["frozen"] and got["frozen"]
    weights = results[0]["weights"]
    for name, weight in expected["weights"].items():
        if name in expected["frozen"]:
            assert torch.equal(weights[name], weight), name
        else:
            torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=2e-3)
    saved = read_adapter(str(tmp_path / "adapter"))
    for name, tensor in saved.items():
        inside = name.replace(".weight", ".default.weight") if "lora_" in name else None
        if inside is not None:
            assert torch.equal(tensor, weights[inside]), name
        else:
            assert tensor.shape == (tiny.VOCAB, 20), name
    checkpoint = read_adapter(str(tmp_path / "checkpoint-4"))
    assert {name: tensor.shape for name, tensor in checkpoint.items()} == {n: t.shape for n, t in saved.items()}
