# SPDX-License-Identifier: Apache-2.0
"""Embeddings resized after from_pretrained under zero.Init: old rows kept on every rank, new rows agreed on, training
goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration import tiny


def resize(path: str, hpz: int, size: int) -> dict[str, Any]:
    """Runs on every rank: load sharded, resize, train one step; returns full weights of each moment."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed

    tiny.forget_clients()
    transformers.logging.set_verbosity_error()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    holder = HfDeepSpeedConfig(config)  # alive while the model is built
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    before = tiny.full_weights(model)
    model.resize_token_embeddings(size)
    resized = tiny.full_weights(model)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    rank = engine.global_rank
    rows = tiny.samples(2, start=2 * rank)
    batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    batch = {key: value.clamp(max=size - 1) for key, value in batch.items()}
    losses = []
    for _ in range(2):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    after = tiny.full_weights(engine.module)
    result = {
        "before": before,
        "resized": resized,
        "after": after,
        "losses": losses,
        "vocab": model.config.vocab_size,
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }
    engine.destroy()
    del holder
    tiny.forget_clients()
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        run_ranks(tiny.save_model, 1, str(folder / str(tied)), "llama", tied, init_group=False)
    return {tied: str(folder / str(tied)) for tied in (False, True)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [tiny.VOCAB + 6, 131])
def test_resize_keeps_old_rows_and_trains(models: dict[bool, str], size: int, tied: bool, tmp_path: Path) -> None:
    world = 4
    by_hpz = {hpz: run_ranks(resize, world, models[tied], hpz, size, timeout=120) for hpz in (1, 2)}
    for results in by_hpz.values():
        kept = min(size, tiny.VOCAB)
        for got in results:
            assert got["vocab"] == size and got["tied"] == tied
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                if name in got["resized"]:
                    assert got["resized"][name].shape == (size, 20)
                    assert torch.equal(got["resized"][name][:kept], got["before"][name][:kept])
            assert ("lm_head.weight" in got["resized"]) == (not tied)
            for moment in ("resized", "after"):
                for name, weight in got[moment].items():
                    assert torch.equal(weight, results[0][moment][name]), (moment, name)
            for name, weight in got["after"].items():
                assert not torch.equal(weight, got["resized"][name]), f"{name} did not train"
            assert got["losses"][1] < got["losses"][0]
    for one, two in zip(by_hpz[1], by_hpz[2], strict=True):
        assert one["losses"][0] == two["losses"][0] or size > tiny.VOCAB  # new rows are drawn at random
        if size < tiny.VOCAB:
            assert one["losses"] == two["losses"]
