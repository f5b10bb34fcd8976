# SPDX-License-Identifier: Apache-2.0
"""Importing the package is quick, compiles nothing and needs no CUDA toolkit; the launcher does not even import
torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.meta.sources import ROOT
from tests.meta.test_public_names import ELSEWHERE

MOST_SECONDS = 3.0


def _python(code: str, cwd: Path, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in {"CUDA_HOME", "CUDA_PATH", "CC", "CXX"}}
    kept.update(PYTHONPATH=str(ROOT), **env)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=kept, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_launcher_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, deepspeed.launcher.runner; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert _python(code, tmp_path) == "[]"


def test_submodules_are_attributes_after_a_plain_import(tmp_path: Path) -> None:
    """Lightning's strategy reads `deepspeed.utils.logging` after `import deepspeed` alone, as other clients do."""
    paths = [path for path in ELSEWHERE if path != "deepspeed.launcher.runner"]  # upstream does not load it either
    code = f"""
import operator, sys
for path in {paths}:
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    import deepspeed
    assert operator.attrgetter(path.removeprefix("deepspeed."))(deepspeed).__name__ == path, path
print(hasattr(deepspeed.utils, "nothing"), hasattr(deepspeed.runtime, "nothing"))"""
    assert _python(code, tmp_path) == "False False"


def test_import_needs_no_compiler_and_little_time(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    code = (
        "import time, torch, torch.distributed\n"
        "start = time.perf_counter()\n"
        "import deepspeed\n"
        "deepspeed.initialize, deepspeed.zero.Init, deepspeed.DeepSpeedEngine, deepspeed.comm.all_reduce\n"
        "print(time.perf_counter() - start)"
    )
    assert float(_python(code, tmp_path, PATH=str(empty)).splitlines()[-1]) < MOST_SECONDS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def test_import_makes_no_process_group_and_touches_no_signal(tmp_path: Path) -> None:
    code = (
        "import signal, torch.distributed as d\n"
        "before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]\n"
        "import deepspeed\n"
        "deepspeed.zero, deepspeed.utils.logger\n"
        "after = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]\n"
        "print(d.is_initialized(), before == after)"
    )
    assert _python(code, tmp_path).splitlines()[-1] == "False True"
