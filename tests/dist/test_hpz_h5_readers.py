# SPDX-License-Identifier: Apache-2.0
"""Promise H5: a reader cannot be fooled.

`GatheredParameters(modifier_rank=None)` is read-only: an edit inside is dropped at exit on every rank, noticed, and the
warning (an error under `enable_sanity_checks`) names the parameter (V9, cases 43, deepspeedai/DeepSpeed#7811).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import UsageError
from tests.dist.support import Heard, assert_tensors, full_params, initialize, settings
from tests.harness import models
from tests.harness.pool import run_ranks


def edit_data(param: torch.nn.Parameter) -> None:
    param.data.add_(1.0)


def edit_in_place(param: torch.nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(3.0)


def edit_replace(param: torch.nn.Parameter) -> None:
    param.data = param.data + 1


EDITS = {"data": edit_data, "in place": edit_in_place, "replace": edit_replace}


def read_only(edit: str, hpz: int, before_initialize: bool) -> None:
    config = settings(hpz=hpz)
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = models.uneven()
    engine = None if before_initialize else initialize(module, config)
    before = full_params(module)
    with Heard() as heard:
        with deepspeed.zero.GatheredParameters([module.up.weight, module.norm.bias]):
            EDITS[edit](module.up.weight)
            edited = module.up.weight.detach().clone()
            assert not torch.equal(edited, before["up.weight"]), "visible inside (TRL merges adapters so)"
    if engine is not None:
        assert any("up.weight" in text and "modifier_rank" in text for text in heard.texts), heard.texts
        assert not any("norm.bias" in text for text in heard.texts)
    else:
        assert any("modifier_rank" in text for text in heard.texts)
    assert_tensors(full_params(module), before, 0, 0)
    if engine is not None:
        data = models.batch(0, dist.get_rank())
        with torch.no_grad():
            got = engine(*data)
        plain = models.uneven()
        plain.load_state_dict(before)
        torch.testing.assert_close(got, plain(*data))


def many(hpz: int) -> None:
    for edit in EDITS:
        for before_initialize in (False, True):
            read_only(edit, hpz, before_initialize)


def checked() -> tuple[str, bool]:
    engine = initialize(models.uneven(), settings(zero={"enable_sanity_checks": True}))
    before = full_params(engine.module)
    with pytest.raises(UsageError) as caught:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            if dist.get_rank() == 0:
                engine.module.down.weight.data.zero_()
            else:
                engine.module.down.weight.data.mul_(2)
    same = all(torch.equal(a, b) for a, b in zip(before.values(), full_params(engine.module).values(), strict=True))
    engine.destroy()
    return str(caught.value), same


def untouched() -> list[str]:
    """Reading, computing and running forwards inside is no edit."""
    engine = initialize(models.uneven(), settings(hpz=2))
    with Heard() as heard, deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        total = sum(p.sum() for p in engine.module.parameters())
        assert torch.isfinite(total)
        with torch.no_grad():
            engine(*models.batch(0, dist.get_rank()))
        engine.module.state_dict()
    return [text for text in heard.texts if "read-only" in text]


@pytest.mark.parametrize(("world", "hpz"), [(1, 1), (4, 2)])
def test_an_edit_is_dropped_and_named(world: int, hpz: int) -> None:
    run_ranks(many, world, hpz)


def test_sanity_checks_raise_on_every_rank() -> None:
    for text, same in run_ranks(checked, 2):
        assert "down.weight" in text and "modifier_rank" in text and same


def test_reading_is_no_edit() -> None:
    for texts in run_ranks(untouched, 4):
        assert texts == []
