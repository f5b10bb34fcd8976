# SPDX-License-Identifier: Apache-2.0
"""Promise: what the installed clients use of `deepspeed` is here, and where they compare versions is written down.

The next name that a client begins to use fails these tests, with the place in the client.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from tests.clients import scan
from tests.harness.pool import run_ranks
from tests.harness.skips import needs
from tests.meta.sources import ROOT

ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
KNOWINGLY_ABSENT = {
    f"{ULYSSES}.UlyssesSPAttentionHF": "sequence parallelism is not built",
    f"{ULYSSES}.UlyssesSPAttentionHF.register_with_transformers": "sequence parallelism is not built",
    f"{ULYSSES}.UlyssesSPDataLoaderAdapter": "sequence parallelism is not built",
}
"""Names that clients use on request only, of features that are not built."""

OF_OTHERS = {
    "zero_stage": "accelerate's DeepSpeedPlugin",
    "model_config": "an engine of vLLM",
    "model_executor": "an engine of vLLM",
}
"""Attributes that look like ours and are read of other libraries' objects."""

CLIENTS = scan.installed()


@pytest.fixture(scope="module")
def uses() -> dict[str, scan.Uses]:
    """Client -> what it uses."""
    return {client: scan.scan(folder) for client, folder in CLIENTS.items()}


@pytest.mark.parametrize("client", scan.CLIENTS)
def test_names(client: str, uses: dict[str, scan.Uses]) -> None:
    if client not in uses:
        pytest.skip(needs(client))
    assert uses[client].names, f"{client} uses nothing of deepspeed: the scanner is blind"
    assert [use for use in scan.missing(uses[client]) if use.what not in KNOWINGLY_ABSENT] == []


def test_what_is_listed_as_absent_is_absent() -> None:
    assert [name for name in KNOWINGLY_ABSENT if scan.exists(name)] == []


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


def lacking(attributes: list[str], of_engines: list[str]) -> list[str]:
    """Those that neither parameters, optimizer, engine nor module have after a step; engines alone for the second."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=_Tiny(), config=config)
    engine.backward(engine(torch.ones(1, 3)))
    engine.step()
    objects: list[Any] = [engine.module.layer.weight, optimizer, engine, engine.module]
    found = [name for name in attributes if not any(hasattr(one, name) for one in objects)]
    return found + [f"engine.{name}" for name in of_engines if not hasattr(engine, name)]


def test_attributes(uses: dict[str, scan.Uses]) -> None:
    if not uses:
        pytest.skip(needs("a client"))
    attributes = {use.what for found in uses.values() for use in found.attributes} - {*OF_OTHERS}
    of_engines = {use.what for found in uses.values() for use in found.of_engines} - {*OF_OTHERS}
    assert "ds_numel" in attributes and "set_gradient_accumulation_boundary" in of_engines, "the scanner is blind"
    assert run_ranks(lacking, 1, sorted(attributes), sorted(of_engines)) == [[]]


# -- versions


def _rows() -> dict[str, set[str]]:
    """Client -> the comparisons that docs/versions.md lists for it."""
    rows: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "versions.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and re.fullmatch(r"`.+`", cells[2]):
            rows.setdefault(cells[1].split()[0], set()).add(cells[2].strip("`"))
    return rows


@pytest.mark.parametrize("client", scan.CLIENTS)
def test_every_comparison_of_versions_is_documented(client: str, uses: dict[str, scan.Uses]) -> None:
    if client not in uses:
        pytest.skip(needs(client))
    assert {use.what for use in uses[client].versions} - _rows().get(client, set()) == set()


def test_the_distribution_has_the_package_s_version() -> None:
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(needs("deepspeed as a distribution"))
    assert installed == deepspeed.__version__ == deepspeed.version


# -- the scanner itself

SOURCE = """
import deepspeed
from torch import distributed as dist
import deepspeed.comm as other
VERSION = "0.20.2"

def aliases():
    from deepspeed.runtime.zero import partition_parameters as pp
    zero = deepspeed.zero
    pp.no_such_name
    zero.GatheredParameters([])
    zero.NoSuchContext
    getattr(deepspeed, "no_such_function")
    getattr(deepspeed, "optional_function", None)

def elsewhere(zero, pp):
    zero.not_ours
    pp.not_ours
    dist.not_ours
    other.get_rank
    other.no_such_collective()

def reads(param, model):
    param.ds_no_such
    param.ds_own
    self.deepspeed_engine.no_such_method()
    hasattr(model, "zero_no_such")

class Own:
    ds_own: int = 3

def versions():
    import deepspeed
    ours = version.parse(importlib.metadata.version("deepspeed"))
    minimum = "0.18.2"
    if ours < parse("0.20.2") or compare_versions("deepspeed", ">=", minimum):
        need = "deepspeed>=0.9.3"
    return Version(deepspeed.__version__) >= Version("0.16.4") or torch.__version__ > "2"
"""


def test_the_scanner_follows_aliases(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(SOURCE)
    (tmp_path / "template.py").write_text("import deepspeed\n{{ not python }}\nfor\n")
    found = scan.scan(tmp_path)
    names = {use.what.removeprefix("deepspeed.") for use in scan.missing(found)}
    assert names == {
        "runtime.zero.partition_parameters.no_such_name",
        "zero.NoSuchContext",
        "no_such_function",
        "comm.no_such_collective",
    }
    assert {use.what for use in found.attributes} == {"ds_no_such", "zero_no_such"}
    assert {use.what for use in found.of_engines} == {"no_such_method"}
    assert {use.what for use in found.versions} == {
        'ours < parse("0.20.2")',
        'compare_versions("deepspeed", ">=", "0.18.2")',
        '"deepspeed>=0.9.3"',
        'Version(deepspeed.__version__) >= Version("0.16.4")',
    }
    assert [line.split(":")[0] for line in found.unread] == ["template.py"]
    where = next(use.where for use in found.names if use.what.endswith("no_such_name"))
    assert where == f"{tmp_path.name}/client.py:10"
