# SPDX-License-Identifier: Apache-2.0
"""Names and defaults that the modules of the launcher share.

What must hold: the public names (`DEEPSPEED_ENVIRONMENT_NAME`, `EXPORT_ENVS`, `DLTS_HOSTFILE`) are re-exported by
`deepspeed.launcher.runner`, where clients read them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping

from deepspeed.errors import LauncherError

__all__ = [
    "ALSO_EXPORT",
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEFAULT_GRACE",
    "DEFAULT_PORT",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "GRACE_VARIABLE",
    "cpu_environment",
    "grace_period",
    "setup_logging",
]

DLTS_HOSTFILE = "/job/hostfile"
"""Hostfile that is used when no `--hostfile` is given and it exists."""

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""Prefixes of variables that travel to other hosts. Callers may append to it."""

ALSO_EXPORT = ("NCCL", "GLOO", "DEEPSPEED", "DS_")
"""Further prefixes that travel: those of the communication backends, and our own."""

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""Name of the file, in the home folder and in the working directory, that lists further variables."""

DEFAULT_PORT = 29500

GRACE_VARIABLE = "DEEPSPEED_LAUNCHER_GRACE"
DEFAULT_GRACE = 20.0
"""Seconds that ranks have, in total, between the first signal and SIGKILL."""


def grace_period(environ: Mapping[str, str]) -> float:
    """The grace period that the environment asks for.

    Raises:
        LauncherError: the variable holds no number of seconds.
    """
    text = environ.get(GRACE_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_GRACE
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 86400:
        raise LauncherError(f"{GRACE_VARIABLE}={text!r} is no number of seconds between 0 and 86400")
    return seconds


def cpu_environment(environ: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What makes an unchanged script run on the CPU with gloo, `ranks` processes a host.

    `DS_ACCELERATOR` decides for this package, an empty `CUDA_VISIBLE_DEVICES` for torch, `ACCELERATE_TORCH_DEVICE` for
    accelerate and with it the Trainer. `ACCELERATE_USE_CPU` is removed by being set to false: it would make accelerate
    leave its DeepSpeed path for plain data parallelism.
    """
    values = {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_USE_CPU": "false",
    }
    if not environ.get("OMP_NUM_THREADS"):
        values["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return values


def setup_logging(level: str, quiet: bool) -> None:
    """Send the launcher's messages to standard error, those below `level` not at all (`quiet`: only errors).

    Raises:
        LauncherError: an unknown level.
    """
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise LauncherError(f"--log_level {level!r}: use debug, info, warning, error or critical")
    logger = logging.getLogger("deepspeed.launcher")
    logger.setLevel(logging.ERROR if quiet else number)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [launcher] %(message)s"))
        logger.addHandler(handler)
