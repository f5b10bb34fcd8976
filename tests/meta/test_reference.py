# SPDX-License-Identifier: Apache-2.0
"""The reference trainer against the definition: one backward over the concatenated global batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness import faults, models, reference


@pytest.mark.parametrize("build", [models.uneven, models.blocks, models.tied, models.frozen])
@pytest.mark.parametrize(("accum", "clip"), [(1, 0.0), (3, 0.05)])
def test_equals_the_concatenated_batch(build: type[nn.Module], accum: int, clip: float) -> None:
    world, steps = 3, 3
    got = reference.train(build, models.batch, steps, world, accum, clip)
    model = build()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        parts = [models.batch(step, rank, micro) for rank in range(world) for micro in range(accum)]
        loss = model(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        assert loss.item() == pytest.approx(reference.mean_losses(got)[step], rel=1e-5)
        assert norm.item() == pytest.approx(got.norms[step], rel=1e-4)
    for name, param in model.named_parameters():
        torch.testing.assert_close(got.params[name], param.detach(), rtol=1e-3, atol=1e-4)


def test_bf16_masters_keep_what_bf16_cannot() -> None:
    got = reference.train(models.uneven, models.batch, 4, 2, dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert all(param.dtype is torch.bfloat16 for param in got.params.values())
    assert any(not torch.equal(got.masters[name], got.params[name].float()) for name in got.masters)
    for name, master in got.masters.items():
        assert torch.equal(got.params[name], master.bfloat16())


def test_models_are_the_same_at_each_build_and_batches_differ_by_place() -> None:
    first, second = models.uneven(), models.uneven()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    seen = {tuple(models.batch(*place)[0].flatten().tolist()) for place in [(0, 0), (1, 0), (0, 1), (0, 0, 1)]}
    assert len(seen) == 4
    chosen = {int(models.batch_by_rank(0, rank)[0][0, 0]) for rank in range(4)}
    assert chosen == {0, 1, 2, 3}


class _Owner:
    def double(self, value: int) -> int:
        return 2 * value


def test_watch_counts_fails_and_restores() -> None:
    owner = _Owner()
    with faults.watch(owner, "double", faults.fail(OSError("full"), at=2), note=lambda args, _: args[0]) as seen:
        assert owner.double(4) == 8
        with pytest.raises(OSError, match="full"):
            owner.double(5)
    assert seen.calls == 2 and seen.log == [4, 5]
    assert "double" not in vars(owner) and owner.double(1) == 2
