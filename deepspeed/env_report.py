# SPDX-License-Identifier: Apache-2.0
"""`ds_report`: versions, devices, backends, what is built, what is not and why.

What must hold: the report never fails because something is missing; a missing thing is a row that says so. It changes
nothing and initialises no device beyond asking for its properties.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepspeed.version import __version__

__all__ = ["OpRow", "Row", "cli_main", "main", "op_rows", "report"]

_PACKAGES = ("torch", "numpy", "pydantic", "transformers", "accelerate", "peft", "safetensors", "triton")
_PROGRAMS = {
    "ssh": "--launcher ssh",
    "pdsh": "--launcher pdsh",
    "mpirun": "--launcher openmpi, mpich, impi, mvapich",
    "srun": "--launcher slurm",
}


@dataclass(frozen=True)
class Row:
    """One line of the report: what, its value, and whether it can be used (`None`: neither good nor bad)."""

    name: str
    value: str
    ok: bool | None = None


@dataclass(frozen=True)
class OpRow:
    """An op: whether a native kernel is built, whether the feature can be used, and why."""

    name: str
    built: bool
    usable: bool
    reason: str


def report() -> dict[str, list[Row]]:
    """Every section of the report, by title."""
    return {
        "Versions": _versions(),
        "Devices": _devices(),
        "Communication": _backends(),
        "Launcher": _launcher(),
        "Native ops": [Row(row.name, row.reason, row.usable) for row in op_rows()],
    }


def op_rows() -> list[OpRow]:
    """The optimizers and ops that callers ask for by name."""
    torch_backed = "runs on torch's operations; nothing to build"
    rows = [OpRow(name, False, True, torch_backed) for name in ("fused_adam", "cpu_adam", "fused_lion", "cpu_lion")]
    rows.append(OpRow("cpu_adagrad", False, True, torch_backed))
    from deepspeed.ops.op_builder import ALL_BUILDERS

    for builder in ALL_BUILDERS:
        usable = builder().is_compatible()
        rows.append(OpRow(builder.NAME, usable, usable, "built" if usable else f"not built: {builder.REMEDY}"))
    return rows


def _versions() -> list[Row]:
    rows = [
        Row("deepspeed", f"{__version__} in {os.path.dirname(os.path.abspath(__file__))}"),
        Row("python", f"{platform.python_version()} at {sys.executable}"),
        Row("system", platform.platform()),
    ]
    for name in _PACKAGES:
        try:
            rows.append(Row(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append(Row(name, "not installed"))
    return rows


def _devices() -> list[Row]:
    import psutil
    import torch

    from deepspeed.accelerator import get_accelerator
    from deepspeed.errors import DeepSpeedError

    rows: list[Row] = []
    try:
        chosen = get_accelerator()
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in chosen.supported_dtypes())
        rows.append(Row("accelerator", f"{chosen._name} ({kinds})", True))
    except DeepSpeedError as err:
        rows.append(Row("accelerator", str(err), False))
    rows.append(Row("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "not set")))
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    rows.append(Row("cpu", f"{cores} core(s), {_gib(memory.available)} of {_gib(memory.total)} free, {_cpu_name()}"))
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    rows.append(Row("/dev/shm", f"{_gib(shm.free)} of {_gib(shm.total)} free" if shm else "missing"))
    if torch.version.cuda is None:
        rows.append(Row("cuda", f"torch {torch.__version__} is a build without CUDA", False))
    elif not torch.cuda.is_available():
        rows.append(Row("cuda", f"torch has CUDA {torch.version.cuda}, but finds no usable device", False))
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            capability = f"sm_{device.major}{device.minor}"
            rows.append(Row(f"cuda:{index}", f"{device.name}, {_gib(device.total_memory)}, {capability}", True))
    return rows


def _backends() -> list[Row]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [Row("torch.distributed", "not part of this build of torch", False)]
    rows = [Row("gloo", "for the CPU and for control messages", True)] if dist.is_gloo_available() else []
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        rows.append(Row("nccl", version, torch.cuda.is_available()))
    else:
        rows.append(Row("nccl", "not part of this build of torch", False))
    rows.append(Row("mpi", "built in" if dist.is_mpi_available() else "not part of this build of torch; not needed"))
    return rows


def _launcher() -> list[Row]:
    from deepspeed.errors import LauncherError
    from deepspeed.launcher.constants import DLTS_HOSTFILE, GRACE_VARIABLE, grace_period

    rows = []
    for program, use in _PROGRAMS.items():
        path = shutil.which(program)
        rows.append(Row(program, f"{path or 'not on PATH'} ({use})", path is not None))
    rows.append(Row("hostfile", f"{DLTS_HOSTFILE}{'' if os.path.isfile(DLTS_HOSTFILE) else ' (absent)'}"))
    try:
        rows.append(Row(GRACE_VARIABLE, f"{grace_period(os.environ):g} s"))
    except LauncherError as err:
        rows.append(Row(GRACE_VARIABLE, str(err), False))
    return rows


def _cpu_name() -> str:
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def as_json(sections: dict[str, list[Row]]) -> str:
    """The report for programs: a list of rows by section."""
    return json.dumps({title: [asdict(row) for row in rows] for title, rows in sections.items()}, indent=2)


def show(sections: dict[str, list[Row]]) -> None:
    """Print the report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    marks: dict[bool | None, str] = {True: "[green]yes[/green]", False: "[yellow]no[/yellow]", None: ""}
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, expand=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(row.name, marks[row.ok], _plain(row.value))
        console.print(table)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def main(args: Sequence[str] | None = None) -> None:
    """The command `ds_report`."""
    parser = argparse.ArgumentParser(prog="ds_report", description="What this installation is, has and can do.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(args)
    sections = report()
    if options.json:
        print(as_json(sections))
    else:
        show(sections)


def cli_main() -> None:
    """Entry point of the console scripts."""
    main()


if __name__ == "__main__":
    main()
