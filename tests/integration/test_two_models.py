# SPDX-License-Identifier: Apache-2.0
"""A policy and a reference model in one process, as RLHF trainers have them: each behaves as it does alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration import tiny

WORLD = 4


def _config(hpz: int, trained: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if trained:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    return config


def _ids(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([row["input_ids"] for row in tiny.samples(2, start=2 * rank + 11 * step)])


def _engine(path: str, hpz: int, trained: bool) -> Any:
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed

    config = _config(hpz, trained)
    holder = HfDeepSpeedConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    del holder
    if trained:
        return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    return deepspeed.initialize(model=model, config=config)[0].eval()


def _logits(engine: Any, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return engine(input_ids=_ids(rank, 99)).logits.clone()


def _train(engine: Any, rank: int, step: int) -> float:
    engine.train()
    ids = _ids(rank, step)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def both(policy_path: str, reference_path: str, hpz: int) -> dict[str, Any]:
    """Runs on every rank: training steps of the policy between passes of the reference and of the policy."""
    tiny.forget_clients()
    policy, reference = _engine(policy_path, hpz, True), _engine(reference_path, hpz, False)
    rank, losses, judged, own = policy.global_rank, [], [], []
    for step in range(3):
        judged.append(_logits(reference, rank))
        losses.append(_train(policy, rank, step))
        policy.eval()
        own.append(_logits(policy, rank))
    # The reference becomes the policy, as after an epoch of PPO: all weights, full and in place.
    import deepspeed

    pairs = list(zip(reference.module.parameters(), policy.module.parameters(), strict=True))
    for old, new in pairs:
        with deepspeed.zero.GatheredParameters([old, new], modifier_rank=0):
            if rank == 0:
                old.data.copy_(new.data)
    synced = _logits(reference, rank)
    for engine in (policy, reference):
        engine.destroy()
    tiny.forget_clients()
    return {"losses": losses, "judged": judged, "own": own, "synced": synced}


def solo(policy_path: str, reference_path: str) -> dict[str, Any]:
    """Runs on every rank, without hpZ: one model after the other."""
    tiny.forget_clients()
    reference = _engine(reference_path, 1, False)
    rank = reference.global_rank
    judged = _logits(reference, rank)
    reference.destroy()
    policy = _engine(policy_path, 1, True)
    losses, own = [], []
    for step in range(3):
        losses.append(_train(policy, rank, step))
        policy.eval()
        own.append(_logits(policy, rank))
    policy.destroy()
    tiny.forget_clients()
    return {"losses": losses, "judged": judged, "own": own}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    run_ranks(tiny.save_model, 1, str(folder / "policy"), "llama", init_group=False)
    return str(folder / "policy"), str(folder / "policy")


@pytest.mark.parametrize("hpz", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_engines_equal_two_solo_runs(hpz: int, models: tuple[str, str]) -> None:
    alone = run_ranks(solo, WORLD, *models, timeout=120)
    for got, want in zip(run_ranks(both, WORLD, *models, hpz, timeout=120), alone, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-6)
        for logits in got["judged"]:
            assert torch.equal(logits, want["judged"])
        for mine, theirs in zip(got["own"], want["own"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(got["synced"], got["own"][-1])
