# SPDX-License-Identifier: Apache-2.0
"""Reading and writing `torch.save` files without running code from them.

What must hold: there is one place that opens a checkpoint file, `load_file`.  It asks `torch.load` for
``weights_only=True`` exactly once; a file that needs a global outside the closed list below is refused with
`CheckpointUnsafe`, which names the global, and no second attempt is made.  A caller can widen the list by naming
globals (``pkg.module.Class``), never by switching the check off.

The list: what torch allows by itself (tensors, plain containers), the three classes that ZeRO-3 files carry,
what hyper-parameters hold (`argparse.Namespace`, paths, dates, durations), and what a numpy array or RNG state is made
of.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, BinaryIO

import torch

from deepspeed.errors import CheckpointCorrupt, CheckpointUnsafe

__all__ = [
    "ALLOW_ENV",
    "exact",
    "load_file",
    "named_globals",
    "safe_globals",
    "save_file",
    "unsafe_globals",
]

ALLOW_ENV = "DS_CHECKPOINT_ALLOW_GLOBALS"
"""Environment variable: comma-separated globals that this process may rebuild from checkpoint files."""

SafeGlobal = Any  # a class or function, or a pair (class or function, name it is known by in files)

_DEEPSPEED_GLOBALS = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
_VALUES: tuple[SafeGlobal, ...] = (
    argparse.Namespace,
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    *(
        (path, f"{module}.{path.__name__}")
        for path in (PosixPath, PurePosixPath)
        for module in ("pathlib", "pathlib._local")
    ),
)
"""Classes that only hold what they are made of. Python 3.13 wrote paths as members of `pathlib._local`."""
_DTYPE_LETTERS = "?bhilqBHILQefd"


def _resolve(name: str) -> Any:
    """The object called ``pkg.module.attr``; `ValueError` where there is none."""
    module, _, attr = name.rpartition(".")
    if not module:
        raise ValueError(f"{name!r} is not a full name such as 'pkg.module.Class'")
    try:
        return getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error


def named_globals(extra: Iterable[str] = ()) -> list[str]:
    """The globals that the user opted into by name: `extra` and the variable `ALLOW_ENV`."""
    from_env = (part.strip() for part in os.environ.get(ALLOW_ENV, "").split(","))
    return sorted({*extra, *(part for part in from_env if part)})


def _numpy_globals() -> list[SafeGlobal]:
    try:
        import numpy
    except ImportError:
        return []
    core = importlib.import_module("numpy._core.multiarray" if hasattr(numpy, "_core") else "numpy.core.multiarray")
    rebuild = vars(core)["_reconstruct"]
    found: list[SafeGlobal] = [numpy.ndarray, numpy.dtype, *{type(numpy.dtype(letter)) for letter in _DTYPE_LETTERS}]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found += [(rebuild, f"{module}._reconstruct"), (core.scalar, f"{module}.scalar")]
    return found


def safe_globals(extra: Iterable[str] = ()) -> AbstractContextManager[Any]:
    """Context manager: within it `torch.load(weights_only=True)` knows the closed list and the named extras."""
    allowed: list[SafeGlobal] = [(_resolve(name), name) for name in _DEEPSPEED_GLOBALS]
    allowed += [*_VALUES, *_numpy_globals()]
    allowed += [(_resolve(name), name) for name in extra]
    return torch.serialization.safe_globals(allowed)


def _check_container(path: Path) -> None:
    """Refuse what is not a plain, uncompressed torch zip file whose records fit in the file."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing") from error
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise CheckpointCorrupt(f"{path} is truncated or not a torch.save file: {error}") from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointCorrupt(f"{path} holds compressed records, which torch.save never writes")
    claimed = sum(record.file_size for record in records)
    if claimed > size:
        raise CheckpointCorrupt(f"{path} claims {claimed} bytes of content but is {size} bytes long")


def load_file(path: str | os.PathLike[str], *, allow: Iterable[str] = (), mmap: bool = True) -> Any:
    """Contents of a `torch.save` file on the CPU; tensors are mapped (read when touched, private to the process).

    Raises `CheckpointCorrupt` when the file is damaged and `CheckpointUnsafe` when it needs a global outside the
    closed list; the message gives the global and how to allow it by name.
    """
    path = Path(path)
    _check_container(path)
    extra = named_globals(allow)
    if extra:
        warnings.warn(f"{path}: rebuilding objects of {', '.join(extra)}, allowed by name", stacklevel=2)
    with safe_globals(extra):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            wanted = _unknown_globals(path)
            if not wanted:
                raise CheckpointUnsafe(f"{path} cannot be read safely: {error}") from error
            raise CheckpointUnsafe(
                f"{path} needs {', '.join(wanted)}, which loading does not rebuild. If you trust the file and want "
                f"these, name them: {ALLOW_ENV}={','.join(wanted)} (or the configuration key checkpoint.allow_globals)"
            ) from error
        except (RuntimeError, ValueError, KeyError, EOFError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointCorrupt(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _unknown_globals(path: str | os.PathLike[str]) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a hostile file may break the scan as well; the refusal stands either way
        return []


def unsafe_globals(path: str | os.PathLike[str], allow: Iterable[str] = ()) -> list[str]:
    """The globals in a file that `load_file` would refuse; nothing of the file is rebuilt or run."""
    with safe_globals(named_globals(allow)):
        return _unknown_globals(path)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor over a storage of exactly its own bytes, without a copy where memory is shared contiguously.

    `torch.save` writes whole storages: a shard that is a view into a larger buffer would drag all of it along.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        return tensor.clone()
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() == size:
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage[start : start + size], 0, tensor.shape, tensor.stride())  # type: ignore[call-overload]


def save_file(content: Any, sink: BinaryIO) -> None:
    """`torch.save` into an open binary sink (zip format, one record per tensor)."""
    torch.save(content, sink, _use_new_zipfile_serialization=True)


def plain(value: Any) -> Any:
    """`value` with mappings as dicts or OrderedDicts and odd number or string subclasses as plain ones.

    For what the package itself puts into a file (configuration, hyper-parameters), so that it loads everywhere.
    """
    if isinstance(value, OrderedDict):
        return OrderedDict((plain(key), plain(entry)) for key, entry in value.items())
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        return tuple(plain(entry) for entry in value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [plain(entry) for entry in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, (bytes, torch.Tensor, torch.dtype, torch.device)):
        return value
    return str(value)
