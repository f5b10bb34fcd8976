# SPDX-License-Identifier: Apache-2.0
"""Tiny language models built from configurations, bytes as data, and what every client test needs in a worker.

Nothing is downloaded. Hidden sizes and vocabularies are uneven on purpose; dropout is off, so that a run over W ranks
equals one process with a W times larger batch.
"""

from __future__ import annotations

import os
from typing import Any

import torch

VOCAB = 259
LENGTH = 16
TEXT = (
    b"A sharded parameter is gathered before it is used and released after; its gradient is reduced to the shard that "
    b"owns it, the master weights take a step, and the next version of the shard is what the next gather returns. "
) * 6


def samples(count: int, start: int = 0) -> list[dict[str, list[int]]]:
    """`count` windows of LENGTH bytes, each its own target."""
    windows = [list(TEXT[(start + 7 * i) % 600 :][:LENGTH]) for i in range(count)]
    return [{"input_ids": window, "labels": window, "attention_mask": [1] * LENGTH} for window in windows]


def config(kind: str = "llama", tied: bool = False) -> Any:
    import transformers

    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=20, n_layer=2, n_head=2, n_inner=33,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    return transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=20, intermediate_size=33, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip


def save_model(path: str, kind: str = "llama", tied: bool = False) -> None:
    """Write a randomly initialised model, always the same one, as a client would publish it."""
    import transformers

    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config(kind, tied)).save_pretrained(path)


def ds_config(hpz: int = 1, **extra: Any) -> dict[str, Any]:
    """A ZeRO-3 section as users write it, everything that clients fill in left on "auto"."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        **extra,
    }


def forget_clients() -> None:
    """Drop what accelerate and transformers keep per process; a worker serves many tests."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def alone() -> None:
    """Make this worker a process that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter of a model, gathered where it is sharded. A collective."""
    if not any(hasattr(param, "ds_id") for param in model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    import deepspeed

    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found
