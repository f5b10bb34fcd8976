# SPDX-License-Identifier: Apache-2.0
"""An engine and the plain model that it must equal, side by side on every rank.

The plain model holds full weights, averages its gradients with `all_reduce` and steps with plain torch. Whatever is
done to the one is done to the other; `check` runs a forward and a backward on both and compares loss and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.dist.support import assert_close, assert_tensors, full_grads, full_params, initialize, settings
from tests.harness import models, reference


class Twin:
    """`engine` and `plain`, equal at the start. `write` changes both."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        hpz: int,
        batch: Callable[[int, int, int], Any] = models.batch,
        under_init: bool = False,
        **config: Any,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.batch = batch
        self.plain = build()
        self.optimizer = reference.sgd([p for p in self.plain.parameters() if p.requires_grad])
        self.config = settings(hpz=hpz, **config)
        if under_init:
            with deepspeed.zero.Init(config_dict_or_path=self.config):
                model = build()
        else:
            model = copy.deepcopy(self.plain)
        self.engine = initialize(model, self.config, reference.sgd)
        self.count = 0

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def evaluate(self) -> float:
        """A forward without gradients on both; the same loss."""
        self.count += 1
        data = self.batch(self.count, self.rank, 0)
        with torch.no_grad():
            got, wanted = self.engine(*data), self.plain(*data)
        assert_close([got.item()], [wanted.item()], 1e-6, "evaluation")
        return got.item()

    def check(self, what: str = "") -> None:
        """A forward and a backward on both: the same loss and the same gradient of every parameter."""
        self.count += 1
        data = self.batch(self.count, self.rank, 0)
        got, wanted = self.engine(*data), self.plain(*data)
        assert_close([got.item()], [wanted.item()], 1e-6, f"loss after {what}")
        self.engine.backward(got)
        wanted.backward()
        world = self.engine.world_size
        grads = {}
        for name, param in self.plain.named_parameters():
            if param.requires_grad:
                grad = param.grad if param.grad is not None else torch.zeros_like(param)
                dist.all_reduce(grad)
                param.grad = grads[name] = grad / world
        mine = {name: grad for name, grad in full_grads(self.engine.module).items() if grad is not None}
        assert_tensors(mine, grads, 1e-5, 1e-7)

    def step(self) -> None:
        """Step both with the gradients of the last `check`."""
        self.engine.step()
        self.optimizer.step()
        self.plain.zero_grad()

    def forget_gradients(self) -> None:
        """Drop the gradients of the last `check` on both."""
        self.engine.optimizer.zero_grad()
        self.plain.zero_grad()

    def weights_match(self) -> None:
        """The gathered weights equal the plain ones."""
        assert_tensors(
            full_params(self.engine.module),
            {name: p.detach() for name, p in self.plain.named_parameters(remove_duplicate=False)},
            1e-4,
            1e-5,
        )

    def secondaries(self) -> list[Tensor | None]:
        """The valid hpZ shard of every parameter that does not stay gathered."""
        return [p.ds_secondary_tensor for p in self.engine.module.parameters() if not p.ds_persist]

    def plain_write(self, change: Callable[[str, Tensor], None], names: list[str] | None = None) -> None:
        """Change the plain weights."""
        with torch.no_grad():
            for name, param in self.plain.named_parameters():
                if names is None or name in names:
                    change(name, param)
