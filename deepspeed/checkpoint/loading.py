# SPDX-License-Identifier: Apache-2.0
"""The load protocol up to staged shards: one decision about the tag, then every rank opens what it needs.

What must hold: rank 0 (with node-local storage the first rank of each node) decides which tag is loaded and every rank
follows; hashes of a file are compared before anything of it is used; nothing here changes the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.control import Control
from deepspeed.checkpoint.folder import TagFolder, open_tag, resolve_tag
from deepspeed.checkpoint.reader import ZeroSource
from deepspeed.checkpoint.reshard import Source
from deepspeed.checkpoint.universal import UniversalSource, is_universal
from deepspeed.checkpoint.writer import Node
from deepspeed.checkpoint.zero3_format import LATEST, LATEST_UNIVERSAL
from deepspeed.errors import CheckpointCorrupt, CheckpointError

__all__ = ["Found", "FullWeights", "Loaded", "find", "open_source", "whole"]


@dataclass(frozen=True)
class Found:
    """The tag that all ranks load.

    ``nonce``: of its manifest, empty without one.  ``local``: with node-local storage a rank needs its own files only.
    """

    path: Path
    nonce: str
    universal: bool
    local: bool

    @property
    def verifiable(self) -> bool:
        return bool(self.nonce)


@dataclass(frozen=True)
class Loaded:
    """An opened checkpoint: shards, and the model_states content that goes with this rank."""

    source: Source
    model: dict[str, Any]
    model_path: str

    def full_state_dict(self, dtypes: Mapping[str, torch.dtype]) -> FullWeights:
        """Full weights and buffers by name, read on access; weights in `dtypes` (fp32 where not given)."""
        return FullWeights(self.source, dtypes)


def find(control: Control, load_dir: Path, tag: str | None, node: Node, *, universal: bool) -> Found | None:
    """Agree on the tag; None when there is no ``latest`` and no tag was given.  Collective."""
    error: Exception | None = None
    answer: dict[str, Any] = {"asked": tag, "leads": node.publishes}
    if node.publishes:
        try:
            answer.update(_decide(load_dir, tag, node, universal))
        except Exception as failure:
            error = failure
    answers = control.agree("finding the checkpoint", error, answer)
    asked = {entry["asked"] for entry in answers}
    if len(asked) > 1:
        raise CheckpointError(f"{control.call}: ranks asked for different tags: {sorted(map(str, asked))}")
    decisions = [entry for entry in answers if entry["leads"]]
    if len({entry["tag"] for entry in decisions}) > 1:
        shown = ", ".join(f"rank {rank}: {a['tag']!r}" for rank, a in enumerate(answers) if a["leads"])
        raise CheckpointError(f"{control.call}: the nodes hold different checkpoints ({shown}); copy or remove by hand")
    mine = answers[node.first_rank]
    if mine["tag"] is None:
        return None
    return Found(load_dir / mine["tag"], mine["nonce"], mine["universal"], node.local)


def _decide(load_dir: Path, tag: str | None, node: Node, universal: bool) -> dict[str, Any]:
    name = resolve_tag(load_dir, tag, LATEST_UNIVERSAL if universal else LATEST)
    if name is None and universal:
        name = resolve_tag(load_dir, tag, LATEST)
    if name is None:
        return {"tag": None}
    if universal and is_universal(load_dir / name):
        return {"tag": name, "nonce": "", "universal": True}
    folder = open_tag(load_dir / name, {node.rank} if node.local else None)
    nonce = folder.manifest.nonce if folder.manifest is not None else ""
    return {"tag": name, "nonce": nonce, "universal": False}


def open_source(found: Found, *, rank: int, world_size: int, verify: bool, allow: Iterable[str] = ()) -> Loaded:
    """Open what this rank needs.  Raises `CheckpointCorrupt` for files that do not match their manifest."""
    if found.universal:
        source = UniversalSource(found.path, allow)
        return Loaded(source, source.model, str(found.path / source.model_name))
    folder = open_tag(found.path, {rank} if found.local else None)
    nonce = folder.manifest.nonce if folder.manifest is not None else ""
    if nonce != found.nonce:
        raise CheckpointCorrupt(f"{found.path} was overwritten while it was being read")
    if verify:
        folder.verify(_to_verify(folder, rank, world_size, found.local))
    home = rank if rank in folder.ranks else folder.ranks[rank % len(folder.ranks)]
    zero = ZeroSource(folder, home, allow)
    return Loaded(zero, zero.model(home), str(folder.path / folder.model_files[home]))


def _to_verify(folder: TagFolder, rank: int, world_size: int, local: bool) -> list[str]:
    """The files whose hashes this rank compares: its own, or its share of all when the world size differs."""
    if local or folder.world_size == world_size:
        return folder.files_of(rank)
    names = [name for saved in folder.ranks for name in folder.files_of(saved)]
    return names[rank::world_size]


def whole(source: Source, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One full parameter on the CPU, assembled from all ranks' shards."""
    out = torch.empty(source.shapes[name], dtype=dtype)
    source.read_weight(name, 1, 0, out.view(-1))
    return out


class FullWeights(Mapping[str, torch.Tensor]):
    """Mapping of name -> full tensor that assembles a parameter when it is asked for."""

    def __init__(self, source: Source, dtypes: Mapping[str, torch.dtype]) -> None:
        self._source, self._dtypes = source, dtypes
        source.prepare(list(source.shapes), 1, 0)
        aliases = {alias: owner for alias, owner in source.aliases.items() if owner in source.shapes}
        self._owner: dict[str, str] = {**{name: name for name in source.shapes}, **aliases}

    def __len__(self) -> int:
        return len(self._owner) + len(self._source.buffers)

    def __iter__(self) -> Iterator[str]:
        yield from self._owner
        yield from self._source.buffers

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._source.buffers:
            return self._source.buffers[name]
        return whole(self._source, self._owner[name], self._dtypes.get(name, torch.float32))

    def names(self) -> Sequence[str]:
        """Names of parameters, aliases included, without buffers."""
        return list(self._owner)
