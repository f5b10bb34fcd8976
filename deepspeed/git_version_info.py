# SPDX-License-Identifier: Apache-2.0
"""Version facts under the names that clients read: `version`, `torch_info`, `installed_ops`, `accelerator_name`.

What must hold: importing this module loads neither torch nor an accelerator. The facts that need them are computed when
they are first read.
"""

from __future__ import annotations

from typing import Any

from deepspeed.version import __version__ as version

__all__ = [
    "accelerator_name",
    "compatible_ops",
    "git_branch",
    "git_hash",
    "installed_ops",
    "torch_info",
    "version",
]

git_hash: str | None = None
"""Not recorded: a wheel is identified by its version alone."""
git_branch: str | None = None

# Computed by `__getattr__` below.
torch_info: dict[str, Any]
accelerator_name: str
installed_ops: dict[str, bool]
compatible_ops: dict[str, bool]


def _torch_info() -> dict[str, Any]:
    import torch

    return {
        "version": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
        "cuda_version": torch.version.cuda or "0.0",
        "hip_version": torch.version.hip or "0.0",
        "bf16_support": True,
    }


def _accelerator_name() -> str:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name()


def _ops(attribute: str) -> dict[str, bool]:
    from deepspeed.env_report import op_rows

    return {row.name: bool(getattr(row, attribute)) for row in op_rows()}


def __getattr__(name: str) -> Any:
    if name == "torch_info":
        return _torch_info()
    if name == "accelerator_name":
        return _accelerator_name()
    if name == "installed_ops":
        return _ops("built")
    if name == "compatible_ops":
        return _ops("usable")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
