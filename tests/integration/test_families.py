# SPDX-License-Identifier: Apache-2.0
"""Model families beyond dense decoders: from_pretrained builds them sharded, and they train as in one process.

Mixture of experts, weight norm on a convolution (speech), encoder and decoder with tied embeddings, images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration import tiny

WORLD, MICRO, STEPS = 2, 2, 3
FAMILIES = ("qwen2_moe", "wav2vec2", "t5", "vit")


def config(family: str) -> Any:
    import transformers

    common = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 33}
    if family == "qwen2_moe":
        return transformers.Qwen2MoeConfig(
            **{**common, "hidden_size": 32, "intermediate_size": 36}, vocab_size=131, num_key_value_heads=1,
            moe_intermediate_size=20, shared_expert_intermediate_size=20, num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
    if family == "wav2vec2":
        return transformers.Wav2Vec2Config(
            **common, vocab_size=31, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2),
            num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, layerdrop=0.0,
            hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0,
            final_dropout=0.0, feat_extract_norm="layer", do_stable_layer_norm=True, apply_spec_augment=False,
            ctc_loss_reduction="mean",
        )  # fmt: skip
    if family == "t5":
        return transformers.T5Config(
            vocab_size=131, d_model=20, d_kv=10, d_ff=33, num_layers=2, num_heads=2, decoder_start_token_id=0,
            dropout_rate=0.0,
        )  # fmt: skip
    return transformers.ViTConfig(
        **common, image_size=16, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def auto(family: str) -> Any:
    import transformers

    return {
        "qwen2_moe": transformers.AutoModelForCausalLM,
        "wav2vec2": transformers.AutoModelForCTC,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "vit": transformers.AutoModelForImageClassification,
    }[family]


def batches(family: str) -> list[list[dict[str, torch.Tensor]]]:
    """Per step, the micro-batch of each rank."""
    generator = torch.Generator().manual_seed(5)

    def one() -> dict[str, torch.Tensor]:
        if family == "vit":
            labels = torch.randint(0, 2, (MICRO,), generator=generator)
            return {"pixel_values": torch.randn(MICRO, 3, 16, 16, generator=generator), "labels": labels}
        if family == "wav2vec2":
            labels = torch.randint(1, 30, (MICRO, 4), generator=generator)
            return {"input_values": torch.randn(MICRO, 400, generator=generator), "labels": labels}
        ids = torch.randint(3, 130, (MICRO, 12), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return [[one() for _ in range(WORLD)] for _ in range(STEPS)]


def save(family: str, path: str) -> None:
    torch.manual_seed(3)
    auto(family).from_config(config(family)).save_pretrained(path)


def plain(family: str, path: str) -> list[list[float]]:
    """Losses by step and rank."""
    tiny.forget_clients()
    model = auto(family).from_pretrained(path).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in batches(family):
        optimizer.zero_grad()
        losses = [model(**batch).loss for batch in step]
        torch.stack(losses).mean().backward()
        optimizer.step()
        seen.append([loss.item() for loss in losses])
    return seen


def sharded(family: str, path: str) -> list[float]:
    """Runs on every rank."""
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed

    tiny.forget_clients()
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
        },
    }
    alive = HfDeepSpeedConfig(settings)  # transformers keeps a weak reference
    model = auto(family).from_pretrained(path).train()
    assert all(hasattr(param, "ds_id") for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    for step in batches(family):
        loss = engine(**step[engine.global_rank]).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    del alive
    tiny.forget_clients()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_and_three_steps_equal_one_process(family: str, tmp_path: Path) -> None:
    path = str(tmp_path / family)
    run_ranks(save, 1, family, path, init_group=False, timeout=120)
    expected = run_ranks(plain, 1, family, path, init_group=False, timeout=120)[0]
    for rank, losses in enumerate(run_ranks(sharded, WORLD, family, path, timeout=150)):
        assert losses == pytest.approx([step[rank] for step in expected], rel=2e-5), f"rank {rank}"
