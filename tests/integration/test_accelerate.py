# SPDX-License-Identifier: Apache-2.0
"""accelerate's own loop over ZeRO-3: prepare, accumulate, clip, save_state, load_state, get_state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration import tiny

WORLD = 4
ROUNDS = 3


def _loader(batch: int) -> torch.utils.data.DataLoader[Any]:
    rows = tiny.samples(48)
    data = torch.utils.data.TensorDataset(torch.tensor([row["input_ids"] for row in rows]))
    return torch.utils.data.DataLoader(data, batch_size=batch, shuffle=False)


def plain(path: str) -> dict[str, Any]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    batches = [ids for (ids,) in _loader(2 * WORLD)]
    for first, second in zip(batches[0::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        for ids in (first, second):
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return {"losses": losses, "norms": norms, "weights": tiny.full_weights(model)}


def loop(path: str, out: str, hpz: int) -> dict[str, Any]:
    """Runs on every rank."""
    import transformers
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin

    tiny.forget_clients()
    PartialState(cpu=True)
    section = tiny.ds_config(hpz, gradient_clipping=0.5, train_micro_batch_size_per_gpu=2)
    section["zero_optimization"] = {
        key: value for key, value in section["zero_optimization"].items() if value != "auto"
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=section, gradient_accumulation_steps=2),
        gradient_accumulation_steps=2,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, _loader(2), scheduler)
    losses, norms, skipped = [], [], []
    batches = [ids for (ids,) in loader]

    def run(some: list[torch.Tensor], keep: bool) -> list[float]:
        seen = []
        for ids in some:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    if keep:
                        norms.append(float(norm))
                optimizer.step()
                skipped.append(optimizer.step_was_skipped)
                scheduler.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        return seen

    losses += run(batches[:4], keep=True)
    accelerator.save_state(out)
    rest = run(batches[4:], keep=True)
    weights = {name: tensor.clone() for name, tensor in (accelerator.get_state_dict(model) or {}).items()}
    accelerator.load_state(out)
    again = run(batches[4:], keep=False)
    unwrapped = accelerator.unwrap_model(model)
    result = {
        "losses": losses + rest,
        "again": again,
        "rest": rest,
        "norms": norms,
        "weights": weights,
        "skipped": any(skipped),
        "unwrapped": type(unwrapped).__name__,
        "kind": type(model).__name__,
    }
    accelerator.end_training()
    accelerator.free_memory()
    tiny.forget_clients()
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("models") / "llama")
    run_ranks(tiny.save_model, 1, path, init_group=False)
    return path


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    return run_ranks(plain, 1, model, init_group=False)[0]


@pytest.mark.parametrize("hpz", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loop_equals_plain_torch_and_state_comes_back(
    hpz: int, model: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(loop, WORLD, model, str(tmp_path), hpz, timeout=150)
    for rank, got in enumerate(results):
        assert got["losses"] == pytest.approx(expected["losses"], abs=2e-4)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        assert got["again"] == pytest.approx(got["rest"], abs=1e-6)
        assert not got["skipped"]
        assert (got["kind"], got["unwrapped"]) == ("DeepSpeedEngine", "LlamaForCausalLM")
        assert bool(got["weights"]) == (rank == 0)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-2, atol=2e-3)


def dummies(path: str, out: str) -> dict[str, Any]:
    """Runs on every rank: optimizer and scheduler of the config stand behind accelerate's dummies; 16-bit save at the
    end."""
    import transformers
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    tiny.forget_clients()
    PartialState(cpu=True)
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "bf16": {"enabled": True},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=tiny.ds_config(2, **sections)))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=2, total_num_steps=12)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, _loader(2), scheduler)
    losses, rates = [], []
    for _ in range(2):
        for (ids,) in loader:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(scheduler.get_last_lr()[0])
    accelerator.unwrap_model(model).save_pretrained(
        out,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    shapes = {name: (tuple(weight.shape), weight.dtype) for name, weight in tiny.full_weights(model.module).items()}
    accelerator.free_memory()
    tiny.forget_clients()
    return {"losses": losses, "rates": rates, "shapes": shapes}


def test_dummies_and_save_pretrained(model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    results = run_ranks(dummies, WORLD, model, str(tmp_path), timeout=150)
    for got in results:
        assert got["losses"][-1] < got["losses"][0] - 0.3
        assert max(got["rates"]) == pytest.approx(1e-2) and got["rates"][-1] < 1e-2
    saved = load_file(str(tmp_path / "model.safetensors"))
    assert {name: (tuple(weight.shape), weight.dtype) for name, weight in saved.items()} == results[0]["shapes"]
