# SPDX-License-Identifier: Apache-2.0
"""The peak of CPU tensors, against blocks of known size."""

from __future__ import annotations

import torch

from benchmarks import measure

BLOCK = 8 << 20


def test_peak_counts_what_stands_and_what_is_made() -> None:
    standing = torch.zeros(BLOCK, dtype=torch.uint8)
    before = measure.allocated_on_cpu()

    def run() -> None:
        a = torch.empty(BLOCK, dtype=torch.uint8)
        b = torch.empty(BLOCK, dtype=torch.uint8)
        del a
        c = torch.empty(BLOCK, dtype=torch.uint8)
        del b, c

    assert measure.peak_on_cpu(run) - before == 2 * BLOCK
    assert standing.numel() == BLOCK


def test_memory_that_a_run_leaves_to_the_next_counts_once() -> None:
    left: list[torch.Tensor] = [torch.empty(BLOCK, dtype=torch.uint8)]
    before = measure.allocated_on_cpu()

    def run() -> None:
        left.clear()
        left.append(torch.empty(BLOCK, dtype=torch.uint8))

    assert measure.peak_on_cpu(run) == before
