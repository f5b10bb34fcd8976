# SPDX-License-Identifier: Apache-2.0
"""Promise: the rates are those that the field's users know, to the last printed digit, and a step can be undone."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from deepspeed.errors import ConfigError, UsageError
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_sections import SchedulerConfig
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, build_scheduler


def optimizer(rates=(0.1,), adam=False) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.Adam(groups) if adam else torch.optim.SGD(groups, lr=0.1)


def rates_of(opt) -> list[float]:
    return [group["lr"] for group in opt.param_groups]


def run(name: str, steps: int, rates=(0.1,), adam=False, **params):
    """The schedule, the optimizer, and what the groups held after construction and after each step."""
    opt = optimizer(rates, adam)
    schedule = build_scheduler(SchedulerConfig(type=name, params=params), opt)
    seen = [rates_of(opt)]
    for _ in range(steps):
        schedule.step()
        seen.append(rates_of(opt))
    return schedule, opt, seen


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
RANGE = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}
DECAY = {"total_num_steps": 7, "warmup_num_steps": 3}

# Rates of the first group as observed on release 0.19.8, starting with the one that construction writes.
OBSERVED = [
    ("LRRangeTest", RANGE, [0.01, 0.0166667, 0.0233333, 0.03, 0.0366667, 0.0433333, 0.05, 0.0566667]),
    ("LRRangeTest", {**RANGE, "lr_range_test_staircase": True}, [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.05, 0.05]),
    ("OneCycle", CYCLE, [0.1, 0.325, 0.55, 0.775, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1]),
    (
        "OneCycle",
        {**CYCLE, "decay_lr_rate": 0.5, "decay_step_size": 2, "cycle_second_step_size": 6},
        [0.1, 0.325, 0.55, 0.775, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.08, 0.0666667, 0.0571429, 0.05],
    ),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_stair_count": 2, "cycle_second_stair_count": 2},
        [0.1, 0.1, 0.55, 0.55, 1.0, 0.55, 0.55, 0.1, 0.1, 0.1],
    ),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_stair_count": 3, "decay_lr_rate": 0.5},
        [0.1, 0.1, 0.4, 0.7, 1.0, 0.7, 0.4, 0.1, 0.1, 0.1],
    ),
    ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.05, 0.0792481, 0.1, 0.1]),
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.01},
        [0.01, 0.01, 0.0325, 0.055, 0.0775, 0.1, 0.1],
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "bogus", "warmup_min_lr": 0.01, "warmup_max_lr": 0.3},
        [0.01, 0.01, 0.155, 0.2398196, 0.3, 0.3],
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, [0.0, 0.0, 0.1, 0.1]),
    ("WarmupDecayLR", DECAY, [0.0, 0.0, 0.0006309, 0.001, 0.001, 0.00075, 0.0005, 0.00025, 0.0]),
    ("WarmupDecayLR", {**DECAY, "warmup_max_lr": None}, [0.0, 0.0, 0.063093, 0.1, 0.1, 0.075, 0.05, 0.025, 0.0]),
    (
        "WarmupDecayLR",
        {**DECAY, "warmup_min_lr": 0.01, "warmup_max_lr": 0.3, "warmup_type": "linear"},
        [0.01, 0.01, 0.1066667, 0.2033333, 0.3, 0.2275, 0.155, 0.0825, 0.01],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 2, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0006309, 0.001, 0.0, 0.0],
    ),
    ("WarmupCosineLR", DECAY, [0.0, 0.0, 0.063093, 0.1, 0.0853568, 0.050005, 0.0146532, 1e-05, 1e-05]),
    (
        "WarmupCosineLR",
        {**DECAY, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_type": "linear"},
        [0.0, 0.01, 0.04, 0.07, 0.0882843, 0.06, 0.0317157, 0.02, 0.02],
    ),
    ("WarmupCosineLR", {"total_num_steps": 2, "warmup_num_steps": 3}, [0.0, 0.0, 0.063093, 0.1, 1e-05, 1e-05]),
]


@pytest.mark.parametrize(("name", "params", "expected"), OBSERVED)
def test_rates_are_the_known_ones(name, params, expected):
    _, _, seen = run(name, len(expected) - 1, **params)
    assert [rates[0] for rates in seen] == pytest.approx(expected, abs=6e-8)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup", [1, 2, 5, 10.0])
def test_warmup_against_its_formula(kind, warmup):
    steps = max(2, int(warmup))
    _, _, seen = run("WarmupLR", 14, (0.3, 0.5), warmup_num_steps=warmup, warmup_type=kind, warmup_min_lr=[0.1, 0.2])
    for i, rates in enumerate(seen[1:]):
        rising = math.log(i + 1) / math.log(steps) if kind == "log" else i / steps
        factor = rising if i < steps else 1.0
        assert rates == pytest.approx([0.1 + 0.2 * factor, 0.2 + 0.3 * factor], rel=1e-12)


def test_no_warmup_is_accepted_everywhere():
    """What the Trainer of an older transformers fills in: the first step is taken at the full rate already."""

    def rates(name: str, steps: int, **params):
        return [groups[0] for groups in run(name, steps, **params)[2]]

    for kind in ("log", "linear"):
        none = {"warmup_num_steps": 0, "warmup_type": kind}
        assert rates("WarmupLR", 3, **none) == [0.1] * 4
        decayed = [0.1, 0.1, 0.1 * 7 / 8, 0.1 * 6 / 8]
        assert rates("WarmupDecayLR", 3, total_num_steps=8, warmup_max_lr=0.1, **none) == pytest.approx(decayed)
        cosine = [0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * i / 4)) / 2) for i in (0, 1, 2, 3, 4, 4)]
        assert rates("WarmupCosineLR", 5, total_num_steps=4, cos_min_ratio=0.2, **none) == pytest.approx(cosine)


def test_groups_keep_their_own_rates():
    _, _, seen = run("WarmupCosineLR", 9, (0.1, 0.2), **DECAY)
    assert all(second == pytest.approx(2 * first) for first, second in seen)
    _, _, seen = run("WarmupLR", 9, (0.1, 0.2), warmup_num_steps=4)
    assert seen[-1] == [0.1, 0.2]
    _, _, seen = run("OneCycle", 2, (0.1, 0.2), **{**CYCLE, "cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [1.0, 2.0]})
    assert seen[-1] == pytest.approx([0.55, 1.1])


def test_one_cycle_moves_the_first_beta_against_the_rate():
    opt = optimizer(adam=True)
    params = {**CYCLE, "decay_step_size": 2, "decay_mom_rate": 0.25, "cycle_second_step_size": 6}
    schedule = build_scheduler(SchedulerConfig(type="OneCycle", params=params), opt)
    seen = [opt.param_groups[0]["betas"][0]]
    for _ in range(12):
        schedule.step()
        seen.append(opt.param_groups[0]["betas"][0])
        assert opt.param_groups[0]["betas"][1] == 0.999 and schedule.get_mom() == seen[-1]
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.8166667, 0.8333333, 0.85, 0.8666667, 0.8833333, 0.9, 1.0125, 1.125]
    assert seen == pytest.approx(expected, abs=6e-8)


ALL = [("LRRangeTest", RANGE), ("OneCycle", CYCLE), ("WarmupLR", {"warmup_num_steps": 4})]
ALL += [("WarmupDecayLR", DECAY), ("WarmupCosineLR", DECAY)]


@pytest.mark.parametrize(("name", "params"), ALL)
def test_rewind_undoes_the_last_step_exactly(name, params):
    schedule, opt, _ = run(name, 0, (0.1, 0.3), adam=True, **params)
    for _ in range(12):
        before = copy.deepcopy((opt.param_groups, schedule.state_dict(), schedule._last_lr))
        schedule.step()
        after = copy.deepcopy((opt.param_groups, schedule.state_dict(), schedule._last_lr))
        schedule.rewind()
        assert str((opt.param_groups, schedule.state_dict(), schedule._last_lr)) == str(before)
        with pytest.raises(UsageError, match="rewind"):
            schedule.rewind()
        schedule.step()
        assert str((opt.param_groups, schedule.state_dict(), schedule._last_lr)) == str(after)


@pytest.mark.parametrize(("name", "params"), ALL)
def test_rewind_with_rates_in_tensors(name, params):
    opt = optimizer((torch.tensor(0.5, dtype=torch.float64),), adam=True)
    tensor = opt.param_groups[0]["lr"]
    schedule = build_scheduler(SchedulerConfig(type=name, params=params), opt)
    schedule.step()
    before = float(tensor)
    schedule.step()
    schedule.step()
    assert opt.param_groups[0]["lr"] is tensor
    schedule.rewind()
    expected = run(name, 2, (0.5,), **params)[2]
    assert float(tensor) == pytest.approx(expected[2][0], rel=1e-12) and before == pytest.approx(expected[1][0])


@pytest.mark.parametrize(("name", "params"), ALL)
def test_state_is_the_iteration_and_loading_it_continues(name, params):
    whole, _, expected = run(name, 9, (0.1, 0.3), **params)
    first, _, _ = run(name, 5, (0.1, 0.3), **params)
    assert first.state_dict() == {"last_batch_iteration": 4} and whole.state_dict() == {"last_batch_iteration": 8}
    second, opt, _ = run(name, 0, (0.1, 0.3), **params)
    second.load_state_dict(first.state_dict())
    assert rates_of(opt) == second.get_last_lr() == expected[5]
    for i in range(6, 10):
        second.step()
        assert rates_of(opt) == second.get_last_lr() == second.get_lr() == expected[i]


@pytest.mark.parametrize(("name", "params"), ALL)
def test_step_to_a_given_iteration(name, params):
    schedule, opt, _ = run(name, 0, **params)
    schedule.step(5)
    assert rates_of(opt) == run(name, 6, **params)[2][6]


def test_last_rates_before_the_first_step():
    for name, params in ALL:
        schedule, opt, seen = run(name, 0, **params)
        if name == "OneCycle":
            with pytest.raises(AssertionError, match="need to call step"):
                schedule.get_last_lr()
        else:
            assert schedule.get_last_lr() == seen[0] == rates_of(opt)


def test_names():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    for name in VALID_LR_SCHEDULES:
        assert getattr(lr_schedules, name).__name__ == name


def test_schedules_of_torch_by_name():
    schedule, opt, seen = run("StepLR", 0, step_size=2, gamma=0.5)
    for _ in range(4):
        opt.step()
        schedule.step()
        seen.append(rates_of(opt))
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    assert [rates[0] for rates in seen] == [0.1, 0.1, 0.05, 0.05, 0.025]


def test_an_object_with_param_groups_is_enough():
    class Groups:
        param_groups = [{"lr": 0.5, "params": []}]

    schedule = build_scheduler(SchedulerConfig(type="WarmupLR", params={"warmup_num_steps": 2}), Groups())
    for _ in range(3):
        schedule.step()
    assert Groups.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupRL", {}, ["scheduler.type", "'WarmupRL'", "'WarmupLR'"]),
        ("LRScheduler.x", {}, ["scheduler.type"]),
        ("Optimizer", {}, ["scheduler.type"]),
        ("WarmupLR", {"warmup_steps": 3}, ["scheduler.params.warmup_steps", "'warmup_num_steps'"]),
        ("WarmupLR", {"warmup_num_steps": "auto"}, ["scheduler.params.warmup_num_steps", "auto"]),
        ("WarmupLR", {"warmup_num_steps": -1}, ["scheduler.params.warmup_num_steps", "-1"]),
        ("WarmupLR", {"warmup_num_steps": 1.5}, ["scheduler.params.warmup_num_steps", "1.5"]),
        ("WarmupLR", {"warmup_num_steps": float("inf")}, ["scheduler.params.warmup_num_steps", "inf"]),
        ("WarmupLR", {"warmup_min_lr": "x"}, ["scheduler.params.warmup_min_lr", "'x'"]),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, ["scheduler.params.warmup_min_lr", "1 values"]),
        ("WarmupDecayLR", {}, ["scheduler.params.total_num_steps", "requires"]),
        ("WarmupCosineLR", {"total_num_steps": 0}, ["scheduler.params.total_num_steps", "0"]),
        ("OneCycle", {"cycle_min_lr": 0.1}, ["scheduler.params.cycle_max_lr"]),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, ["scheduler.params.cycle_first_step_size"]),
        ("StepLR", {}, ["scheduler.params.step_size"]),
        ("CosineAnnealingWarmRestarts", {"T_0": -1}, ["scheduler.params", "CosineAnnealingWarmRestarts"]),
    ],
)
def test_wrong_schedules_are_refused_by_name(name, params, words):
    with pytest.raises(ConfigError) as caught:
        build_scheduler(SchedulerConfig(type=name, params=params), optimizer())
    for word in words:
        assert word in str(caught.value)
