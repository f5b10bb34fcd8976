# SPDX-License-Identifier: Apache-2.0
"""A tiny model with every awkward feature, and its data; plain torch only.

Used by the golden generator (which runs upstream as a black box), by the reverse run and by the tests, so that all
three build the same weights and see the same batches.  Sizes are odd, so that every shard has padding.
"""

from __future__ import annotations

import torch
from torch import nn

VOCAB, HIDDEN, WIDE = 13, 7, 11


class TinyLM(nn.Module):
    """Embedding, two linears, a norm, parameters of 1 and 3 elements, a buffer; optionally tied head, frozen layer."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, WIDE)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(WIDE)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.mix = nn.Parameter(torch.tensor([0.5, 0.3, 0.2]))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=not tied)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, HIDDEN))
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.norm.requires_grad_(False)
            self.down.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        h = self.down(torch.tanh(self.norm(self.up(x)))) * self.gain
        y = x * self.mix[0] + h * self.mix[1] + self.mix[2] * self.scale.to(x.dtype)
        return nn.functional.cross_entropy(self.head(y).float().flatten(0, 1), labels.flatten())


def build(seed: int = 7, tied: bool = False, frozen: bool = False) -> TinyLM:
    """The model with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    return TinyLM(tied=tied, frozen=frozen)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of one rank at one step, int64 [4, 5]."""
    gen = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, (4, 6), generator=gen)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def param_groups(model: nn.Module, lr: float) -> list[dict]:
    """Two groups, weight decay on matrices only, as every trainer builds them."""
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1, "lr": lr}, {"params": plain, "weight_decay": 0.0, "lr": lr}]


VARIANTS: dict[str, dict] = {
    "fp32": {
        "model": {},
        "groups": False,
        "config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}},
    },
    "bf16_groups": {
        "model": {"tied": True, "frozen": True},
        "groups": True,
        "config": {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}},
            "zero_optimization": {"sub_group_size": 30},
        },
    },
    "fp16_scaler": {
        "model": {"frozen": True},
        "groups": False,
        "config": {
            "fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"sub_group_size": 40},
        },
    },
}


def config(variant: str) -> dict:
    """The configuration of a variant, complete."""
    chosen = {key: value for key, value in VARIANTS[variant]["config"].items() if key != "zero_optimization"}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        **VARIANTS[variant]["config"].get("zero_optimization", {}),
    }
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": zero, **chosen}
