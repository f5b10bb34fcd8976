# SPDX-License-Identifier: Apache-2.0
"""What is measured: works (model, ranks, batch, accumulation, checkpointing, hpZ) by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """One measured training job; every variant runs it from the same weights on the same data."""

    name: str
    model: str
    ranks: int
    micro: int
    length: int
    accumulation: int = 1
    checkpointing: bool = False
    hpz: int = 1
    dtype: str = "bf16"

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.ranks * self.micro * self.length * self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a worker."""
        return asdict(self)


_ALL = [
    Work("2r-1x1024", "853m", 2, 1, 1024),
    Work("2r-4x2048", "853m", 2, 4, 2048),
    Work("2r-4x2048-ckpt", "853m", 2, 4, 2048, checkpointing=True),
    Work("2r-4of1x1024", "853m", 2, 1, 1024, accumulation=4),
    Work("4r-1x1024", "853m", 4, 1, 1024),
    Work("4r-hpz2", "853m", 4, 1, 1024, hpz=2),
    Work("4r-hpz2-4of1x1024", "853m", 4, 1, 1024, accumulation=4, hpz=2),
    Work("2r-3b-4x2048", "3b", 2, 4, 2048),
    Work("cpu-30m", "30m", 2, 1, 256, dtype="fp32"),
    Work("cpu-30m-bf16", "30m", 2, 1, 256),
    Work("cpu-30m-4micro", "30m", 2, 1, 256, accumulation=4, dtype="fp32"),
    Work("cpu-30m-4r-hpz2", "30m", 4, 1, 128, accumulation=2, hpz=2, dtype="fp32"),
    Work("tiny", "tiny", 2, 2, 32, dtype="fp32"),
    Work("tiny-bf16", "tiny", 2, 2, 32, checkpointing=True),
    Work("tiny-4r-hpz2", "tiny", 4, 1, 32, accumulation=2, hpz=2, dtype="fp32"),
]
WORKS = {work.name: work for work in _ALL}

SETS = {
    "gpu2": ["2r-1x1024", "2r-4x2048", "2r-4x2048-ckpt", "2r-4of1x1024"],
    "gpu4": ["4r-1x1024", "4r-hpz2", "4r-hpz2-4of1x1024"],
    "cpu": ["cpu-30m", "cpu-30m-bf16"],
    "tiny": ["tiny", "tiny-bf16"],
}


def select(names: list[str]) -> list[Work]:
    """Works by name or by name of a set, each once, in the order given.

    Raises:
        KeyError: a name is neither.
    """
    chosen: dict[str, Work] = {}
    for name in names:
        for each in SETS.get(name, [name]):
            chosen[each] = WORKS[each]
    return list(chosen.values())
