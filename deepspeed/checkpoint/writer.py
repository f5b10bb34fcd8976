# SPDX-License-Identifier: Apache-2.0
"""The save protocol: stage, sync, agree, publish, `latest` last.

What must hold, at every instant a process may die:

* `latest` names a tag whose every file was fully written and synced by every rank, or what it named before;
* a new tag appears by one rename of a finished folder;
* an existing tag is exchanged for the finished folder in one step; where the file system cannot do that, its files
  are replaced under a manifest that says ``publishing``, so that a mixture is detected on load;
* a staging folder (``.<tag>.<nonce>.tmp``) is never read.

Save is collective: it returns on every rank or raises the same error on every rank.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.control import Control
from deepspeed.checkpoint.manifest import MANIFEST_NAME, PUBLISHING, Manifest, read_manifest
from deepspeed.checkpoint.serialization import save_file
from deepspeed.checkpoint.store import FileRecord, Storage, safe_component
from deepspeed.checkpoint.zero3_format import LATEST, is_shard_name
from deepspeed.errors import CheckpointCorrupt, CheckpointError

__all__ = ["Node", "SaveRequest", "agree_on_tag", "new_nonce", "save_tag", "staging_name"]

_SERIOUS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LEFTOVER = re.compile(r"\..+\.([0-9a-f]{8})-(\d+)-[0-9a-f]{16}(?:\.n\d+)?\.tmp")


@dataclass(frozen=True)
class Node:
    """Which rank publishes, and for whom.

    ``local``: every node publishes its own files (node-local storage).  ``first_rank``: the publishing rank of this
    rank's node (0 for shared storage).
    """

    rank: int
    first_rank: int = 0
    local: bool = False

    @property
    def publishes(self) -> bool:
        return self.rank == self.first_rank


@dataclass(frozen=True)
class SaveRequest:
    """One save as this rank sees it.

    ``files``: (file name, builder of its content) of this rank, in the order to write.  ``scripts``: puts the helper
    programs that belong beside the tags into a folder; called once a tag is in place, by the rank that puts it there.
    """

    folder: Path
    tag: str
    files: Sequence[tuple[str, Callable[[], Any]]]
    scripts: Callable[[Path], None]
    save_latest: bool = True
    writer: str = ""


def _owner() -> str:
    """Eight hexadecimal digits for (host, boot, process-id namespace): where a process id means the same process."""
    parts = [socket.gethostname()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        parts.append("?")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def new_nonce() -> str:
    """A name for one save: owner, process id, 64 random bits."""
    return f"{_owner()}-{os.getpid()}-{secrets.token_hex(8)}"


def staging_name(tag: str, nonce: str, node: Node) -> str:
    """Folder name in which a save collects its files."""
    return f".{tag}.{nonce}{f'.n{node.first_rank}' if node.local else ''}.tmp"


def agree_on_tag(control: Control, tag: str, *, ignore_differences: bool) -> tuple[str, str, list[str]]:
    """(tag, nonce, tags of all ranks).

    Raises, on all ranks, `ValueError` for an unsafe tag and `CheckpointError` for differing ones unless these are
    to be ignored.
    """
    error: Exception | None = None
    try:
        safe_component(tag)
    except ValueError as unsafe:
        error = unsafe
    nonce = new_nonce() if control.rank == 0 else ""
    answers = control.agree("checking the tag", error, {"tag": tag, "nonce": nonce})
    tags = [str(answer["tag"]) for answer in answers]
    if len(set(tags)) > 1 and not ignore_differences:
        shown = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(tags[:8]))
        raise CheckpointError(
            f"{control.call}: ranks gave different tags ({shown}); nothing was written. Give the same tag on every "
            "rank (checkpoint.tag_validation=Ignore uses the tag of rank 0)"
        )
    return tags[0], str(answers[0]["nonce"]), tags


def save_tag(control: Control, storage: Storage, request: SaveRequest, node: Node, nonce: str) -> None:
    """Write and publish one tag; collective.  `CheckpointError` on every rank if any rank failed."""
    staging = request.folder / staging_name(request.tag, nonce, node)
    error: Exception | None = None
    records: list[FileRecord] = []
    try:
        storage.make_dir(staging)
        for name, build in request.files:
            records.append(_write(storage, staging / name, build))
    except Exception as failure:
        error = failure
    written = {"node": node.first_rank, "files": [[r.name, r.size, r.sha256] for r in records]}
    try:
        answers = control.agree("writing shards", error, written)
    except Exception:
        _discard(storage, staging, node)
        raise
    manifest = _manifest(answers, node, nonce, request.writer)
    publisher = _Publisher(control, storage, staging, node)
    phases: list[tuple[str, Callable[[], None]]] = [
        ("publishing", lambda: _publish(storage, staging, request, manifest, control.timeout / 2))
    ]
    if request.save_latest:
        phases.append(("writing latest", lambda: _latest(storage, request, nonce)))
    if node.local:  # every node must have published before any `latest` names the tag
        for what, action in phases:
            publisher.run(what, [action])
    else:
        publisher.run("publishing", [action for _, action in phases])


def _write(storage: Storage, path: Path, build: Callable[[], Any]) -> FileRecord:
    try:
        content = build()
        return storage.write_file(path, lambda sink: save_file(content, sink))
    except OSError as failure:
        raise CheckpointError(f"{path.name} could not be written: {failure}") from failure


def _manifest(answers: Sequence[dict[str, Any]], node: Node, nonce: str, writer: str) -> Manifest:
    mine = [rank for rank, answer in enumerate(answers) if answer["node"] == node.first_rank]
    listed = [entry for rank in mine for entry in answers[rank]["files"]]
    records = [FileRecord(str(name), int(size), str(digest)) for name, size, digest in listed]
    return Manifest(
        world_size=len(answers),
        nonce=nonce,
        files={record.name: record for record in records},
        ranks=mine if node.local else None,
        writer=writer,
    )


@dataclass(frozen=True)
class _Publisher:
    """Runs a phase on the publishing rank of each node, then lets all ranks agree on its outcome."""

    control: Control
    storage: Storage
    staging: Path
    node: Node

    def run(self, what: str, actions: Sequence[Callable[[], None]]) -> None:
        error: Exception | None = None
        if self.node.publishes:
            try:
                for action in actions:
                    action()
            except Exception as failure:
                error = failure
        try:
            self.control.agree(what, error)
        except Exception:
            _discard(self.storage, self.staging, self.node)
            raise


def _discard(storage: Storage, staging: Path, node: Node) -> None:
    if node.publishes:
        try:
            storage.remove_tree(staging)
        except OSError:
            pass  # what is left is never read, and a later save sweeps it


def _put_bytes(storage: Storage, path: Path, data: bytes) -> None:
    """Replace a small file atomically: temporary, sync, replace, sync the folder."""
    temporary = path.parent / f".{path.name}.{new_nonce()}.tmp"
    storage.write_file(temporary, lambda sink: _ignore(sink.write(data)))
    storage.replace(temporary, path)
    storage.sync_dir(path.parent)


def _ignore(_: object) -> None:
    return None


def _publish(storage: Storage, staging: Path, request: SaveRequest, manifest: Manifest, patience: float) -> None:
    target = request.folder / request.tag
    storage.write_file(staging / MANIFEST_NAME, lambda sink: _ignore(sink.write(manifest.to_json())))
    storage.sync_dir(staging)
    try:
        storage.rename(staging, target)
    except OSError as failure:
        if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with storage.locked(target, patience):
            if not _exchanged(storage, staging, target, manifest):
                _overwrite(storage, staging, target, manifest)
    storage.sync_dir(request.folder)
    request.scripts(request.folder)


def _exchanged(storage: Storage, staging: Path, target: Path, manifest: Manifest) -> bool:
    """Swap the finished folder with the tag's old one, keeping what else lies in the tag; False if not possible."""
    if manifest.ranks is not None:
        return False  # node-local files may have to join those of other nodes
    others = [n for n in storage.list_dir(target) if not is_shard_name(n) and n != MANIFEST_NAME and n[0] != "."]
    if any(not (target / name).is_file() or (target / name).is_symlink() for name in others):
        return False
    try:
        for name in others:
            storage.link(target / name, staging / name)
        storage.sync_dir(staging)
        storage.exchange(staging, target)
    except OSError as failure:
        if failure.errno in _SERIOUS:
            raise
        return False
    storage.sync_dir(target.parent)  # before the old content goes
    storage.remove_tree(staging)
    return True


def _overwrite(storage: Storage, staging: Path, target: Path, manifest: Manifest) -> None:
    """Replace the files of a tag one by one under a manifest that says so; remove shards that the new save lacks."""
    manifest = _joined(manifest, target)
    _put_bytes(storage, target / MANIFEST_NAME, replace(manifest, state=PUBLISHING).to_json())
    for name in storage.list_dir(staging):
        if name != MANIFEST_NAME:
            storage.replace(staging / name, target / name)
    for name in storage.list_dir(target):
        if (is_shard_name(name) and name not in manifest.files) or _LEFTOVER.fullmatch(name):
            storage.remove(target / name)
    storage.sync_dir(target)
    _put_bytes(storage, target / MANIFEST_NAME, manifest.to_json())
    storage.remove_tree(staging)


def _joined(manifest: Manifest, target: Path) -> Manifest:
    """With node-local storage on a folder that nodes share: the files of the nodes that published before."""
    try:
        existing = read_manifest(target)
    except CheckpointCorrupt:
        existing = None
    if existing is None or existing.nonce != manifest.nonce:
        return manifest
    ranks = sorted({*(existing.ranks or []), *(manifest.ranks or [])})
    whole = len(ranks) == manifest.world_size
    return replace(manifest, files={**existing.files, **manifest.files}, ranks=None if whole else ranks)


def _latest(storage: Storage, request: SaveRequest, nonce: str) -> None:
    _put_bytes(storage, request.folder / LATEST, request.tag.encode())
    _sweep(storage, request.folder, nonce)


def _sweep(storage: Storage, folder: Path, nonce: str) -> None:
    """Remove what dead or earlier saves of this host left; another live process's staging is not touched."""
    for name in storage.list_dir(folder):
        match = _LEFTOVER.fullmatch(name)
        if match is None or nonce in name or match.group(1) != _owner():
            continue
        pid = int(match.group(2))
        if pid != os.getpid() and Path(f"/proc/{pid}").exists():
            continue
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            storage.remove_tree(path)
        else:
            storage.remove(path)
