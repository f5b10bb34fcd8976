# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose shapes divide by nothing, and data that depends on (step, rank, micro-batch) alone.

Every model's forward takes the batch and returns the mean loss over it, so that a trainer needs to know nothing else.
Builders are module-level functions without arguments beyond a seed: worker processes call them by name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB = 13
Batch = tuple[Tensor, Tensor]


def seeded(build: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """Build with fixed initial weights, leaving the global generator as it was."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        return build()
    finally:
        torch.set_rng_state(state)


class Uneven(nn.Module):
    """The H4 model: none of its dimensions 13, 33, 3, 1 divides by 4; two loose parameters of 1 and 3 elements."""

    def __init__(self, loose: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.up = nn.Linear(16, 33)
        self.down = nn.Linear(33, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCAB)
        self.scale = nn.Parameter(torch.ones(1)) if loose else None
        self.shift = nn.Parameter(torch.zeros(3)) if loose else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(F.gelu(self.up(hidden))))
        if self.scale is not None and self.shift is not None:
            hidden = hidden * self.scale + self.shift.sum()
        return F.cross_entropy(self.head(hidden).flatten(0, -2).float(), targets.flatten())


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Blocks(nn.Module):
    """Repeated blocks, as in a transformer; `recompute` None, "reentrant" or "non-reentrant" checkpoints each block."""

    def __init__(self, depth: int = 3, width: int = 15, inner: int = 7, recompute: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList([Block(width, inner) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            if self.recompute is not None and self.training:
                hidden = checkpoint(layer, hidden, use_reentrant=self.recompute == "reentrant")
            else:
                hidden = layer(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, -2).float(), targets.flatten())


class Both(Blocks):
    """Returns the loss and the logits that it was computed from, as models of transformers do."""

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return {"loss": F.cross_entropy(logits.flatten(0, -2), targets.flatten()), "logits": logits}


class Tied(Blocks):
    """The head's weight is the embedding's."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth=depth)
        self.head.weight = self.embed.weight


class Frozen(Blocks):
    """The first block and every LayerNorm are frozen."""

    def __init__(self, depth: int = 3, recompute: str | None = None) -> None:
        super().__init__(depth=depth, recompute=recompute)
        self.layers[0].requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.requires_grad_(False)


class Conditional(nn.Module):
    """Experts of equal shape, of which the batch chooses one by its first token: ranks run different code."""

    def __init__(self, experts: int = 4, width: int = 15) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        chosen = self.experts[int(tokens.flatten()[0]) % len(self.experts)]
        return F.cross_entropy(self.head(hidden + chosen(hidden)).flatten(0, -2).float(), targets.flatten())


def uneven() -> nn.Module:
    return seeded(Uneven)


def blocks() -> nn.Module:
    return seeded(Blocks)


def blocks_reentrant() -> nn.Module:
    return seeded(lambda: Blocks(recompute="reentrant"))


def blocks_non_reentrant() -> nn.Module:
    return seeded(lambda: Blocks(recompute="non-reentrant"))


def tied() -> nn.Module:
    return seeded(Tied)


def frozen() -> nn.Module:
    return seeded(Frozen)


def frozen_non_reentrant() -> nn.Module:
    return seeded(lambda: Frozen(recompute="non-reentrant"))


def conditional() -> nn.Module:
    return seeded(Conditional)


def batch(step: int, rank: int, micro: int = 0, size: int = 2, length: int = 5) -> Batch:
    """Tokens and targets [size, length], int64, a function of the arguments alone."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1_009 * rank + 31 * micro + 5)
    drawn = torch.randint(0, VOCAB, (2, size, length), generator=generator)
    return drawn[0], drawn[1]


def batch_by_rank(step: int, rank: int, micro: int = 0) -> Batch:
    """Like `batch`, but the first token is the rank, so that `Conditional` takes another expert on each rank."""
    tokens, targets = batch(step, rank, micro)
    tokens[0, 0] = rank
    return tokens, targets
