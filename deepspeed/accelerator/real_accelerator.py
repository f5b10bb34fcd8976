# SPDX-License-Identifier: Apache-2.0
"""Which accelerator this process uses: decided at the first call, once.

What must hold: `DS_ACCELERATOR` decides where it is set; otherwise CUDA where torch can use it, else the CPU. A kind
that is not built is an error that names the remedy, never another device in silence.
"""

from __future__ import annotations

import os

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.errors import NotSupportedError, UsageError

__all__ = ["SUPPORTED_ACCELERATOR_LIST", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
_OTHER_ACCELERATORS = ["xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu"]

_current: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process.

    Raises:
        NotSupportedError: `DS_ACCELERATOR` names a kind that is not built.
        UsageError: `DS_ACCELERATOR=cuda`, but torch finds no CUDA device.
    """
    global _current
    if _current is None:
        _current = _choose(os.environ.get("DS_ACCELERATOR", ""))
    return _current


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """Use `accelerator` from now on; its class must derive from `DeepSpeedAccelerator`.

    Raises:
        UsageError: another class.
    """
    global _current
    if not isinstance(accelerator, DeepSpeedAccelerator):
        kind = type(accelerator).__name__
        raise UsageError(f"{kind} does not derive from deepspeed.accelerator.DeepSpeedAccelerator")
    _current = accelerator


def is_current_accelerator_supported() -> bool:
    """Whether the current accelerator is one of those that this package is tested on."""
    return get_accelerator()._name in SUPPORTED_ACCELERATOR_LIST


def _choose(name: str) -> DeepSpeedAccelerator:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    if name not in ("", *SUPPORTED_ACCELERATOR_LIST):
        known = "a kind of device that is not built here" if name in _OTHER_ACCELERATORS else "no known kind of device"
        raise NotSupportedError(
            f"DS_ACCELERATOR={name!r} is {known}: unset it, set it to 'cuda' or 'cpu', or pass an object of "
            "your own to deepspeed.accelerator.set_accelerator()"
        )
    cuda = CUDA_Accelerator()
    if name == "cuda" and not cuda.is_available():
        raise UsageError("DS_ACCELERATOR='cuda', but torch finds no usable CUDA device: unset it, or set it to 'cpu'")
    return cuda if name != "cpu" and cuda.is_available() else CPU_Accelerator()
