# SPDX-License-Identifier: Apache-2.0
"""A compact Llama that every variant trains: the architecture of transformers' LlamaForCausalLM, without the package.

What must hold: no registered buffers and no cast inside that depends on a parameter's dtype, so that every variant
computes the same function; ``build`` gives the same weights for the same seed, already rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of one Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def block_numel(self) -> int:
        """Parameters of one block."""
        kv = self.hidden // self.heads * self.kv_heads
        return 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.layers * self.block_numel + 2 * self.vocab * self.hidden + self.hidden


SHAPES = {
    "tiny": LlamaShape(64, 2, 4, 2, 128, 256),
    "30m": LlamaShape(512, 6, 8, 8, 1376, 10000),
    "853m": LlamaShape(2048, 16, 16, 4, 5632, 32000),
    "3b": LlamaShape(3072, 26, 24, 8, 8192, 32000),
    "8b": LlamaShape(4096, 32, 32, 8, 14336, 128256),
}


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.dim = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = _rotate(self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer block; recomputes its inside in the backward where ``checkpointing`` is set."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = MLP(shape)
        self.checkpointing = False

    def _inside(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.checkpointing and self.training:
            return checkpoint(self._inside, x, cos, sin, use_reentrant=False)
        return self._inside(x, cos, sin)


class Llama(nn.Module):
    """Token ids and labels (batch, length) in, mean loss out."""

    def __init__(self, shape: LlamaShape, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self._rotary: dict[tuple[int, torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        for block in self.layers:
            block.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self._positions(tokens.shape[1], x)
        for block in self.layers:
            x = block(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))

    def _positions(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = (length, like.device, like.dtype)
        if key not in self._rotary:
            half = self.shape.hidden // self.shape.heads // 2
            rates = 10000.0 ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
            angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * rates
            angles = torch.cat([angles, angles], -1)
            self._rotary[key] = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        return self._rotary[key]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def build(
    shape: LlamaShape,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool = False,
    rounding: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Llama:
    """A Llama on ``device`` in ``dtype`` whose initial weights, rounded to ``rounding``, depend on the seed only."""
    with torch.device("meta"):
        model = Llama(shape, checkpointing)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.fill_(1.0)
            else:
                values = torch.empty(param.shape, device=device, dtype=torch.float32)
                param.copy_(values.normal_(0.0, 0.02, generator=generator).to(rounding))
    return model


def batches(
    vocab: int,
    micro: int,
    length: int,
    accumulation: int,
    rank: int,
    step: int,
    device: torch.device,
    distinct: int = 3,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one step on one rank: (tokens, labels), (micro, length) int64.

    ``distinct`` batches come round again and again, so that the loss falls and a wrong step shows.
    """
    found = []
    for index in range(accumulation):
        seed = ((step % distinct) * 1009 + index) * 1009 + rank
        ids = torch.randint(0, vocab, (micro, length + 1), generator=torch.Generator().manual_seed(seed))
        ids = ids.to(device)
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return found
