# SPDX-License-Identifier: Apache-2.0
"""A stand-in for engine and core: shards of known values, no training.

Every value is a function of (name, what, version) alone, so the truth of any element is known at any world size, and
a wrong byte anywhere shows in an exact comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed.runtime.zero  # noqa: F401  first: the configuration reads its sections from this package
from deepspeed.checkpoint.state import SubGroupState, Zero3State, shard_numel
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine_parts.checkpoint import CheckpointMixin
from deepspeed.runtime.engine_parts.counter import StepCounter
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from tests.checkpoint import golden_model

VALUES = ("fp32", "exp_avg", "exp_avg_sq")


def truth(name: str, what: str, version: int, shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The full tensor of one value of one parameter at one version."""
    seed = int.from_bytes(hashlib.sha256(f"{name}/{what}/{version}".encode()).digest()[:6], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shard(full: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """One rank's padded slice; the padding is a number that must never be used."""
    size = shard_numel(full.numel(), world)
    padded = torch.full((size * world,), 777.0, dtype=full.dtype)
    padded[: full.numel()] = full.flatten()
    return padded[rank * size : (rank + 1) * size].clone()


class FakeCore:
    """Holds a `Zero3State`'s worth of shards and the interface that the checkpoint methods use."""

    def __init__(
        self,
        module: nn.Module,
        world: int,
        rank: int,
        *,
        sub_group: int = 60,
        with_optimizer: bool = True,
        param_dtype: torch.dtype = torch.float32,
        dynamic: bool = False,
        version: int = 0,
    ) -> None:
        self.module, self.world, self.rank, self.param_dtype = module, world, rank, param_dtype
        self.imports = 0
        names: dict[int, str] = {}
        self.shared: dict[str, str] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            if id(param) in names:
                self.shared[name] = names[id(param)]
            else:
                names[id(param)] = name
        params = dict(module.named_parameters())
        trained = [name for name, p in params.items() if p.requires_grad and with_optimizer]
        self.shapes = {name: p.shape for name, p in params.items()}
        decay = [name for name in trained if params[name].ndim > 1]
        plain = [name for name in trained if params[name].ndim <= 1]
        self.groups: list[tuple[int, list[str]]] = []
        for index, members in enumerate((decay, plain)):
            bucket: list[str] = []
            for name in members:
                bucket.append(name)
                if sum(shard_numel(self.shapes[n].numel(), world) for n in bucket) >= sub_group:
                    self.groups.append((index, bucket))
                    bucket = []
            if bucket:
                self.groups.append((index, bucket))
        self.frozen_names = [name for name in params if name not in trained]
        self.hyper = [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.1, "betas": (0.9, 0.95)}] if with_optimizer else []
        self.dynamic = dynamic
        self.scaler: Any = LossScaler(1.0)
        if dynamic:
            self.scaler = DynamicLossScaler(2.0**16, 100, 1.0, 2, False)
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """Replace every value by that of another version (0: no optimizer state yet)."""
        flat = {
            what: [torch.cat([self._shard(name, what, version) for name in members]) for _, members in self.groups]
            for what in VALUES
        }
        self.fp32 = flat["fp32"]
        self.state: list[dict[str, Any]] = [{} for _ in self.groups]
        if version:
            for index in range(len(self.groups)):
                self.state[index] = {
                    "step": torch.tensor(float(version)),
                    "exp_avg": flat["exp_avg"][index],
                    "exp_avg_sq": flat["exp_avg_sq"][index],
                }
        for group in self.hyper:
            group["lr"] = 0.1 * version
        self.frozen = {name: self._shard(name, "frozen", version, self.param_dtype) for name in self.frozen_names}
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(truth(name, "buffer", version, buffer.shape))
        if self.dynamic:
            self.scaler.cur_scale = 2.0 ** (10 + version)

    def _shard(self, name: str, what: str, version: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return shard(truth(name, what, version, self.shapes[name], dtype), self.world, self.rank)

    def export_state(self) -> Zero3State:
        groups = [
            SubGroupState(index, members, [self.shapes[n] for n in members], self.fp32[i], self.state[i])
            for i, (index, members) in enumerate(self.groups)
        ]
        return Zero3State(
            world_size=self.world,
            rank=self.rank,
            sub_groups=groups,
            param_groups=self.hyper,
            frozen={name: (self.shapes[name], self.frozen[name]) for name in self.frozen_names},
            shared=self.shared,
            buffers=dict(self.module.named_buffers()),
            loss_scaler=self.scaler,
            dynamic_loss_scale=self.dynamic,
            param_dtype=self.param_dtype,
        )

    def import_state(self, state: Zero3State, load_optimizer_states: bool) -> None:
        self.imports += 1
        for index, group in enumerate(state.sub_groups):
            self.fp32[index].copy_(group.fp32)
            if load_optimizer_states:
                self.state[index] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in group.state.items()
                }
        if load_optimizer_states:
            self.hyper = [dict(group) for group in state.param_groups]
            self.scaler = state.loss_scaler
        for name in self.frozen_names:
            self.frozen[name].copy_(state.frozen[name][1])
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(state.buffers[name])

    def digest(self) -> str:
        """Hash of everything that this rank holds."""
        found = hashlib.sha256()
        for tensor in [*self.fp32, *self.frozen.values(), *self.module.buffers()]:
            found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for entry in self.state:
            for key in sorted(entry):
                found.update(repr(entry[key]).encode())
        found.update(repr((self.hyper, vars(self.scaler))).encode())
        return found.hexdigest()

    def check(self, version: int, *, optimizer: bool = True, only: Iterable[str] | None = None) -> None:
        """Every true element equals the truth of `version`; padding may be anything."""
        for index, (group, members) in enumerate(self.groups):
            offset = 0
            for name in members:
                size = shard_numel(self.shapes[name].numel(), self.world)
                real = max(0, min(size, self.shapes[name].numel() - self.rank * size))
                span = slice(offset, offset + real)
                offset += size
                if only is not None and name not in only:
                    continue
                assert torch.equal(self.fp32[index][span], self._shard(name, "fp32", version)[:real]), name
                for what in VALUES[1:] if optimizer and version else ():
                    assert torch.equal(self.state[index][what][span], self._shard(name, what, version)[:real]), name
            if optimizer and version:
                assert float(self.state[index]["step"]) == version
                assert self.hyper[group]["lr"] == 0.1 * version
        for name in self.frozen_names if only is None else ():
            size = shard_numel(self.shapes[name].numel(), self.world)
            real = max(0, min(size, self.shapes[name].numel() - self.rank * size))
            want = self._shard(name, "frozen", version, self.param_dtype)[:real]
            assert torch.equal(self.frozen[name][:real], want), name
        for name, buffer in self.module.named_buffers():
            assert torch.equal(buffer, truth(name, "buffer", version, buffer.shape)), name


class FakeScheduler:
    """A scheduler with one number of state."""

    def __init__(self) -> None:
        self.last = -1

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last = state["last_batch_iteration"]


class FakeEngine(CheckpointMixin):
    """The checkpoint methods over a `FakeCore`."""

    def __init__(
        self,
        world: int,
        rank: int,
        version: int = 0,
        *,
        tied: bool = True,
        frozen: bool = True,
        checkpoint: dict[str, Any] | None = None,
        **core: Any,
    ) -> None:
        raw = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "checkpoint": {"wait_timeout": 20, **(checkpoint or {})},
        }
        if core.get("param_dtype") is torch.bfloat16:
            raw["bf16"] = {"enabled": True}
        self._config = DeepSpeedConfig(raw, world_size=world)
        self.module = golden_model.build(tied=tied, frozen=frozen)
        self.optimizer = FakeCore(self.module, world, rank, version=version, **core)
        self.lr_scheduler = FakeScheduler()
        self.counter = StepCounter(1, 1, world)
        self.global_rank, self.local_rank, self.world_size = rank, rank, world
        self.global_steps = self.skipped_steps = self.global_samples = 0
        self.advance(version)

    def advance(self, version: int) -> None:
        """As if training had reached `version`."""
        self.optimizer.set_version(version)
        self.global_steps, self.global_samples, self.skipped_steps = version, 4 * version, version // 2
        self.lr_scheduler.last = version

    def check(self, version: int, **options: Any) -> None:
        self.optimizer.check(version, **options)


def engine(version: int = 0, **options: Any) -> FakeEngine:
    """A fake engine on this rank of the initialised process group (a single rank without one)."""
    if not dist.is_initialized():
        return FakeEngine(1, 0, version, **options)
    return FakeEngine(dist.get_world_size(), dist.get_rank(), version, **options)
