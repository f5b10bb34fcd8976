# SPDX-License-Identifier: Apache-2.0
"""The interface of checkpoint engines that frameworks subclass or pass around."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["CheckpointEngine"]


class CheckpointEngine(ABC):
    """Writes and reads single state dicts; `create` and `commit` bracket the files of one tag."""

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    @abstractmethod
    def create(self, info: Any) -> None:
        """Called before the first file of a tag."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder with its parents."""
        os.makedirs(path, exist_ok=exist_ok)

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one state dict."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one state dict."""

    @abstractmethod
    def commit(self, tag: Any) -> bool:
        """Called after the last file of a tag; True when all of it is on disk."""
