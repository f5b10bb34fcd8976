# SPDX-License-Identifier: Apache-2.0
"""A tiled linear layer computes what the one large layer does: outputs, gradients, sharded or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias, split_sizes
from tests.harness import run_ranks
from tests.zero.squares import train_plain, train_sharded

IN, OUT = 13, 33  # neither divides by the numbers of tiles below


def _grads(tiled: TiledLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the tiles, put together as the one large layer has them."""
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    biases = [row[-1].bias.grad for row in tiled.linears if row[-1].bias is not None]
    return torch.cat(rows), torch.cat(biases) if biases else None


@pytest.mark.parametrize("total", [4, 5, 7])
def test_sizes_cover_everything_and_differ_by_at_most_one(total: int) -> None:
    sizes = split_sizes(total, 4)
    assert sum(sizes) == total and len(sizes) == 4 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 1), (1, 4), (3, 4), (13, 33)])
def test_equals_the_large_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    large = nn.Linear(IN, OUT, bias=bias).double()
    tiled = TiledLinear(
        IN, OUT, bias, in_splits=in_splits, out_splits=out_splits, init_linear=large, dtype=torch.float64
    )
    x = torch.randn(2, 5, IN, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), large(x), rtol=1e-12, atol=1e-12)
    large(x).square().sum().backward()
    tiled(x).square().sum().backward()
    weight, bias_grad = _grads(tiled)
    torch.testing.assert_close(weight, large.weight.grad, rtol=1e-12, atol=1e-12)
    assert (bias_grad is None) == (not bias)
    if bias:
        torch.testing.assert_close(bias_grad, large.bias.grad, rtol=1e-12, atol=1e-12)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in large.parameters())


def test_split_input_and_pieces_of_the_output() -> None:
    large = nn.Linear(IN, OUT)
    tiled = TiledLinear(
        IN, OUT, in_splits=2, out_splits=3, input_is_already_split=True, combine_out_splits=False, init_linear=large
    )
    x = torch.randn(5, IN)
    pieces = tiled(x.split(tiled.in_sizes, dim=-1))
    assert [piece.shape[-1] for piece in pieces] == [11, 11, 11]
    torch.testing.assert_close(torch.cat(pieces, dim=-1), large(x))
    with pytest.raises(UsageError, match="in_splits = 2"):
        tiled([x])


class _Apart(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, input: torch.Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_bias_is_returned(bias: bool) -> None:
    large = nn.Linear(IN, OUT, bias=bias)
    options: dict[str, Any] = {"bias": bias, "in_splits": 3, "out_splits": 2, "linear_cls": _Apart}
    x = torch.randn(4, IN)
    output, given = TiledLinearReturnBias(IN, OUT, init_linear=large, **options)(x)
    torch.testing.assert_close(output if given is None else output + given, large(x))
    assert (given is None) == (not bias)
    tiled = TiledLinearReturnBias(IN, OUT, init_linear=large, combine_out_splits=False, **options)
    outputs, biases = tiled(x)
    assert len(outputs) == 2 and (len(biases) == 2 if bias else biases is None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TiledLinear(IN, OUT, in_splits=14), "1 to 13"),
        (lambda: TiledLinear(IN, OUT, out_splits=0), "1 to 33"),
        (lambda: TiledLinear(IN, OUT, init_linear=nn.Linear(OUT, IN)), "shape"),
        (lambda: TiledLinear(IN, OUT, init_linear=nn.Linear(IN, OUT, bias=False)), "bias is True"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def sharded(hpz: int) -> dict[str, Any]:
    """Runs on every rank: tiles made under zero.Init from a sharded layer, two steps; full weights afterwards."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_param_persistence_threshold": 0,
        },
    }
    torch.manual_seed(7)
    large = nn.Linear(IN, OUT)
    with deepspeed.zero.Init(config_dict_or_path=config):
        copied = nn.Linear(IN, OUT)
        with deepspeed.zero.GatheredParameters(list(copied.parameters()), modifier_rank=0):
            copied.load_state_dict(large.state_dict())
        tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=3, init_linear=copied)
    assert all(hasattr(p, "ds_id") for p in tiled.parameters())
    return {"losses": train_sharded(tiled, config, _parts())}


def _parts() -> torch.Tensor:
    return torch.randn(4, 3, IN, generator=torch.Generator().manual_seed(3))


def plain() -> list[list[float]]:
    torch.manual_seed(7)
    return train_plain(nn.Linear(IN, OUT), _parts())


@pytest.mark.parametrize("hpz", [1, 2])
def test_sharded_tiles_train_as_the_large_layer(hpz: int) -> None:
    expected = plain()
    for rank, got in enumerate(run_ranks(sharded, 4, hpz, timeout=150)):
        assert got["losses"] == pytest.approx([losses[rank] for losses in expected], rel=1e-5)
