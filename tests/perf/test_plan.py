# SPDX-License-Identifier: Apache-2.0
"""The cost model: figures worked out by hand from the published formulas, monotony, clear errors, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deepspeed.errors import ConfigError
from deepspeed.utils import plan
from deepspeed.utils.plan import Cluster

EIGHT, SEVENTY = 8.03e9, 70.6e9
COLUMNS = ("zero3", "hpz", "fsdp2-int", "hpz+qwz", "zero++", "hsdp")

# gigabytes per rank and step, between nodes and inside, of Llama 3 8B and 70B
TRAFFIC = [
    (Cluster(EIGHT, 2, 8, micro_batches=1), "3.0/42 2.0/42 2.0/42 1.5/28 0.75/18 2.0/42"),
    (Cluster(EIGHT, 2, 8, micro_batches=4), "12.0/169 5.0/169 8.0/169 4.5/113 1.5/70 2.0/169"),
    (Cluster(EIGHT, 8, 8, micro_batches=1), "5.3/42 3.5/42 3.5/42 2.6/28 1.3/18 3.5/42"),
    (Cluster(SEVENTY, 8, 8, micro_batches=4), "185/1483 77/1483 124/1483 70/989 23/619 31/1483"),
]
STATE = [
    (Cluster(EIGHT, 2, 8), (8.0, 10.0, 9.0, 16.1, 10.0)),
    (Cluster(EIGHT, 8, 8), (2.0, 4.0, 3.0, 16.1, 5.5)),
    (Cluster(SEVENTY, 8, 8), (17.7, 35.3, 26.5, 141.2, 48.5)),
]


def close(found: float, shown: str) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(found / 1e9 - float(shown)) <= 0.5001 * 10**-digits + 0.005


@pytest.mark.parametrize(("cluster", "row"), TRAFFIC)
def test_traffic_of_published_examples(cluster: Cluster, row: str) -> None:
    for scheme, cell in zip(COLUMNS, row.split(), strict=True):
        inter, intra = cell.split("/")
        found = plan.cost(scheme, cluster)
        assert close(found.inter, inter), (scheme, found.inter)
        assert close(found.intra, intra), (scheme, found.intra)


@pytest.mark.parametrize(("cluster", "expected"), STATE)
def test_memory_of_published_examples(cluster: Cluster, expected: tuple[float, ...]) -> None:
    found = [
        plan.memory("zero3", cluster),
        plan.memory("hpz", cluster),
        plan.memory("zero++", cluster, int8_secondary=True),
        plan.memory("hsdp", cluster),
        plan.memory("hfsdp", cluster),
    ]
    assert [value / 1e9 for value in found] == pytest.approx(expected, abs=0.06)


def test_hpz_crosses_nodes_once_a_step_however_many_micro_batches() -> None:
    """1 + k crossings instead of 3 k: the gather of new weights and one reduction per micro-batch."""
    for k in (1, 2, 5, 16):
        cluster = Cluster(1e9, 4, 8, micro_batches=k)
        ratio = plan.cost("hpz", cluster).inter / plan.cost("zero3", cluster).inter
        assert ratio == pytest.approx((1 + k) / (3 * k))
        assert plan.cost("hpz", cluster).intra == pytest.approx(plan.cost("zero3", cluster).intra)


def test_one_group_of_all_ranks_is_zero3() -> None:
    one = Cluster(1e9, 1, 8, micro_batches=3)
    spanning = Cluster(1e9, 2, 8, partition=16, micro_batches=3)
    for cluster in (one, spanning):
        for scheme in ("hpz", "fsdp2-int", "hsdp"):
            expected, found = plan.cost("zero3", cluster), plan.cost(scheme, cluster)
            figures = (found.inter, found.intra, found.seconds, found.memory)
            assert figures == pytest.approx((expected.inter, expected.intra, expected.seconds, expected.memory))
    assert plan.cost("zero3", one).inter == 0


def test_one_rank_receives_nothing() -> None:
    for row in plan.costs(Cluster(1e9, 1, 1)):
        assert (row.inter, row.intra, row.seconds) == (0, 0, 0)


def test_seconds_follow_the_slower_link_of_each_collective() -> None:
    slow = Cluster(1e9, 2, 8, inter_gbps=8.0, intra_gbps=8e6)
    # three collectives of M / 2 / 8 bytes each at 1 GB/s
    assert plan.cost("zero3", slow).seconds == pytest.approx(3 * 0.5 * 2.0 / 8)
    assert plan.cost("hpz", slow).seconds == pytest.approx(2 * 0.5 * 2.0 / 8, rel=2e-2)
    fast = Cluster(1e9, 2, 8, inter_gbps=8e6, intra_gbps=8.0)
    assert plan.cost("hpz", fast).seconds == pytest.approx(plan.cost("zero3", fast).seconds)


def test_a_group_smaller_than_a_node_halves_its_own_traffic() -> None:
    """P = 2 of 8: a gather inside gives 1/2 of the weights, one over all ranks as before."""
    cluster = Cluster(1e9, 2, 8, partition=2, micro_batches=1)
    found = plan.cost("hpz", cluster)
    assert found.inter == plan.cost("hpz", Cluster(1e9, 2, 8)).inter
    assert found.intra == pytest.approx(2e9 * (2 * 7 / 8 + 1 / 2))
    assert found.memory - plan.memory("zero3", cluster) == pytest.approx(2e9 / 2)


def test_options_change_memory_and_gathers() -> None:
    base = Cluster(8e9, 2, 8)
    split = Cluster(8e9, 2, 8, master_bytes=2)
    assert plan.memory("zero3", base) - plan.memory("zero3", split) == pytest.approx(2 * 8e9 / 16)
    kept = Cluster(8e9, 2, 8, reuse=1.0)
    assert plan.cost("zero3", kept).inter == pytest.approx(plan.cost("zero3", base).inter * 2 / 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": 0}, "params must be positive"),
        ({"params": float("nan")}, "params must be positive"),
        ({"nodes": -1}, "nodes must be positive"),
        ({"inter_gbps": 0}, "inter_gbps must be positive"),
        ({"micro_batches": 0}, "micro_batches must be positive"),
        ({"reuse": 1.5}, "between 0 and 1"),
        ({"partition": 3}, "partition 3 does not divide the 16 ranks; allowed: 1, 2, 4, 8, 16"),
        ({"partition": 6, "nodes": 3, "gpus_per_node": 4}, "across nodes"),
        ({"master_bytes": 3}, "master_bytes"),
        ({"grad_bytes": 8}, "grad_bytes"),
    ],
)
def test_bad_input_names_the_value(change: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Cluster(**{"params": 1e9, "nodes": 2, "gpus_per_node": 8, **change})  # type: ignore[arg-type]


def test_unknown_scheme() -> None:
    with pytest.raises(ConfigError, match="zero4"):
        plan.cost("zero4", Cluster(1e9, 1))
    with pytest.raises(ConfigError, match="zero4"):
        plan.memory("zero4", Cluster(1e9, 1))


def test_command_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params", "8e9", "--nodes", "2", "--micro-batches", "4"]
    assert plan.main([*arguments, "--json"]) == 0
    found = {row["scheme"]: row for row in json.loads(capsys.readouterr().out)["costs"]}
    assert list(found) == list(plan.SCHEMES)
    assert [name for name, row in found.items() if row["runs_here"]] == ["zero3", "hpz"]
    assert plan.main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in plan.SCHEMES)
    assert plan.main([*arguments, "--hpz", "5"]) == 2
    assert "allowed: 1, 2, 4, 8, 16" in capsys.readouterr().err


def test_the_command_does_not_load_torch() -> None:
    code = (
        "import sys; from deepspeed.utils import plan; plan.main(['--params', '1e9', '--nodes', '2']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
