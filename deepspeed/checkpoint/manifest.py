# SPDX-License-Identifier: Apache-2.0
"""`ds_manifest.json`: what a tag must contain, written last.

What must hold: a tag is complete iff its manifest says ``complete`` and every file listed has the size and hash
listed, and no other shard file lies beside them.  While a tag is being overwritten the manifest says ``publishing``, so
a torn overwrite is never taken for a folder of another tool (which has no manifest).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.store import FileRecord
from deepspeed.errors import CheckpointCorrupt

__all__ = ["FORMAT", "MANIFEST_NAME", "Manifest", "hash_file", "prefetch", "read_manifest"]

MANIFEST_NAME = "ds_manifest.json"
FORMAT = "deepspeed-zero3/1"
COMPLETE, PUBLISHING = "complete", "publishing"
_CHUNK = 1 << 20
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    ``ranks`` is None where the folder holds the files of all ranks, else the ranks whose files this node holds.
    """

    world_size: int
    nonce: str
    files: dict[str, FileRecord] = field(default_factory=dict)
    state: str = COMPLETE
    ranks: list[int] | None = None
    writer: str = ""

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT,
            "state": self.state,
            "world_size": self.world_size,
            "nonce": self.nonce,
            "ranks": self.ranks,
            "writer": self.writer,
            "files": {name: {"size": rec.size, "sha256": rec.sha256} for name, rec in sorted(self.files.items())},
        }
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, raw: bytes, where: Path) -> Manifest:
        """Parse; anything unexpected is `CheckpointCorrupt`."""
        try:
            content: dict[str, Any] = json.loads(raw)
            if content["format"] != FORMAT:
                raise CheckpointCorrupt(f"{where} has format {content['format']!r}; this version reads {FORMAT!r}")
            files = {
                str(name): FileRecord(str(name), int(entry["size"]), str(entry["sha256"]))
                for name, entry in content["files"].items()
            }
            ranks = content.get("ranks")
            if int(content["world_size"]) < 1 or ranks == []:
                raise CheckpointCorrupt(f"{where} describes a checkpoint of no ranks")
            return cls(
                world_size=int(content["world_size"]),
                nonce=str(content["nonce"]),
                files=files,
                state=str(content["state"]),
                ranks=None if ranks is None else [int(rank) for rank in ranks],
                writer=str(content.get("writer", "")),
            )
        except CheckpointCorrupt:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{where} is damaged: {type(error).__name__}: {error}") from error

    def check_names_and_sizes(self, folder: Path, shards: Iterable[str]) -> None:
        """Compare the folder with the manifest without reading contents; `shards`: shard file names found there."""
        if self.state != COMPLETE:
            raise CheckpointCorrupt(
                f"{folder} was being overwritten when its writer ended (manifest state {self.state!r}): "
                "its files may come from two saves; load another tag"
            )
        for name, record in self.files.items():
            path = folder / name
            if "/" in name or name.startswith("."):
                raise CheckpointCorrupt(f"{folder / MANIFEST_NAME} lists an unusable file name {name!r}")
            if not path.is_file():
                raise CheckpointCorrupt(f"{path} is missing")
            size = path.stat().st_size
            if size != record.size:
                raise CheckpointCorrupt(f"{path} is {size} bytes long; the manifest says {record.size}")
        extra = sorted(set(shards) - set(self.files))
        if extra:
            raise CheckpointCorrupt(f"{folder} holds {', '.join(extra)}, which its manifest does not list")

    def check_hash(self, folder: Path, name: str) -> None:
        """Read one file and compare its hash; `CheckpointCorrupt` names it."""
        record = self.files.get(name)
        if record is None:
            raise CheckpointCorrupt(f"{folder / name} is not in the manifest")
        if hash_file(folder / name) != record.sha256:
            raise CheckpointCorrupt(f"{folder / name} does not match its manifest hash (changed, or from another run)")


def prefetch(path: Path) -> None:
    """Ask the system to read a file ahead; a hint, nothing depends on it."""
    if hasattr(os, "posix_fadvise"):
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            return
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)


def hash_file(path: Path) -> str:
    """sha256 of a file as hexadecimal text; `CheckpointCorrupt` if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as handle:
            buffer = bytearray(_CHUNK)
            view = memoryview(buffer)
            while count := handle.readinto(buffer):
                digest.update(view[:count])
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a tag folder, None where it has none (written by another tool)."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointCorrupt(f"{path} is larger than any manifest")
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    return Manifest.from_json(raw, path)
