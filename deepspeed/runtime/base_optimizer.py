# SPDX-License-Identifier: Apache-2.0
"""The base class of every optimizer that `deepspeed.initialize` returns; callers test for it with `isinstance`."""

from __future__ import annotations


class DeepSpeedOptimizer:
    """An optimizer wrapped by the engine. It is deliberately no `torch.optim.Optimizer`: its groups hold shards."""
