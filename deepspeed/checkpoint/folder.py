# SPDX-License-Identifier: Apache-2.0
"""Finding a checkpoint in a directory: which tag, is its file set complete, which files belong to which rank.

What must hold: nothing here opens a shard.  A tag with a manifest is judged by it; one without (written by another
tool) by its set of file names.  Every complaint says what was found and which tags are complete.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.manifest import Manifest, prefetch, read_manifest
from deepspeed.checkpoint.store import safe_component
from deepspeed.checkpoint.zero3_format import LATEST, rank_of, shard_names
from deepspeed.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch

__all__ = ["TagFolder", "complete_tags", "open_tag", "resolve_tag"]


@dataclass(frozen=True)
class TagFolder:
    """A tag folder whose file set is complete for ``ranks``.

    ``manifest`` is None for folders of other tools: sizes and hashes cannot be checked then.
    """

    path: Path
    world_size: int
    ranks: tuple[int, ...]
    model_files: dict[int, str]
    optim_files: dict[int, str]
    manifest: Manifest | None

    def files_of(self, rank: int) -> list[str]:
        """Both files of one saved rank."""
        return [self.model_files[rank], self.optim_files[rank]]

    def verify(self, names: Collection[str]) -> None:
        """Compare the hashes of these files with the manifest (nothing to do without one)."""
        for name in names:
            prefetch(self.path / name)
        if self.manifest is not None:
            for name in names:
                self.manifest.check_hash(self.path, name)


def open_tag(folder: Path, only_ranks: Collection[int] | None = None) -> TagFolder:
    """Check the file set of a tag.

    ``only_ranks``: with node-local storage, the ranks whose files this node needs.  Raises `CheckpointCorrupt` for
    missing, truncated or extra files and `CheckpointMismatch` for folders that are not of ZeRO stage 3.
    """
    shards = shard_names(folder)
    manifest = read_manifest(folder)
    if manifest is not None:
        manifest.check_names_and_sizes(folder, shards)
    model: dict[int, str] = {}
    optim: dict[int, str] = {}
    for name in shards:
        found = rank_of(name)
        if found is None:
            raise CheckpointMismatch(f"{folder / name} belongs to a model-parallel rank; only data parallelism is read")
        target = model if found[1] == "model" else optim
        if found[0] in target:
            raise CheckpointCorrupt(f"{folder} holds both {target[found[0]]} and {name}; they come from two saves")
        target[found[0]] = name
    if not model:
        raise _not_stage_3(folder)
    world_size = manifest.world_size if manifest is not None else _world_size(model, optim, only_ranks)
    ranks = tuple(_expected(manifest, world_size, only_ranks))
    for rank in ranks:
        for kind, files in (("model", model), ("optim", optim)):
            if rank not in files:
                raise CheckpointCorrupt(f"{folder}: the {kind}_states file of rank {rank} of {world_size} is missing")
    surplus = sorted({*model, *optim} - set(range(world_size)))
    if surplus:
        raise CheckpointCorrupt(f"{folder} holds files of rank {surplus[-1]} but was saved by {world_size} ranks")
    return TagFolder(folder, world_size, ranks, model, optim, manifest)


def _expected(manifest: Manifest | None, world_size: int, only_ranks: Collection[int] | None) -> Collection[int]:
    if only_ranks is not None:
        return sorted(only_ranks)
    if manifest is not None and manifest.ranks is not None:
        return manifest.ranks
    return range(world_size)


def _world_size(model: dict[int, str], optim: dict[int, str], only_ranks: Collection[int] | None) -> int:
    seen = {*model, *optim}
    if only_ranks is not None:
        seen |= set(only_ranks)
    return max(seen) + 1


def _not_stage_3(folder: Path) -> Exception:
    if not folder.is_dir():
        return CheckpointError(f"{folder} does not exist")
    if any(folder.glob("mp_rank_*_model_states.pt")):
        return CheckpointMismatch(f"{folder} was not saved with ZeRO stage 3; only stage 3 folders are read")
    return CheckpointCorrupt(f"{folder} holds no zero_pp_rank_*_model_states.pt files")


def complete_tags(load_dir: Path) -> list[str]:
    """Tags in a directory whose file set is complete, by name."""
    found = []
    try:
        entries = sorted(entry for entry in load_dir.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        try:
            open_tag(entry)
        except CheckpointError:
            continue
        found.append(entry.name)
    return found


def resolve_tag(load_dir: Path, tag: str | None, latest: str = LATEST) -> str | None:
    """The tag to load: the one given, else what the file `latest` names; None where there is no such file.

    Raises `ValueError` for an unsafe tag given by the caller, `CheckpointError` for a `latest` that names no folder.
    """
    if tag is not None:
        safe_component(tag)
        if not (load_dir / tag).is_dir():
            raise CheckpointError(f"{load_dir} has no tag {tag!r}; complete tags: {_listed(load_dir)}")
        return tag
    path = load_dir / latest
    if not path.exists() and not path.is_symlink():
        return None
    content = _latest_text(path, load_dir)
    try:
        safe_component(content)
    except ValueError as error:
        raise CheckpointError(
            f"{path} contains {content[:80]!r}, not a tag ({error}); complete tags: {_listed(load_dir)}"
        ) from error
    if not (load_dir / content).is_dir():
        raise CheckpointError(f"{path} names {content!r}, which does not exist; complete tags: {_listed(load_dir)}")
    return content


def _latest_text(path: Path, load_dir: Path) -> str:
    try:
        if path.is_symlink() and path.resolve().parent != load_dir.resolve():
            raise CheckpointError(
                f"{path} is a symbolic link out of the folder (to {path.resolve()}); complete tags: {_listed(load_dir)}"
            )
        with open(path, "rb") as handle:
            raw = handle.read(4096)
        return raw.decode("utf-8").strip("\r\n \t")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} contains {raw[:40]!r}, which is not text; complete tags: {_listed(load_dir)}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; complete tags: {_listed(load_dir)}") from error


def _listed(load_dir: Path) -> str:
    return ", ".join(complete_tags(load_dir)) or "none"
