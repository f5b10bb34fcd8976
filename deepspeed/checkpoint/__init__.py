# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: storage protocol, manifest, safe serialisation, the ZeRO-3 file format, re-slicing, converters.

Nothing is imported here, so that the converters start without the training engine.
"""

from __future__ import annotations

from deepspeed.lazy import submodules

__getattr__ = submodules(__name__)
