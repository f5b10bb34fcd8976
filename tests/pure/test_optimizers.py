# SPDX-License-Identifier: Apache-2.0
"""Promise: on flat shards that are swapped in for a step, each optimizer computes what plain torch computes."""

from __future__ import annotations

import copy

import pytest
import torch

from deepspeed.errors import ConfigError, NotSupportedError, UnsupportedConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config_sections import OptimizerConfig
from deepspeed.runtime.optimizers import REFUSED, build_optimizer

STEPS = 5


def build(type_name: str, params=None, offload=False, device="cpu", groups=None):
    groups = [torch.nn.Parameter(torch.empty(0))] if groups is None else groups
    return build_optimizer(OptimizerConfig(type=type_name, params=params or {}), groups, device, offload)


def gradients(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def train_flat(opt, size=23):
    """Step one flat fp32 shard, put into the group for each step only; returns it."""
    shard = torch.nn.Parameter(torch.linspace(-1, 1, size))
    for grad in gradients(size):
        shard.grad = grad
        kept, opt.param_groups[0]["params"] = opt.param_groups[0]["params"], [shard]
        opt.step()
        opt.param_groups[0]["params"] = kept
    return shard.detach()


def train_plain(make, size=23):
    weights = torch.nn.Parameter(torch.linspace(-1, 1, size))
    opt = make([weights])
    for grad in gradients(size):
        weights.grad = grad
        opt.step()
    return weights.detach()


ADAM = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
TORCH_ADAM = {**ADAM, "betas": (0.8, 0.95)}


def coupled(params):
    return torch.optim.Adam(params, **TORCH_ADAM)


def decoupled(params):
    return torch.optim.AdamW(params, **TORCH_ADAM)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("type_name", "params", "reference"),
    [
        ("Adam", ADAM, decoupled),
        ("ADAM", {**ADAM, "adam_w_mode": False}, coupled),
        ("adam", {**ADAM, "torch_adam": True}, decoupled),
        ("adam", {**ADAM, "torch_adam": True, "adam_w_mode": False}, coupled),
        ("AdamW", ADAM, decoupled),
        ("adamw", {**ADAM, "adam_w_mode": False}, decoupled),
        ("AdamW", {**ADAM, "torch_adam": True, "bias_correction": True}, decoupled),
        ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1)),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("RMSprop", {"lr": 0.01}, lambda p: torch.optim.RMSprop(p, lr=0.01)),
        ("NAdam", {}, torch.optim.NAdam),
        ("adamax", {}, torch.optim.Adamax),
    ],
)
def test_flat_shards_step_as_plain_torch(type_name, params, reference, offload):
    torch.testing.assert_close(
        train_flat(build(type_name, params, offload)), train_plain(reference), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("offload", [False, True])
def test_lion_against_its_definition(offload):
    lr, beta1, beta2, decay = 0.01, 0.9, 0.99, 0.1
    shard = train_flat(build("Lion", {"lr": lr, "betas": [beta1, beta2], "weight_decay": decay}, offload))
    weights, momentum = torch.linspace(-1, 1, 23), torch.zeros(23)
    for grad in gradients(23):
        weights = weights * (1 - lr * decay) - lr * torch.sign(beta1 * momentum + (1 - beta1) * grad)
        momentum = beta2 * momentum + (1 - beta2) * grad
    torch.testing.assert_close(shard, weights, rtol=1e-6, atol=1e-7)


def test_lion_leaves_gradients_alone_and_runs_closures():
    weights = torch.nn.Parameter(torch.ones(3))
    opt = FusedLion([weights, torch.nn.Parameter(torch.ones(2))])

    def closure():
        loss = (weights * 2).sum()
        loss.backward()
        return loss

    assert opt.step(closure) == 6
    assert weights.grad is not None and weights.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("type_name", "offload", "expected"),
    [
        ("adam", False, FusedAdam),
        ("adamw", False, FusedAdam),
        ("adam", True, DeepSpeedCPUAdam),
        ("adamw", True, DeepSpeedCPUAdam),
        ("adagrad", True, DeepSpeedCPUAdagrad),
        ("lion", False, FusedLion),
        ("lion", True, DeepSpeedCPULion),
        ("sgd", True, torch.optim.SGD),
    ],
)
def test_which_class_is_chosen(type_name, offload, expected):
    assert type(build(type_name, {"lr": 0.1}, offload)) is expected


def test_a_device_without_fused_kernels_gets_torchs_own_class():
    assert type(build("adam", device="meta")) is torch.optim.AdamW


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_scale_and_overflow_flag_are_honoured_on_the_device(cls):
    assert cls.supports_device_scale

    def step(scale=None, inf=None):
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 23))
        opt = cls([weights], lr=0.01)
        for grad in gradients(23):
            weights.grad = grad * (scale or 1)
            if scale is not None:
                opt.grad_scale = torch.tensor(float(scale))
                opt.found_inf = torch.tensor(float(inf))
            opt.step()
        return weights.detach(), opt

    plain, _ = step()
    scaled, _ = step(scale=1024, inf=0)
    assert torch.equal(scaled, plain)
    skipped, opt = step(scale=1024, inf=1)
    assert torch.equal(skipped, torch.linspace(-1, 1, 23))
    (state,) = opt.state.values()
    assert float(state["step"]) == 0 and not state["exp_avg"].any()


def test_groups_keep_their_options():
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5},
        {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.0},
    ]
    opt = build("AdamW", {"lr": 0.1, "weight_decay": 0.3}, groups=groups)
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in opt.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("type_name", ["adam", "adagrad", "lion", "sgd"])
def test_state_survives_a_save_and_load(type_name):
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    first = build(type_name, {"lr": 0.1}, groups=[weights])
    grads = gradients(9)
    for grad in grads[:3]:
        weights.grad = grad
        first.step()
    copied = torch.nn.Parameter(weights.detach().clone())
    second = build(type_name, {"lr": 0.7}, groups=[copied])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for grad in grads[3:]:
        weights.grad = copied.grad = grad
        first.step()
        second.step()
    assert torch.equal(weights, copied)


@pytest.mark.parametrize("type_name", [*REFUSED, "Lamb", "MUON"])
def test_optimizers_that_need_whole_parameters_are_refused(type_name):
    with pytest.raises(UnsupportedConfigError, match="^optimizer.type") as caught:
        build(type_name)
    assert type_name in str(caught.value) and "use" in str(caught.value)


@pytest.mark.parametrize(
    ("type_name", "params", "words"),
    [
        ("AdamX", {}, ["optimizer.type", "'AdamX'", "Did you mean"]),
        ("Optimizer", {}, ["optimizer.type"]),
        ("Adam", {"learning_rate": 1}, ["optimizer.params.learning_rate", "FusedAdam"]),
        ("Adam", {"weight_decy": 1}, ["optimizer.params.weight_decy", "'weight_decay'"]),
        ("Adam", {"lr": "auto"}, ["optimizer.params.lr", "auto"]),
        ("Adam", {"lr": -1}, ["optimizer.params", "-1"]),
        ("Adam", {"lr": "fast"}, ["optimizer.params", "fast"]),
        ("Adam", {"betas": [0.9]}, ["optimizer.params", "betas"]),
        ("Adam", {"max_grad_norm": 1.0}, ["optimizer.params.max_grad_norm", "gradient_clipping"]),
        ("Adam", {"bias_correction": False}, ["optimizer.params", "bias_correction"]),
        ("Adam", {"bias_correction": False, "torch_adam": True}, ["optimizer.params.bias_correction"]),
        ("Adam", {"fp32_optimizer_states": False}, ["optimizer.params.fp32_optimizer_states"]),
        ("Adam", {"amsgrad": True}, ["optimizer.params", "amsgrad"]),
        ("Lion", {"betas": [0.9, 1.5]}, ["optimizer.params", "betas", "1.5"]),
        ("Lion", {"eps": 1e-8}, ["optimizer.params.eps"]),
        ("Adagrad", {"betas": [0.9]}, ["optimizer.params.betas"]),
        ("SGD", {"lr": 0.1, "nesterof": True}, ["optimizer.params.nesterof", "'nesterov'"]),
    ],
)
def test_wrong_optimizers_are_refused_by_name(type_name, params, words):
    with pytest.raises(ConfigError) as caught:
        build(type_name, params)
    for word in words:
        assert word in str(caught.value)


def test_what_the_classes_do_not_have_raises():
    weights = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam(weights, amsgrad=True)
    for cls in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion):
        with pytest.raises(NotSupportedError, match="fp32_optimizer_states"):
            cls(weights, fp32_optimizer_states=False)
    with pytest.raises(NotSupportedError, match="amsgrad"):
        DeepSpeedCPUAdagrad(weights, amsgrad=True)


def test_native_ops_are_reported_as_not_built():
    import deepspeed.ops
    from deepspeed.ops.aio import AsyncIOBuilder

    assert AsyncIOBuilder.NAME == "async_io" and deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] is False
    with pytest.raises(NotSupportedError, match="async_io"):
        AsyncIOBuilder().load()
