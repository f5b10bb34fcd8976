# SPDX-License-Identifier: Apache-2.0
"""The variants: one trainer each, with the same two calls, ``step(micro_batches) -> losses`` and ``close()``.

All of them: bf16 weights and activations with fp32 masters (or all fp32), AdamW, the gradient norm clipped at 1.0, one
reduction per micro-batch, weights released after each block's forward.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import models
from .works import Work

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Trainer(Protocol):
    """What the worker drives."""

    def step(self, micro_batches: Batches) -> list[torch.Tensor]:
        """One optimizer step; returns the detached losses of the micro-batches."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def _dtype(work: Work) -> torch.dtype:
    return torch.bfloat16 if work.dtype == "bf16" else torch.float32


def _model(work: Work, device: torch.device, dtype: torch.dtype) -> models.Llama:
    return models.build(models.SHAPES[work.model], device, dtype, work.checkpointing, rounding=_dtype(work))


class DeepSpeedTrainer:
    """This package or upstream, whichever ``import deepspeed`` finds; released after each use as FSDP2 does."""

    def __init__(self, work: Work, device: torch.device, changes: dict[str, Any], client_optimizer: bool) -> None:
        import deepspeed

        # a block ahead on a CPU, as FSDP2; on a GPU, where collectives overlap, two of the 853 M model's
        ahead = 50_000_000 if device.type == "cuda" else models.SHAPES[work.model].block_numel
        zero: dict[str, Any] = {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": ahead,
            "zero_hpz_partition_size": work.hpz,
            **changes,
        }
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": work.micro,
            "gradient_accumulation_steps": work.accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": zero,
            "steps_per_print": 1 << 30,
        }
        if work.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        model = _model(work, device, _dtype(work))
        optimizer = None
        if client_optimizer:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        else:
            config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
        )

    def step(self, micro_batches: Batches) -> list[torch.Tensor]:
        engine, losses = self.engine, []
        for tokens, labels in micro_batches:
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses

    def close(self) -> None:
        self.engine.destroy()


class Fsdp2Trainer:
    """``fully_shard`` per block (embedding and head apart), fused AdamW on the fp32 shards."""

    def __init__(self, work: Work, device: torch.device, reduce: torch.dtype) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = _model(work, device, torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if work.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        reshard: bool | int = True if work.hpz == 1 else work.hpz
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        fully_shard(model.embed_tokens, reshard_after_forward=reshard, **options)
        for block in model.layers:
            fully_shard(block, reshard_after_forward=reshard, **options)
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
        fully_shard(model, reshard_after_forward=reshard, **options)
        self.model, self.accumulation = model, work.accumulation
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(self, micro_batches: Batches) -> list[torch.Tensor]:
        losses = []
        for tokens, labels in micro_batches:
            loss = self.model(tokens, labels)
            (loss / self.accumulation if self.accumulation > 1 else loss).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses

    def close(self) -> None:
        del self.model, self.optimizer


class SingleTrainer:
    """The floor: one rank, nothing sharded, nothing sent; flat fp32 masters and one fused AdamW."""

    CHUNK = 1 << 26

    def __init__(self, work: Work, device: torch.device) -> None:
        dtype = _dtype(work)
        self.model = _model(work, device, dtype)
        params = list(self.model.parameters())
        total = sum(p.numel() for p in params)
        self.weights = torch.empty(total, dtype=dtype, device=device)
        self.grads = torch.zeros(total, dtype=dtype, device=device)
        for p, weight, grad in zip(params, *(self._split(t, params) for t in (self.weights, self.grads)), strict=True):
            weight.copy_(p.data)
            p.data, p.grad = weight, grad
        self.master = self.weights.float() if dtype != torch.float32 else self.weights
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.count = torch.zeros((), device=device)
        self.accumulation = work.accumulation

    @staticmethod
    def _split(flat: torch.Tensor, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        pieces = flat.split([p.numel() for p in params])
        return [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]

    def step(self, micro_batches: Batches) -> list[torch.Tensor]:
        losses = []
        for tokens, labels in micro_batches:
            loss = self.model(tokens, labels)
            (loss / self.accumulation if self.accumulation > 1 else loss).backward()
            losses.append(loss.detach())
        with torch.no_grad():
            norm = torch.linalg.vector_norm(self.grads, dtype=torch.float32)
            scale = torch.clamp(norm / CLIP, min=1.0)
            self.count += 1
            flats = (self.master, self.grads, self.first, self.second, self.weights)
            for master, grad, first, second, weight in zip(*(f.split(self.CHUNK) for f in flats), strict=True):
                torch._fused_adamw_(
                    [master], [grad.float()], [first], [second], [], [self.count],
                    lr=ADAMW["lr"], beta1=ADAMW["betas"][0], beta2=ADAMW["betas"][1],
                    weight_decay=ADAMW["weight_decay"], eps=ADAMW["eps"],
                    amsgrad=False, maximize=False, grad_scale=scale,
                )  # fmt: skip
                if weight is not master:
                    weight.copy_(master)
            self.grads.zero_()
        return losses

    def close(self) -> None:
        self.__dict__.clear()


CHANGES: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-keep": {"stage3_max_reuse_distance": 1e9},
    "ours-ahead1": {"stage3_prefetch_bucket_size": 25_000_000},
    "ours-fp32master": {"split_master_weights": False},
    "upstream": {},
}
"""What each DeepSpeed variant changes in the section ``zero_optimization``."""

NAMES = ("ours", "ours-keep", "ours-ahead1", "ours-fp32master", "fsdp2", "fsdp2-fp32reduce", "upstream", "single")


def isolate(variant: str, root: Path) -> None:
    """Make ``import deepspeed`` find what the variant names: the repository's package, or the one on PYTHONPATH."""
    here = {"", str(root)}
    sys.path[:] = [entry for entry in sys.path if entry not in here]
    if variant != "upstream":
        sys.path.insert(0, str(root))


def check_origin(variant: str, root: Path) -> None:
    """Raise unless the imported ``deepspeed`` is the one that the variant means."""
    module = sys.modules.get("deepspeed")
    if module is None or module.__file__ is None:
        return
    inside = root in Path(module.__file__).resolve().parents
    if inside == (variant == "upstream"):
        raise RuntimeError(f"variant {variant} imported {module.__file__}")


def prepare(variant: str, device: torch.device) -> None:
    """Import what the variant uses, so that building it is timed without, and set up what must be before first use."""
    if variant.startswith("fsdp2"):
        import torch.distributed.fsdp  # noqa: F401
        import torch.distributed.tensor  # noqa: F401
    if variant in CHANGES:
        import deepspeed  # noqa: F401
    if variant == "upstream" and device.type == "cpu":
        # its shared-memory collectives are compiled on first use; gloo does the work without
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def make(variant: str, work: Work, device: torch.device) -> Trainer:
    """Build the trainer of ``variant``."""
    if variant in CHANGES:
        return DeepSpeedTrainer(work, device, CHANGES[variant], client_optimizer=variant == "upstream")
    if variant == "fsdp2":
        return Fsdp2Trainer(work, device, torch.bfloat16)
    if variant == "fsdp2-fp32reduce":
        return Fsdp2Trainer(work, device, torch.float32)
    if variant == "single":
        return SingleTrainer(work, device)
    raise KeyError(f"variant {variant!r} is none of {', '.join(NAMES)}")


def forget() -> None:
    """Collect garbage and hand cached device memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
