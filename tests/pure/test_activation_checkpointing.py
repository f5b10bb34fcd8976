# SPDX-License-Identifier: Apache-2.0
"""Promise: a checkpointed forward has the loss and gradients of a plain one, random numbers included."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import ConfigError, NotSupportedError, UsageError
from deepspeed.runtime.activation_checkpointing import checkpointing


class Mpu:
    """Two model-parallel ranks, of which this is the second."""

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_rank(self):
        return 1


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(checkpointing, "_configured", None)
    monkeypatch.setattr(checkpointing, "_mpu", None)
    yield
    checkpointing.get_cuda_rng_tracker().reset()


def loss_and_grads(run):
    torch.manual_seed(7)
    checkpointing.model_parallel_cuda_manual_seed(5)
    first, second = torch.nn.Linear(7, 15), torch.nn.Linear(15, 3)
    inputs = torch.randn(4, 7, requires_grad=True)
    calls = []

    def block(x, factor):
        calls.append(1)
        hidden = torch.nn.functional.dropout(first(x), 0.5)
        with checkpointing.get_cuda_rng_tracker().fork():
            hidden = hidden + torch.rand(4, 15)
        return second(torch.nn.functional.dropout(hidden * factor, 0.5)), x.sum()

    out, total = run(block, inputs, 2.0)
    loss = (out**2).sum() + total
    loss.backward()
    grads = [inputs.grad, *(p.grad for p in (*first.parameters(), *second.parameters()))]
    with checkpointing.get_cuda_rng_tracker().fork():
        after = torch.rand(3)
    return loss.detach(), grads, (after, torch.rand(3)), len(calls)


@pytest.mark.parametrize("options", [{}, {"checkpoint_in_cpu": True}, {"synchronize": True, "profile": True}])
def test_same_loss_gradients_and_random_states(options):
    expected, grads, after, calls = loss_and_grads(lambda f, *args: f(*args))
    assert calls == 1
    if options:
        checkpointing.configure(None, **options)
    loss, found, state, calls = loss_and_grads(checkpointing.checkpoint)
    assert calls == 2 and torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))


def test_configuration_and_arguments():
    assert not checkpointing.is_configured()
    section = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}
    checkpointing.configure(None, deepspeed_config=section, profile=False)
    assert checkpointing.is_configured()
    assert checkpointing._configured == checkpointing._Options(cpu=True, synchronize=False, profile=False)
    checkpointing.configure(None, partition_activations=True)
    checkpointing.reset()
    assert checkpointing.is_configured() and checkpointing._configured == checkpointing._Options()


def test_what_cannot_be_done_raises_by_name():
    with pytest.raises(NotSupportedError, match="contiguous_memory_optimization"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    with pytest.raises(NotSupportedError, match="partition_activations"):
        checkpointing.configure(Mpu(), {"activation_checkpointing": {"partition_activations": True}})
    with pytest.raises(ConfigError, match="activation_checkpointing.profile"):
        checkpointing.configure(None, {"activation_checkpointing": {"profile": "perhaps"}})
    assert not checkpointing.is_configured()


def test_named_states():
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(11)
    default = torch.rand(3)
    with tracker.fork():
        rank0 = torch.rand(3)
    checkpointing.configure(Mpu())
    checkpointing.model_parallel_cuda_manual_seed(11)
    with tracker.fork():
        rank1 = torch.rand(3)
    assert torch.equal(torch.rand(3), default) and not torch.equal(rank0, rank1)
    with pytest.raises(UsageError, match="exists already"):
        tracker.add(checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME, 1)
    with pytest.raises(UsageError, match="seed"):
        tracker.add("other", 11 + 2718 + 1)
    with pytest.raises(UsageError, match="'missing'"), tracker.fork("missing"):
        pass
