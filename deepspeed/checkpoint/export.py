# SPDX-License-Identifier: Apache-2.0
"""Writing whole weights for other tools: one file or shards with an index, torch or safetensors.

What must hold: a tensor is assembled when it is written; in safetensors all go through one buffer of the largest
(allocating and freeing one by one lets the heap grow to the size of the model), in torch files a large shard is
assembled in a scratch file that the system can page out; a tied parameter is stored once (torch files name it twice,
safetensors files give the other names in their metadata); a file appears under its name only when it is complete.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepspeed.checkpoint.serialization import exact, save_file
from deepspeed.checkpoint.store import Storage
from deepspeed.checkpoint.writer import new_nonce

__all__ = ["Entry", "format_size", "parse_size", "plan_shards", "write_shards", "write_state_dict"]

_SCRATCH_FROM = 64 << 20  # bytes of a torch file from which it is assembled in a scratch file
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SAFE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """One tensor to write: its name, other names of the same tensor, shape and dtype.

    ``fill(out)`` writes the content into a tensor of this shape and dtype; ``ready``: the tensor if it is in memory.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    fill: Callable[[torch.Tensor], Any]
    aliases: tuple[str, ...] = ()
    ready: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parse_size(text: str | int) -> int:
    """Bytes of ``"5GB"``, ``"300MiB"`` or a number; `ValueError` otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example '5GB' or '300MB'")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def format_size(count: float) -> str:
    """Bytes for people: ``"312 B"``, ``"4.2 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def plan_shards(entries: Sequence[Entry], max_bytes: int | None) -> list[list[Entry]]:
    """Consecutive entries by file; none is larger than `max_bytes` unless it holds a single tensor."""
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if max_bytes is not None and shards[-1] and used + entry.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.nbytes
    return shards


def write_shards(
    folder: Path,
    entries: Sequence[Entry],
    *,
    max_shard_size: str | int | None,
    safe_serialization: bool,
    progress: Callable[[int], Any] | None = None,
) -> list[str]:
    """Write `entries` into `folder`; returns the file names.

    One file is ``pytorch_model.bin`` or ``model.safetensors``; several are ``<stem>-00001-of-0000N`` with an
    ``.index.json`` beside them.  ``progress(n)`` is called after each tensor with its bytes.
    """
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    shards = plan_shards(entries, None if max_shard_size is None else parse_size(max_shard_size))
    storage = Storage()
    storage.make_dir(folder)
    names = [
        f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        for number in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        _atomically(storage, folder / name, _filler(folder, shard, safe_serialization, progress))
    if len(shards) > 1:
        index = _index(names, shards, safe_serialization)
        _atomically(storage, folder / f"{stem}{suffix}.index.json", lambda handle: _all(handle, index))
    return names


def _index(names: Sequence[str], shards: Sequence[Sequence[Entry]], safe: bool) -> bytes:
    total = sum(entry.nbytes for shard in shards for entry in shard)
    where = {
        known: name
        for name, shard in zip(names, shards, strict=True)
        for entry in shard
        for known in (entry.name, *(() if safe else entry.aliases))
    }
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True).encode()


def write_state_dict(storage: Storage, folder: Path, filename: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict that is in memory to one file, torch or (by its suffix) safetensors."""
    if Path(filename).name != filename or filename in ("", ".", ".."):
        raise ValueError(f"{filename!r} is not a plain file name")
    storage.make_dir(folder)
    if filename.endswith(".safetensors"):
        fill = _filler(folder, entries_of(tensors), True, None)
    else:

        def fill(handle: BinaryIO) -> None:
            save_file({name: exact(tensor) for name, tensor in tensors.items()}, handle)

    temporary = folder / f".{filename}.{new_nonce()}.tmp"
    try:
        storage.write_file(temporary, fill)
        storage.replace(temporary, folder / filename)
    except BaseException:
        storage.remove(temporary)
        raise
    storage.sync_dir(folder)


def entries_of(tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """Entries for tensors in memory; names of the same tensor object become aliases of the first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    result = []
    for names in groups.values():
        tensor = tensors[names[0]]
        ready = tensor.detach()
        fill = functools.partial(_copy, ready)
        result.append(Entry(names[0], tensor.shape, tensor.dtype, fill, tuple(names[1:]), ready))
    return result


def _copy(tensor: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(tensor)


def _atomically(storage: Storage, path: Path, fill: Callable[[BinaryIO], None]) -> None:
    temporary = path.parent / f".{path.name}.{new_nonce()}.tmp"
    try:
        with storage.open_new(temporary) as handle:
            fill(handle)
            os.fsync(handle.fileno())
        storage.replace(temporary, path)
    except BaseException:
        storage.remove(temporary)
        raise
    storage.sync_dir(path.parent)


def _filler(
    folder: Path, shard: Sequence[Entry], safe: bool, progress: Callable[[int], Any] | None
) -> Callable[[BinaryIO], None]:
    if safe:
        return lambda handle: _safetensors(handle, shard, progress)
    return lambda handle: _torch_file(handle, shard, folder, progress)


def _all(handle: BinaryIO, data: Any) -> None:
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else view
    while view.nbytes:
        view = view[handle.write(view) :]


def _safetensors(handle: BinaryIO, shard: Sequence[Entry], progress: Callable[[int], Any] | None) -> None:
    """Header (8 bytes of length, JSON padded to 8 bytes), then the tensors in order."""
    metadata = {"format": "pt", **{alias: entry.name for entry in shard for alias in entry.aliases}}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for entry in shard:
        if entry.dtype not in _SAFE_DTYPES:
            raise ValueError(f"{entry.name} is {entry.dtype}, which safetensors files cannot hold")
        header[entry.name] = {
            "dtype": _SAFE_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    _all(handle, len(raw).to_bytes(8, "little") + raw)
    buffer = torch.empty(max((entry.nbytes for entry in shard if entry.ready is None), default=0), dtype=torch.uint8)
    for entry in shard:
        tensor = entry.ready
        if tensor is None:
            tensor = buffer[: entry.nbytes].view(entry.dtype).view(entry.shape)
            entry.fill(tensor)
        if tensor.numel():
            _all(handle, tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())
        if progress is not None:
            progress(entry.nbytes)


def _torch_file(handle: BinaryIO, shard: Sequence[Entry], folder: Path, progress: Callable[[int], Any] | None) -> None:
    total = sum(-(-entry.nbytes // 64) * 64 for entry in shard)
    scratch = folder / f".scratch.{new_nonce()}.tmp" if total >= _SCRATCH_FROM else None
    try:
        if scratch is None:
            arena = torch.empty(total, dtype=torch.uint8)
        else:
            with open(scratch, "xb") as created:
                created.truncate(total)
            arena = torch.from_file(str(scratch), shared=True, size=total, dtype=torch.uint8)
        save_file(_assembled(shard, arena, progress), handle)
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def _assembled(
    shard: Iterable[Entry], arena: torch.Tensor, progress: Callable[[int], Any] | None
) -> dict[str, torch.Tensor]:
    """Tensors of a shard, each over its own 64-byte aligned piece of `arena`."""
    result: dict[str, torch.Tensor] = {}
    offset = 0
    for entry in shard:
        piece = arena[offset : offset + entry.nbytes].view(entry.dtype).view(entry.shape)
        entry.fill(piece)
        offset += -(-entry.nbytes // 64) * 64
        for name in (entry.name, *entry.aliases):
            result[name] = exact(piece) if name == entry.name else result[entry.name]
        if progress is not None:
            progress(entry.nbytes)
    return result
