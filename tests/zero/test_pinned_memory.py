# SPDX-License-Identifier: Apache-2.0
"""Promise: `pin_memory` page-locks shards and masters on the host, and no write of them tears a copy under way (H1).

No device is needed: page-locked memory comes from one function, and the device's reading is one event per shard. The
event here looks at the shard when it is waited for: it must still hold what the copy was queued for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import CollectiveTimeout
from deepspeed.runtime.zero.core import fetch, host, layout
from deepspeed.runtime.zero.core.convert import adopt_shard
from deepspeed.runtime.zero.core.param import ShardedParam, ShardGroups
from deepspeed.runtime.zero.core.unit import ShardedUnit
from deepspeed.runtime.zero.core.wire import DONE, Channel
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from tests.dist.support import initialize, settings, train
from tests.harness import models, reference
from tests.harness.pool import run_ranks

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CPU, META = torch.device("cpu"), torch.device("meta")

# -- what is page-locked ---------------------------------------------------------------------------------------------


@contextmanager
def pinning(can: bool) -> Iterator[list[Tensor]]:
    """Memory that is asked for page-locked, on a machine that can or cannot."""
    asked: list[Tensor] = []

    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        asked.append(torch.full((numel,), math.nan, dtype=dtype))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "can_pin", lambda device: can)
        patch.setattr(host, "allocate_pinned", allocate)
        patch.setattr(host, "release_unused", lambda device: None)
        yield asked


def inside(tensor: Tensor, blocks: list[Tensor]) -> bool:
    pointer = tensor.untyped_storage().data_ptr()
    return not tensor.numel() or any(block.untyped_storage().data_ptr() == pointer for block in blocks)


def what_is_pinned(can: bool, param: Any, optimizer: Any, dtype: str, trains: bool = True) -> tuple[bool, bool, bool]:
    """Whether all shards are, whether all masters are, whether anything is."""
    zero = {"offload_param": param, "offload_optimizer": optimizer}
    config = settings(zero={key: value for key, value in zero.items() if value}, **(BF16 if dtype == "bf16" else {}))
    with pinning(can) as asked:
        engine = initialize(models.frozen(), config, reference.adam if trains else None)
        if trains:
            train(engine, models.batch, range(1))
        sharded = engine.optimizer.sharded if trains else engine.sharded
        shards = [p.shard for p in sharded.params.values()]
        masters = engine.optimizer.fp32_partitioned_groups_flat if trains else []
        found = all(inside(t, asked) for t in shards), all(inside(t, asked) for t in masters), bool(asked)
        engine.destroy()
    return found


def on_host(pin: bool = True) -> dict[str, Any]:
    return {"device": "cpu", "pin_memory": pin}


CONFIGURED = [
    (True, on_host(), on_host(), "bf16", (True, True, True)),
    (True, on_host(), None, "bf16", (True, False, True)),
    (True, None, on_host(), "bf16", (False, True, True)),
    (True, on_host(), on_host(False), "bf16", (True, False, True)),
    (True, on_host(False), on_host(), "bf16", (False, True, True)),
    (True, on_host(False), on_host(False), "bf16", (False, False, False)),
    (True, {"device": "none", "pin_memory": True}, None, "bf16", (False, False, False)),
    (True, {"device": "cpu"}, {"device": "cpu"}, "fp32", (True, True, True)),  # pinned by default; one tensor for both
    (False, on_host(), on_host(), "bf16", (False, False, False)),
]


def configured() -> list[tuple[bool, bool, bool]]:
    return [what_is_pinned(*case[:4]) for case in CONFIGURED]


def test_the_configuration_decides_and_nothing_is_asked_for_where_it_cannot_be() -> None:
    for found in run_ranks(configured, 2):
        assert found == [case[4] for case in CONFIGURED]


def without_training() -> None:
    with pinning(True) as asked:
        engine = initialize(models.uneven(), settings(zero={"offload_param": on_host()}), None)
        assert all(inside(p.ds_tensor, asked) for p in engine.module.parameters())
        engine(*models.batch(0, dist.get_rank()))
        engine.destroy()


def test_shards_of_a_model_that_is_not_trained_are_page_locked() -> None:
    run_ranks(without_training, 2)


def init_context() -> None:
    offloaded = settings(zero={"offload_param": on_host()})
    cases: list[tuple[bool, dict[str, Any], bool]] = [
        (True, {"remote_device": "cpu", "pin_memory": True}, True),
        (True, {"remote_device": "cpu"}, False),
        (True, {"pin_memory": True}, False),
        (True, {"config_dict_or_path": offloaded}, True),
        (True, {"config_dict_or_path": settings(zero={"offload_param": on_host(False)})}, False),
        (True, {"config_dict_or_path": settings(zero={"offload_param": on_host(False)}), "pin_memory": True}, True),
        (False, {"remote_device": "cpu", "pin_memory": True, "config_dict_or_path": offloaded}, False),
    ]
    for can, arguments, wanted in cases:
        with pinning(can) as asked:
            with deepspeed.zero.Init(dtype=torch.float32, **arguments):
                layer: Any = nn.Linear(3, 5)
            assert bool(asked) is wanted, arguments
            assert not wanted or inside(layer.weight.ds_tensor, asked) and inside(layer.bias.ds_tensor, asked)


def test_zero_init_page_locks_by_argument_or_configuration() -> None:
    run_ranks(init_context, 2)


# -- no write tears a copy -------------------------------------------------------------------------------------------


class Reading:
    """A copy of a shard that the device has yet to make."""

    def __init__(self, p: ShardedParam) -> None:
        self.p, self.before, self.whole = p, p.shard.clone(), None
        p.reading = self

    def query(self) -> bool:
        self.whole = torch.equal(self.p.shard, self.before)
        return True


def read_and_write(engine: Any, write: Callable[[], Any]) -> None:
    """`write` while every shard is being read: whatever it changed it waited for, and before it changed it."""
    readings = [Reading(p) for p in engine.optimizer.sharded.params.values()]
    write()
    torn = [r.p.name for r in readings if r.whole is None and not torch.equal(r.p.shard, r.before)]
    late = [r.p.name for r in readings if r.whole is False]
    assert not torn and not late, (torn, late)
    changed = [r for r in readings if not torch.equal(r.p.shard, r.before)]
    assert changed, "nothing was written"
    assert all(r.p.reading is not r for r in changed), "waited for once"


def by_step(engine: Any, _: str) -> None:
    engine.backward(engine(*models.batch(7, dist.get_rank())))
    read_and_write(engine, engine.step)


def by_step_after_a_shard_was_moved(engine: Any, _: str) -> None:
    engine.backward(engine(*models.batch(7, dist.get_rank())))
    for p in engine.optimizer.sharded.params.values():
        p.shard.data = p.shard.data.clone()
    read_and_write(engine, engine.step)


def by_full_master(engine: Any, _: str) -> None:
    param = engine.module.up.weight
    value = torch.full(param.ds_shape, 0.5)
    read_and_write(engine, lambda: safe_set_full_fp32_param(param, value))


def by_local_master(engine: Any, _: str) -> None:
    param = engine.module.up.weight
    read_and_write(engine, lambda: safe_set_local_fp32_param(param, torch.full((param.partition_numel(),), 0.5)))


def by_gathered_parameters(engine: Any, _: str) -> None:
    def edit() -> None:
        params = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for param in params:
                param.add_(1)

    read_and_write(engine, edit)


def by_partition(engine: Any, _: str) -> None:
    param = engine.module.up.weight
    param.all_gather()
    param.data.add_(1)
    read_and_write(engine, lambda: param.partition(has_been_updated=True))


def by_state_dict(engine: Any, _: str) -> None:
    state = engine.optimizer.state_dict()
    state["fp32_flat_groups"] = [flat + 1 for flat in state["fp32_flat_groups"]]
    read_and_write(engine, lambda: engine.optimizer.load_state_dict(state))


def by_checkpoint(engine: Any, folder: str) -> None:
    """The trained and, by another way, the frozen."""
    engine.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        for param in engine.module.parameters():
            param.add_(1)
    read_and_write(engine, lambda: engine.load_checkpoint(folder))


def by_module_only(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        for param in engine.module.parameters():
            param.add_(1)
    read_and_write(engine, lambda: engine.load_checkpoint(folder, load_module_only=True))


def by_users(engine: Any, _: str) -> None:
    """Through what is handed out."""
    engine_optimizer = engine.optimizer
    read_and_write(engine, lambda: [p.ds_tensor.add_(1) for p in engine.module.parameters()])
    read_and_write(engine, lambda: [t.add_(1) for shards in engine_optimizer.fp16_partitioned_groups for t in shards])
    read_and_write(engine, lambda: [flat.add_(1) for flat in engine_optimizer.fp16_partitioned_groups_flat])


WRITERS = [
    by_step,
    by_step_after_a_shard_was_moved,
    by_full_master,
    by_local_master,
    by_gathered_parameters,
    by_partition,
    by_state_dict,
    by_checkpoint,
    by_module_only,
    by_users,
]
LAYOUTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "aliased": (False, {}),
    "rounded": (False, BF16),
    "split": (True, BF16),
}
"""How masters and shards lie: whether masters are split, and the precision."""


def write(writer: Callable[[Any, str], None], folder: str) -> None:
    offload = {"offload_param": on_host(), "offload_optimizer": on_host()}
    for kind, (split, extra) in LAYOUTS.items():
        config = settings(
            zero={**offload, "split_master_weights": split},
            optimizer={"type": "AdamW", "params": {"lr": 0.1}},
            **extra,
        )
        module: Any = models.uneven()
        module.embed.weight.requires_grad_(False)
        engine = initialize(module, config, None, model_parameters=module.parameters())
        train(engine, models.batch, range(1))
        assert (engine.optimizer.master.sub_groups[0].low is not None) is split
        writer(engine, f"{folder}/{kind}")
        engine.destroy()


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_waits_for_the_copies_that_read_the_shard(writer: Any, tmp_path: Any) -> None:
    run_ranks(write, 2, writer, str(tmp_path))


# -- every copy is noted ---------------------------------------------------------------------------------------------


class Marks:
    """In place of events of a device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.earlier: list[set[Any]] = []
        self.waited: set[int] = set()
        self.reached = True
        patch.setattr(host, "_mark", self.mark)

    def mark(self, device: torch.device, earlier: set[Any]) -> Mark:
        assert device == META
        self.earlier.append(set(earlier) - {None})
        return Mark(self, len(self.earlier) - 1)


class Mark:
    def __init__(self, marks: Marks, index: int) -> None:
        self.marks, self.index = marks, index

    def query(self) -> bool:
        if self.marks.reached:
            self.marks.waited.add(self.index)
        return self.marks.reached


def params_of(groups: ShardGroups, *sizes: int) -> list[ShardedParam]:
    """Parameters whose full weights live on another device than their shards."""
    found = []
    for size in sizes:
        shard = torch.ones(layout.shard_numel(size, groups.primary.size))
        found.append(adopt_shard(nn.Parameter(torch.ones(size, device=META)), shard, torch.Size([size]), groups, META))
    return found


def test_copies_of_one_call_share_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(monkeypatch)
    a, b, nothing = params = params_of(ShardGroups(Channel(None, 1, 0, (0,))), 3, 4, 0)
    assert len(host.send(params, CPU)) == 2 and not marks.earlier, "nothing is copied, nothing is noted"
    assert a.reading is None
    first, second = host.send(params, META)
    assert first.device == second.device == META
    assert a.reading is b.reading is not None and nothing.reading is None
    host.send([b], META)
    assert marks.earlier == [set(), {a.reading}], "the newest event follows the older one, on whatever stream"
    host.before_write(params)
    assert marks.waited == {0, 1} and a.reading is b.reading is None


def test_a_copy_that_the_device_never_makes_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(monkeypatch)
    monkeypatch.setattr(Channel, "timeout", 0.01)
    params = params_of(ShardGroups(Channel(None, 1, 0, (0,))), 3)
    host.send(params, META)
    marks.reached = False
    with pytest.raises(CollectiveTimeout, match=f"the copy of {params[0].name} to the device"):
        params[0].write_shard(torch.zeros(3))
    assert params[0].shard.tolist() == [1, 1, 1]


def test_every_gather_of_offloaded_shards_notes_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across groups, and those parameters of a unit whose hpZ shards are old."""
    marks = Marks(monkeypatch)
    monkeypatch.setattr(fetch.wire, "gather", lambda outs, ins, channel: DONE)
    groups = ShardGroups(Channel(None, 4, 0, (0, 1, 2, 3)), Channel(None, 2, 0, (0, 1)))
    a, b = params_of(groups, 3, 4)
    unit = ShardedUnit([a, b], META)
    fetch.start_gather(unit)
    assert a.reading is b.reading is not None and len(marks.earlier) == 1
    fetch.finish_gather(unit)
    host.before_write([a, b])
    unit.free()
    a.wrote_primary()
    fetch.start_gather(unit)
    assert a.reading is not None and b.reading is None and len(marks.earlier) == 2
