# SPDX-License-Identifier: Apache-2.0
"""Generation from a sharded model with all of it gathered once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .gathered import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module behind an engine with every parameter gathered, for many forwards in a row. Collective.

    Plain ``engine.module.generate(...)`` works as well: it gathers unit by unit, from hpZ shards where there are any,
    and keeps what ``stage3_max_live_parameters`` allows. This holds the whole model, whatever the limits are.
    """
    module = model.module
    with GatheredParameters(module.parameters()):
        yield module
