# SPDX-License-Identifier: Apache-2.0
"""Gathering of tensor-parallel parameters: there are none here, so there is nothing to gather."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType

from torch import nn

__all__ = ["GatherReplacedLayerParams"]


class GatherReplacedLayerParams(AbstractContextManager[None]):
    """Within this block tensor-parallel parameters of ``params`` are whole. No parameter is one, so nothing changes.

    Parameters sharded by ZeRO are another matter: ``deepspeed.zero.GatheredParameters`` gathers those.
    """

    def __init__(self, params: Iterable[nn.Parameter] | nn.Parameter, module: nn.Module, enabled: bool = True) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
