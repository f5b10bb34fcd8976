# SPDX-License-Identifier: Apache-2.0
"""Where the GPU tests run: devices, marks, limits, and how ranks are launched on them.

    results = launch(fn, 2, arg, limit=40)     # fn on each rank, group initialised, one device a rank

With `NCCL_MULTI_RANK_GPU_ENABLE=1` (and an NCCL that knows it) ranks share devices; with `DS_GPU_TESTS_ON_CPU=1` the
same code runs on gloo without a device, so that the tests themselves can be proven anywhere.

What must hold: every launch ends within its limit, its file's and the session's; nothing here initialises CUDA in the
pytest process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import models, skips
from tests.harness.pool import FreshResult, run_fresh, run_ranks

ON_CPU = os.environ.get("DS_GPU_TESTS_ON_CPU") == "1"
SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
FILE_LIMIT = float(os.environ.get("GPU_FILE_LIMIT", "90"))
SESSION_END = float(os.environ.get("GPU_SESSION_END", "inf"))
GROUP_TIMEOUT = 40.0
BETWEEN = 0.01  # seconds of an injected delay

file_end = float("inf")


# -- in the pytest process -------------------------------------------------------------------------------------------


def needs(world: int, own_devices: bool = False) -> Any:
    """The mark of a test on `world` ranks: the devices that it takes, fewer where ranks may share them."""
    if ON_CPU:
        return pytest.mark.slow
    return pytest.mark.gpu(count=1 if SHARED and not own_devices else world)


def worlds(*sizes: int) -> list[Any]:
    """Parameters of a test that runs at several world sizes."""
    return [pytest.param(size, marks=needs(size)) for size in sizes]


cuda_only = pytest.mark.skipif(ON_CPU, reason=skips.needs("CUDA itself", "bash tests/gpu/session.sh on a GPU machine"))


def left() -> float:
    """Seconds that the current file and the session still have."""
    return min(file_end - time.monotonic(), SESSION_END - time.time())


def _limit(wanted: float) -> float:
    have = left()
    if have < 3:
        pytest.fail(f"NOT RUN: the time of this file or session is up ({have:.0f} s left)", pytrace=False)
    return min(wanted, have)


def _env(world: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # torch's watchdog sleeps four times as long between a timeout and the end of the process; 15 s by default
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
    }


def launch(fn: Callable[..., Any], world: int, *args: Any, limit: float = 60.0) -> list[Any]:
    """`fn(*args)` on each warm rank, in rank order. Results must not hold device tensors. Raises RankError."""
    return run_ranks(on_rank, world, fn, args, GROUP_TIMEOUT, timeout=_limit(limit), init_group=False, env=_env(world))


def launch_fresh(
    fn: Callable[..., Any], world: int, *args: Any, group: float, limit: float = 60.0
) -> list[FreshResult]:
    """`fn(*args)` on ranks in processes of their own, whose collectives fail after `group` seconds; how each ended."""
    return run_fresh(on_rank, world, fn, args, group, timeout=_limit(limit), init_group=False, env=_env(world))


def note(text: str) -> None:
    """Print `text`, and show it in the session's summary."""
    print(text)
    path = os.environ.get("GPU_SESSION_NOTES")
    if path:
        with Path(path).open("a") as notes:
            notes.write(text.rstrip() + "\n")


# -- on a rank -------------------------------------------------------------------------------------------------------


def on_rank(fn: Callable[..., Any], args: tuple[Any, ...], group_timeout: float) -> Any:
    """Take a device, join the group, run."""
    import deepspeed

    if not ON_CPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.cuda.set_sync_debug_mode("default")
    deepspeed.init_distributed(timeout=timedelta(seconds=group_timeout), verbose=False)
    return fn(*args)


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def synchronize() -> None:
    """Wait for this rank's device."""
    if not ON_CPU:
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes that tensors hold on this rank's device; 0 on a CPU."""
    return 0 if ON_CPU else torch.cuda.memory_allocated()


def build(name: str) -> nn.Module:
    """A model of `harness.models`, or of this file, on this rank's device."""
    return (globals().get(name) or getattr(models, name))().to(device())


def batches(name: str = "batch") -> Callable[..., tuple[Tensor, Tensor]]:
    """A batch function of `harness.models` whose tensors are on this rank's device."""
    draw = getattr(models, name)

    def on_device(step: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        tokens, targets = draw(step, rank, micro)
        return tokens.to(device()), targets.to(device())

    return on_device


def pause(seconds: float = BETWEEN) -> None:
    """Keep the current stream (on a CPU: the process) busy for about `seconds`."""
    if ON_CPU:
        time.sleep(seconds / 10)
    else:
        torch.cuda._sleep(int(seconds * 1.5e9))


def exact() -> None:
    """Deterministic kernels, and memory that nobody wrote is NaN: what races shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)


# -- models of a size that occupies a device ---------------------------------------------------------------------------

WIDTH = 64 if ON_CPU else 2048
DEPTH = 4


class Wide(nn.Module):
    """Blocks of two square-ish matrices, WIDTH to 4 WIDTH and back."""

    def __init__(self, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([models.Block(width, 4 * width) for _ in range(depth)])
        self.head = nn.Linear(width, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).float().pow(2).mean()


def wide() -> nn.Module:
    return models.seeded(Wide)


def activations(step: int, rank: int, micro: int = 0, rows: int = 16, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An input [rows, WIDTH] of `Wide`, a function of the arguments alone."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1_009 * rank + 31 * micro + 5)
    return torch.randn(rows, WIDTH, generator=generator).to(device(), dtype)
