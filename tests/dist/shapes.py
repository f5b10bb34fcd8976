# SPDX-License-Identifier: Apache-2.0
"""Shapes that autograd graphs take in real code: one function each, written once and run twice.

A shape is a model and a function `(model, backward, step, rank) -> losses` that does the forwards and backwards of one
optimizer step. Plain torch runs it per rank and averages gradients; ranks run it on an engine. Nothing here knows of
sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.harness import models

Backward = Callable[..., Any]
Step = Callable[[Any, Backward, int, int], Sequence[Tensor]]
WIDTH = 15


@dataclasses.dataclass(frozen=True)
class Shape:
    build: Callable[[], nn.Module]
    step: Step
    prepare: Callable[[nn.Module], None] | None = None


def hidden_batch(step: int, rank: int, width: int = WIDTH) -> Tensor:
    """A batch [3, width] of fp32 numbers, a function of step and rank."""
    generator = torch.Generator().manual_seed(7919 * step + 13 * rank + 1)
    return torch.randn(3, width, generator=generator)


def one_loss(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(*models.batch(step, rank))
    backward(loss)
    return [loss]


def one_loss_by_rank(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(*models.batch_by_rank(step, rank))
    backward(loss)
    return [loss]


def one_hidden_loss(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(hidden_batch(step, rank))
    backward(loss)
    return [loss]


def two_forwards_one_backward(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(*models.batch(step, rank)) + 0.5 * model(*models.batch(step, rank, 1))
    backward(loss)
    return [loss]


def two_forwards_two_backwards(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    first, second = model(*models.batch(step, rank)), model(*models.batch(step, rank, 1))
    backward(first)
    backward(second)
    return [first, second]


def retained_graph(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(*models.batch(step, rank))
    backward(loss, retain_graph=True)
    backward(loss)
    return [loss]


def evaluation_in_between(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    with torch.no_grad():
        before = model(*models.batch(step, rank, 3))
    first = model(*models.batch(step, rank))
    backward(first)
    model.eval()
    with torch.no_grad():
        between = model(*models.batch(step, rank, 4))
    model.train()
    with torch.inference_mode():
        inferred = model(*models.batch(step, rank, 5))
    second = model(*models.batch(step, rank, 1))
    backward(second)
    return [before, first, between, inferred.clone(), second]


def evaluation_between_forward_and_backward(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(*models.batch(step, rank))
    with torch.no_grad():
        inside = model(*models.batch(step, rank, 1))
    backward(loss)
    return [loss, inside]


def children_by_themselves(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    """The parts are called, never the whole."""
    inner = model.module if hasattr(model, "module") else model
    tokens, targets = models.batch(step, rank)
    hidden = inner.embed(tokens)
    for layer in inner.layers:
        hidden = layer(hidden)
    loss = F.cross_entropy(inner.head(inner.norm(hidden)).flatten(0, 1), targets.flatten())
    backward(loss)
    return [loss]


def child_beside_the_whole(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    """A forward of the whole and one of a child, one loss (an auxiliary head)."""
    inner = model.module if hasattr(model, "module") else model
    tokens, targets = models.batch(step, rank)
    loss = model(tokens, targets)
    loss = loss + inner.head(inner.embed(tokens)).square().mean()
    backward(loss)
    return [loss]


class Unused(models.Blocks):
    """Has a branch that no forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 9)
        self.layers[1].spare = nn.Linear(7, 3)
        self.loose = nn.Parameter(torch.ones(5))


class External(nn.Module):
    """The embedding's weight is the head's, by use rather than by name; `use` says how it is touched."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(tokens)))
        weight = self.embed.weight
        if self.use == "T":
            logits = hidden @ weight.T
        elif self.use == "t()":
            logits = hidden @ weight.t()
        elif self.use == "linear":
            logits = F.linear(hidden, weight)
        elif self.use == "to":
            logits = F.linear(hidden, weight.to(hidden.dtype))
        elif self.use == "clone":
            logits = F.linear(hidden, weight.clone())
        elif self.use == "view":
            logits = F.linear(hidden, weight.view(models.VOCAB, -1))
        elif self.use == "index":
            logits = F.linear(hidden, weight[:])
        elif self.use == "einsum":
            logits = torch.einsum("bsh,vh->bsv", hidden, weight)
        else:
            logits = torch.matmul(hidden, torch.cat([weight[:5], weight[5:]]).transpose(0, 1))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SharedLayer(nn.Module):
    """One block used three times, some of them recomputed."""

    def __init__(self, recompute: str | None = None, frozen_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, WIDTH)
        self.layer = models.Block(WIDTH, 7)
        self.head = nn.Linear(WIDTH, models.VOCAB)
        self.recompute = recompute
        if frozen_norm:
            self.layer.norm.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for _ in range(3):
            if self.recompute is None:
                hidden = self.layer(hidden)
            else:
                hidden = checkpoint(self.layer, hidden, use_reentrant=self.recompute == "reentrant")
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Inverse(nn.Module):
    """The last block in module order is used first, and the first one twice at the end: reductions come late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.detach().requires_grad_(True)
        hidden = checkpoint(self.third, hidden, use_reentrant=True).tanh()
        hidden = checkpoint(self.first, hidden, use_reentrant=True).tanh()
        hidden = self.second(hidden).tanh()
        hidden = checkpoint(self.first, hidden, use_reentrant=True).tanh()
        return checkpoint(self.third, hidden, use_reentrant=True).square().mean()


class Branches(nn.Module):
    """Steps alternate between two branches; both have a parameter of their own that not every branch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left = models.Block(WIDTH, 7)
        self.right = models.Block(WIDTH, 9)
        self.tail = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor, left: bool) -> Tensor:
        return self.tail((self.left if left else self.right)(hidden)).square().mean()


def alternating(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(hidden_batch(step, rank), step % 2 == 0)
    backward(loss)
    return [loss]


class Routed(nn.Module):
    """Every block is used twice and routes by the data: some ranks use all of its branches, others one."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def forward(self, hidden: Tensor, choice: int) -> Tensor:
            """Choice 0 uses every branch, any other one of them."""
            normed = self.norm(hidden)
            if choice == 0:
                return hidden + sum(branch(normed) for branch in self.branches)
            return hidden + self.branches[choice](normed)

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Routed.Router() for _ in range(3)])
        self.tail = nn.Linear(WIDTH, 3)
        self.recompute = recompute

    def forward(self, hidden: Tensor, choice: int) -> Tensor:
        hidden = self.head(hidden)
        for block in [block for block in self.blocks for _ in range(2)]:
            if self.recompute is None:
                hidden = block(hidden, choice)
            else:
                hidden = checkpoint(block, hidden, choice, use_reentrant=self.recompute == "reentrant")
        return self.tail(hidden).square().mean()


def routed(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    loss = model(hidden_batch(step, rank), (step + rank) % 4)
    backward(loss)
    return [loss]


def mark_routers(module: nn.Module) -> None:
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(module, [Routed.Router])


@dataclasses.dataclass
class Out:
    loss: Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Blocks pass tuples, dicts and dataclasses on; one output of a block is never used."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, *, state: dict[str, Any]) -> dict[str, Any]:
            hidden = self.a(state["hidden"]).tanh()
            return {"hidden": hidden, "side": (state["side"][0] + self.b(hidden).mean(), None)}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Nested.Pair() for _ in range(3)])

    def forward(self, hidden: Tensor) -> Out:
        state: dict[str, Any] = {"hidden": hidden, "side": (hidden.new_zeros(()), None)}
        for layer in self.layers:
            state = layer(state=state)
        return Out(state["hidden"].square().mean() + state["side"][0], {"hidden": [state["hidden"]]})


def nested(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    out = model(hidden_batch(step, rank))
    assert isinstance(out, Out) and out.rest["hidden"][0].shape == (3, WIDTH)
    backward(out.loss)
    return [out.loss, out.rest["hidden"][0].sum()]


class Lender(nn.Module):
    """A child returns its own weight, or a view of it, to its parent."""

    class Weight(nn.Module):
        def __init__(self, view: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH))
            self.view = view

        def forward(self) -> Tensor:
            return self.weight[1:6] if self.view else self.weight

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.lend = Lender.Weight(view)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.lend()
        return F.linear(self.layer(hidden).tanh(), weight).square().mean()


class Lists(nn.Module):
    """Parameters in lists and dicts of the root, a buffer, a scalar, a batch norm and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 0.1 * i)) for i in range(3)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.tensor(1.5))})
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        self.head.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        for row in self.rows:
            hidden = hidden + row
        return self.head(hidden * self.named["gain"]).square().mean()


class Attention(nn.Module):
    """Torch's own layers, whose forwards use weights of children that they never call; a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 3, 11, dropout=0.0, batch_first=True)
        self.recurrent = nn.GRU(WIDTH, 5, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.encoder(hidden.unsqueeze(0)))
        return self.head(hidden).square().mean()


class Teacher(nn.Module):
    """Part of the forward runs without gradients on weights that are trained elsewhere in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.Block(WIDTH, 7)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.head(self.body(hidden + 1))
        return (self.head(self.body(hidden)) - target).square().mean()


def input_gradient(model: Any, backward: Backward, step: int, rank: int) -> list[Tensor]:
    """The gradient of the input is wanted, too."""
    hidden = hidden_batch(step, rank).requires_grad_(True)
    loss = model(hidden)
    backward(loss)
    assert hidden.grad is not None
    return [loss, hidden.grad.sum()]


class Squared(torch.autograd.Function):
    """Saves the weight itself and computes with it in its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grad @ weight.square().T, 2 * weight * (hidden.T @ grad)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH * 4).view(WIDTH, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return Squared.apply(self.body(hidden), self.weight).square().mean()


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, _targets: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).square().mean()


def built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: models.seeded(make)


SHAPES: dict[str, Shape] = {
    "unused": Shape(built(Unused), one_loss),
    "frozen": Shape(models.frozen, one_loss),
    "frozen, recomputed": Shape(models.frozen_non_reentrant, one_loss),
    "frozen, recomputed reentrantly": Shape(built(lambda: models.Frozen(recompute="reentrant")), one_loss),
    "recomputed": Shape(models.blocks_non_reentrant, one_loss),
    "recomputed reentrantly": Shape(models.blocks_reentrant, one_loss),
    "tied": Shape(models.tied, one_loss),
    "experts by rank": Shape(models.conditional, one_loss_by_rank),
    "routed leaves": Shape(built(Routed), routed, mark_routers),
    "routed leaves, recomputed": Shape(built(lambda: Routed("non-reentrant")), routed, mark_routers),
    "routed leaves, reentrant": Shape(built(lambda: Routed("reentrant")), routed, mark_routers),
    "two forwards, one backward": Shape(models.blocks, two_forwards_one_backward),
    "two forwards, one backward, frozen": Shape(models.frozen, two_forwards_one_backward),
    "two forwards, two backwards": Shape(models.blocks, two_forwards_two_backwards),
    "two forwards, two backwards, recomputed": Shape(models.blocks_non_reentrant, two_forwards_two_backwards),
    "retained graph": Shape(models.blocks, retained_graph),
    "retained graph, frozen": Shape(models.frozen, retained_graph),
    "evaluation in between": Shape(models.blocks, evaluation_in_between),
    "evaluation in between, tied": Shape(models.tied, evaluation_in_between),
    "evaluation before backward": Shape(models.uneven, evaluation_between_forward_and_backward),
    "children by themselves": Shape(models.blocks, children_by_themselves),
    "child beside the whole": Shape(models.blocks, child_beside_the_whole),
    "shared layer": Shape(built(SharedLayer), one_loss),
    "shared layer, recomputed": Shape(built(lambda: SharedLayer("non-reentrant")), one_loss),
    "shared layer, recomputed reentrantly": Shape(built(lambda: SharedLayer("reentrant")), one_loss),
    "shared layer, frozen norm": Shape(built(lambda: SharedLayer(None, True)), one_loss),
    "shared layer, frozen norm, reentrant": Shape(built(lambda: SharedLayer("reentrant", True)), one_loss),
    "late reductions": Shape(built(Inverse), one_hidden_loss),
    "branches": Shape(built(Branches), alternating),
    "nested outputs": Shape(built(Nested), nested),
    "returned weight": Shape(built(lambda: Lender(False)), one_hidden_loss),
    "returned view": Shape(built(lambda: Lender(True)), one_hidden_loss),
    "lists": Shape(built(Lists), one_hidden_loss),
    "torch layers": Shape(built(Attention), one_hidden_loss),
    "teacher inside": Shape(built(Teacher), one_hidden_loss),
    "input gradient": Shape(built(Teacher), input_gradient),
    "custom function": Shape(built(Custom), one_hidden_loss),
    "sparse gradient": Shape(built(SparseEmbedding), one_loss),
    **{
        f"external by {use}": Shape(built(lambda use=use: External(use)), one_loss)
        for use in ("T", "t()", "linear", "to", "clone", "view", "index", "einsum", "cat")
    },
}
