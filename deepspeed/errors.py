# SPDX-License-Identifier: Apache-2.0
"""The one exception tree of the package.

Every error that the package raises on purpose is a `DeepSpeedError`. Each class also derives from the built-in that
callers written for other packages expect (`ValueError`, `RuntimeError`, ...), so that existing `except` clauses
keep working.

What must hold: a message names the key, parameter or file it is about, the value found, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "BatchConfigError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointUnsafe",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigConflictError",
    "ConfigError",
    "DeepSpeedConfigError",
    "DeepSpeedError",
    "LauncherError",
    "NonFiniteGradients",
    "NotSupportedError",
    "UnsupportedConfigError",
    "UsageError",
]


class DeepSpeedError(Exception):
    """Root of the tree: catch this to catch everything the package raises on purpose."""


class ConfigError(DeepSpeedError, ValueError):
    """A value in the configuration is wrong. The message starts with the dotted path of the key."""


class ConfigConflictError(ConfigError, AssertionError):
    """Two values of the configuration contradict each other (callers also catch `AssertionError` for this)."""


class BatchConfigError(ConfigConflictError):
    """The batch sizes contradict each other or the world size."""


DeepSpeedConfigError = ConfigError
"""The name under which callers import `ConfigError`."""


class UsageError(DeepSpeedError, RuntimeError):
    """A call was made at a time, or with arguments, that cannot work."""


class NotSupportedError(DeepSpeedError, NotImplementedError):
    """A feature that this package does not have was asked for by name. It is never ignored silently."""


class UnsupportedConfigError(ConfigError, NotSupportedError):
    """A key of the configuration asks for a feature that this package does not have."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint could not be written or read. The message names the folder, tag and file."""


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint is missing, truncated or does not match its manifest."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is sound, but belongs to another model, optimizer or layout."""


class CheckpointUnsafe(CheckpointError):
    """A checkpoint holds pickled objects outside the allow-list, and is not opened."""


class CollectiveMismatch(DeepSpeedError, RuntimeError):
    """The ranks of a group issued different collectives; all of them raise instead of hanging."""


class CollectiveTimeout(DeepSpeedError, RuntimeError):
    """A collective did not complete in time."""


class NonFiniteGradients(DeepSpeedError, RuntimeError):
    """As many steps in a row were skipped for NaN or Inf gradients as the configuration allows."""


class LauncherError(DeepSpeedError, RuntimeError):
    """The launcher could not start or supervise the job."""
