# SPDX-License-Identifier: Apache-2.0
"""Gloo's copy of a reduction's inputs takes the place of the inputs: they are not kept alive beside it."""

from __future__ import annotations

import weakref

import torch

from deepspeed.runtime.zero.core import wire
from tests.harness.pool import run_ranks


def _inputs_after_issue(rank_sizes: list[int]) -> tuple[int, bool]:
    channel = wire.Channel.of(None)
    ins = [torch.full((channel.size * n,), float(channel.rank + i)) for i, n in enumerate(rank_sizes)]
    alive = [weakref.ref(t) for t in ins]
    outs = [torch.empty(n) for n in rank_sizes]
    handle = wire.reduce_scatter(outs, ins, channel)
    left = sum(ref() is not None for ref in alive)
    handle.wait()
    right = all(torch.equal(out, torch.full_like(out, 0.5 + i)) for i, out in enumerate(outs))
    return left, right


def test_inputs_of_a_flat_reduction_are_released() -> None:
    for left, right in run_ranks(_inputs_after_issue, 2, [5, 3, 7]):
        assert left == 0
        assert right


def test_a_single_input_is_read_in_place_and_stays() -> None:
    for left, right in run_ranks(_inputs_after_issue, 2, [5]):
        assert left == 1
        assert right
