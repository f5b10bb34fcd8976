# SPDX-License-Identifier: Apache-2.0
"""Single files by `torch.save`, complete or absent, and read without running code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.serialization import load_file, save_file
from deepspeed.checkpoint.store import Storage
from deepspeed.checkpoint.writer import new_nonce
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

__all__ = ["TorchCheckpointEngine"]


class TorchCheckpointEngine(CheckpointEngine):
    """`save` replaces the file atomically after syncing it; `load` raises `CheckpointUnsafe` for foreign objects."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self._storage = Storage()

    def create(self, info: Any) -> None:
        """Nothing to prepare: every file is complete by itself."""

    def save(self, state_dict: Any, path: str) -> None:
        target = Path(path)
        temporary = target.parent / f".{target.name}.{new_nonce()}.tmp"
        try:
            self._storage.write_file(temporary, lambda sink: save_file(state_dict, sink))
            self._storage.replace(temporary, target)
        except BaseException:
            self._storage.remove(temporary)
            raise
        self._storage.sync_dir(target.parent)

    def load(self, path: str, map_location: Any = None) -> Any:
        content = load_file(path, mmap=False)
        return content if map_location is None else _moved(content, map_location)

    def commit(self, tag: Any) -> bool:
        return True


def _moved(content: Any, device: Any) -> Any:
    if isinstance(content, torch.Tensor):
        return content.to(device)
    if isinstance(content, dict):
        for key, value in content.items():
            content[key] = _moved(value, device)
        return content
    if isinstance(content, list):
        return [_moved(value, device) for value in content]
    if type(content) is tuple:
        return tuple(_moved(value, device) for value in content)
    return content
