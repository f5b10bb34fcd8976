# SPDX-License-Identifier: Apache-2.0
"""`TiledLinear`: a large linear layer cut into tiles that are gathered one after another.

A linear layer of ZeRO-3 is gathered as a whole, so one enormous layer decides the peak of memory. Here the weight is a
grid of ``out_splits x in_splits`` linear layers. Where all of it is more than one unit may hold
(`core.partition.unit_bound`: a third of ``stage3_max_live_parameters``), each tile is gathered and released alone.

What must hold: forward and gradients equal those of the one large layer up to the order of sums over input tiles. The
bias belongs to the last input tile of each row, so it is added once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError

from .gathered import GatheredParameters


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of ``parts`` consecutive pieces of ``total`` elements; the first ones are larger by one where it does not
    divide.

    Raises:
        UsageError: ``parts`` is not between 1 and ``total``.
    """
    if not 1 <= parts <= total:
        raise UsageError(f"{total} features cannot be cut into {parts} tiles; use a number from 1 to {total}")
    size, larger = divmod(total, parts)
    return [size + 1 if part < larger else size for part in range(parts)]


class TiledLinear(nn.Module):
    """A linear layer ``(..., in_features) -> (..., out_features)`` as a grid of tiles.

    Args:
        in_splits, out_splits: tiles along the input and the output; sizes need not divide.
        input_is_already_split: ``forward`` takes the list of ``in_splits`` input pieces.
        combine_out_splits: concatenate the output pieces; otherwise ``forward`` returns them as a list.
        linear_cls: class of a tile, called as ``linear_cls(in_features, out_features, bias=..., **kwargs)``.
        init_linear: a layer of full size to take weights from; it may be sharded.

    Attributes:
        linears: the tiles by ``[output row][input column]``.

    Raises:
        UsageError: a number of tiles that does not fit, or an ``init_linear`` of another size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = split_sizes(in_features, in_splits), split_sizes(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == in_splits - 1, **kwargs)
                for column, columns in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """The layer's output: a tensor, or the list of its pieces without ``combine_out_splits``."""
        pieces = self._pieces(input_)
        return self._combine([self._row(row, pieces) for row in self._rows()])

    def _rows(self) -> list[list[nn.Module]]:
        return [list(row.children()) for row in self.linears]

    def _pieces(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.input_is_already_split:
            assert isinstance(input_, torch.Tensor), "a tensor is expected; pieces need input_is_already_split=True"
            pieces: Sequence[torch.Tensor] = input_.split(self.in_sizes, dim=-1)
            return pieces
        if len(input_) != self.in_splits:
            raise UsageError(f"TiledLinear: {len(input_)} input pieces, expected in_splits = {self.in_splits}")
        return list(input_)

    def _row(self, row: list[nn.Module], inputs: Sequence[torch.Tensor]) -> Any:
        output = row[0](inputs[0])
        for tile, piece in zip(row[1:], inputs[1:], strict=True):
            output = output + tile(piece)
        return output

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take weight and bias of a full-size layer, sharded or not. Collective where either is sharded.

        Raises:
            UsageError: sizes differ, or only one of the two has a bias.
        """
        weight: torch.Tensor = other.weight  # type: ignore[assignment]
        bias: torch.Tensor | None = getattr(other, "bias", None)
        expected, got = (self.out_features, self.in_features), tuple(getattr(weight, "ds_shape", weight.shape))
        if got != expected:
            raise UsageError(f"copy_params_from: a weight of shape {expected} is expected, got {got}")
        if (bias is not None) != self.use_bias:
            raise UsageError(
                f"copy_params_from: bias is {self.use_bias} here and {bias is not None} in the other layer"
            )
        with GatheredParameters([weight] if bias is None else [weight, bias]):
            for row, rows in zip(self._rows(), weight.split(self.out_sizes, dim=0), strict=True):
                for tile, block in zip(row, rows.split(self.in_sizes, dim=1), strict=True):
                    _write(tile.weight, block)
            if bias is not None:
                for row, piece in zip(self._rows(), bias.split(self.out_sizes), strict=True):
                    _write(row[-1].bias, piece)

    def extra_repr(self) -> str:
        """Sizes and tiles, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` over layers that return ``(output, bias)`` and leave adding the bias to the caller.

    ``forward`` returns ``(output, bias)`` likewise; each is a list without ``combine_out_splits``.
    """

    def _row(self, row: list[nn.Module], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = None, None
        for tile, piece in zip(row, inputs, strict=True):
            result = tile(piece)
            part, given = result if isinstance(result, tuple) else (result, None)
            output = part if output is None else output + part
            bias = given if given is not None else bias
        assert output is not None
        return output, bias

    def _combine(self, outputs: list[Any]) -> Any:
        parts, biases = [output for output, _ in outputs], [bias for _, bias in outputs]
        if any(bias is None for bias in biases):
            biases = []
        if not self.combine_out_splits:
            return parts, biases or None
        return torch.cat(parts, dim=-1), torch.cat(biases, dim=-1) if biases else None


def _write(param: Any, values: torch.Tensor) -> None:
    """Set a tile's parameter, sharded or not, from values that every rank has."""
    with GatheredParameters([param], modifier_rank=0):
        param.data.copy_(values)
