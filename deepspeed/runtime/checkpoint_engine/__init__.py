# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engines: how one state dict becomes one file."""

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["CheckpointEngine", "TorchCheckpointEngine"]
