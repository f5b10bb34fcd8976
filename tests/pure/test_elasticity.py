# SPDX-License-Identifier: Apache-2.0
"""Promise: `compute_elastic_config` gives a batch size that divides exactly on every number of ranks that it names.

The values are those that another implementation of the same published arithmetic gave for the same sections.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepspeed.elasticity import ElasticityConfigError, ElasticityIncompatibleWorldSize, compute_elastic_config
from deepspeed.errors import ConfigError

SECTION = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}


def compute(world_size: int = 0, **changes: Any) -> Any:
    return compute_elastic_config({"elasticity": {**SECTION, **changes}}, "0.18.9", world_size=world_size)


@pytest.mark.parametrize(
    ("world_size", "changes", "batch", "first", "how_many", "micro"),
    [
        (4, {}, 1680, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12], 32, 6),
        (11, {}, 1980, [11], 1, 6),
        (7, {"min_gpus": 7, "max_gpus": 64}, 1680, [7, 8, 10, 12, 14, 15, 20, 21, 24, 28], 16, 6),
        (4, {"min_gpus": 7, "max_gpus": 64}, 2000, [4], 1, 4),
        (4, {"micro_batch_sizes": [3, 5], "max_train_batch_size": 100}, 100, [4], 1, 5),
        (7, {"micro_batch_sizes": [3, 5], "max_train_batch_size": 100}, 84, [7], 1, 3),
        (7, {"version": 0.1}, 1680, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12], 32, 6),
    ],
)
def test_known_values(
    world_size: int, changes: dict[str, Any], batch: int, first: list[int], how_many: int, micro: int
) -> None:
    found, valid, chosen = compute(world_size, **changes)
    assert (found, valid[:10], len(valid), chosen) == (batch, first, how_many, micro)


def test_every_named_number_of_ranks_works() -> None:
    for micros, limit, a_node, larger in itertools.product(
        ([1], [3, 5], [7, 4, 10], [2, 9]), (24, 100, 2310), (1, 2, 8), (True, False)
    ):
        section = {
            "micro_batch_sizes": micros,
            "max_train_batch_size": limit,
            "num_gpus_per_node": a_node,
            "prefer_larger_batch": larger,
        }
        batch, valid, _ = compute(2, **section)
        assert 0 < batch <= limit and valid
        for ranks in valid:
            assert any(batch % (micro * ranks) == 0 for micro in micros), (section, batch, ranks)


def test_without_a_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute(version=0.1)[0] == 1680 and len(compute(version=0.1)) == 2
    section = {"elasticity": {**SECTION, "version": 0.1}}
    assert compute_elastic_config(section, "0.18.9", return_microbatch=True)[2] == 6
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="give world_size= or set WORLD_SIZE"):
        compute()
    monkeypatch.setenv("WORLD_SIZE", "11")
    assert compute() == (1980, [11], 6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"enabled": False}, "elasticity.enabled: false"),
        ({"micro_batch_sizes": [0, 1]}, "elasticity.micro_batch_sizes"),
        ({"micro_batch_sizes": [2, "a"]}, "elasticity.micro_batch_sizes"),
        ({"micro_batch_sizes": []}, "elasticity.micro_batch_sizes"),
        ({"micro_batch_sizes": [8], "max_train_batch_size": 4}, "8 is more than elasticity.max_train_batch_size, 4"),
        ({"max_gpus": 0}, "elasticity.max_gpus"),
        ({"min_gpus": 4, "max_gpus": 2}, "elasticity.min_gpus: 4 is more than elasticity.max_gpus, 2"),
        ({"version": 0.3}, "elasticity.version: must be 0.1 or 0.2, got 0.3"),
        ({"model_parallel_size": 2}, "elasticity.model_parallel_size: 2"),
        ({"micro_batches": [2]}, "elasticity.micro_batches"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ElasticityConfigError, match=text) as caught:
        compute(4, **changes)
    assert isinstance(caught.value, ConfigError)


def test_what_cannot_be_computed() -> None:
    with pytest.raises(ElasticityConfigError, match="elasticity: the section is missing"):
        compute_elastic_config({}, "0.18.9")
    with pytest.raises(ElasticityConfigError, match="elasticity.max_train_batch_size: missing"):
        compute_elastic_config({"elasticity": {"enabled": True, "micro_batch_sizes": [2]}}, "0.18.9", world_size=2)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="no train batch size runs on 11 ranks"):
        compute(11, version=0.1)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="no train batch size runs on 60 ranks"):
        compute(60, max_train_batch_size=100)
    with pytest.raises(Exception, match="target_deepspeed_version 0.1.0 has no elasticity"):
        compute_elastic_config({"elasticity": SECTION}, "0.1.0", world_size=2)
