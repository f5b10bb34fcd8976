# SPDX-License-Identifier: Apache-2.0
"""A lower layer never imports a higher one, and the pure layer imports nothing but the standard library.

Each module belongs to the layer of its longest matching entry in LAYER_OF. A module that matches none is a failure:
whoever adds a folder decides where it belongs.
"""

from __future__ import annotations

import sys

import pytest

from tests.meta.sources import imports, package_sources

LAYERS = ("pure", "wire", "core", "glue", "face")

LAYER_OF = {
    # pure: the standard library and each other
    "deepspeed.errors": "pure",
    "deepspeed.not_built": "pure",
    "deepspeed.lazy": "pure",
    "deepspeed.version": "pure",
    "deepspeed.utils.logging": "pure",
    "deepspeed.comm.comms_logger": "pure",
    "deepspeed.comm.discovery": "pure",
    "deepspeed.runtime.batch": "pure",
    "deepspeed.runtime.zero.core.ranks": "pure",
    "deepspeed.runtime.zero.core.layout": "pure",
    "deepspeed.runtime.zero.core.trace": "pure",
    "deepspeed.launcher.hosts": "pure",
    "deepspeed.launcher.command": "pure",
    "deepspeed.launcher.constants": "pure",
    "deepspeed.launcher.cores": "pure",
    "deepspeed.launcher.envfile": "pure",
    # wire: torch.distributed, files, processes, devices
    "deepspeed.comm": "wire",
    "deepspeed.accelerator": "wire",
    "deepspeed.launcher": "wire",
    "deepspeed.utils.groups": "wire",
    "deepspeed.utils.timer": "wire",
    "deepspeed.checkpoint": "wire",
    "deepspeed.runtime.utils": "wire",
    "deepspeed.runtime.dataloader": "wire",
    "deepspeed.runtime.zero.core.wire": "wire",
    "deepspeed.runtime.zero.core.direct": "wire",
    # core: sharded parameters, optimizers, the configuration they read
    "deepspeed.runtime.zero.core": "core",
    "deepspeed.runtime.zero.config": "core",
    "deepspeed.runtime.zero.offload_config": "core",
    "deepspeed.runtime.zero.leaf_module_config": "core",
    "deepspeed.runtime.config": "core",
    "deepspeed.runtime.config_reference": "core",
    "deepspeed.runtime.config_sections": "core",
    "deepspeed.runtime.config_utils": "core",
    "deepspeed.runtime.precision_config": "core",
    "deepspeed.runtime.base_optimizer": "core",
    "deepspeed.runtime.optimizers": "core",
    "deepspeed.runtime.lr_schedules": "core",
    "deepspeed.runtime.fp16": "core",
    "deepspeed.ops": "core",
    "deepspeed.elasticity": "core",
    "deepspeed.monitor": "core",
    # glue: hooks on users' modules, engine parts
    "deepspeed.runtime.zero.core.hooks": "glue",
    "deepspeed.runtime.zero.core.model": "glue",
    "deepspeed.runtime.engine_parts": "glue",
    "deepspeed.runtime.zero": "glue",
    "deepspeed.runtime.activation_checkpointing": "glue",
    "deepspeed.runtime.checkpoint_engine": "glue",
    "deepspeed.module_inject": "glue",
    "deepspeed.profiling": "glue",
    # face: the names that users import
    "deepspeed": "face",
    "deepspeed.api": "face",
    "deepspeed.env_report": "face",
    "deepspeed.git_version_info": "face",
    "deepspeed.runtime": "face",
    "deepspeed.runtime.engine": "face",
    "deepspeed.runtime.engine_parts.build": "face",
    "deepspeed.runtime.zero.parameter_offload": "face",
    "deepspeed.runtime.zero.stage3": "face",
    "deepspeed.utils": "face",
    "deepspeed.utils.plan": "face",
    "deepspeed.utils.tensor_fragment": "face",
    "deepspeed.utils.z3_leaf_module": "face",
    "deepspeed.utils.zero_to_fp32": "face",
    "deepspeed.utils.zero_to_torch": "face",
}

# Exact modules: an entry for a package that others nest in must not decide for modules that somebody adds below it.
EXACT = {"deepspeed", "deepspeed.runtime", "deepspeed.utils"}


def layer_of(module: str) -> str | None:
    """The layer of a module, None where nobody has decided."""
    name = module
    while name:
        if name in LAYER_OF and (name == module or name not in EXACT):
            return LAYER_OF[name]
        name = name.rpartition(".")[0]
    return None


def violations(sources: dict[str, str]) -> list[str]:
    """One line per import that breaks the rule, and per module without a layer."""
    found, known = [], set(sources)
    for module, source in sources.items():
        layer = layer_of(module)
        if layer is None:
            found.append(f"{module}: belongs to no layer; add it to LAYER_OF")
            continue
        for line, target in imports(module, source, known):
            top = target.partition(".")[0]
            if top == "deepspeed":
                other = layer_of(target)
                if other is not None and LAYERS.index(other) > LAYERS.index(layer):
                    found.append(f"{module}:{line}: {layer} imports {target}, which is {other}")
            elif layer == "pure" and top not in sys.stdlib_module_names:
                found.append(f"{module}:{line}: pure imports {target}")
    return found


def test_no_lower_layer_imports_a_higher_one() -> None:
    assert violations(package_sources()) == []


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("deepspeed.runtime.zero.core.wire", "from deepspeed.runtime.engine import DeepSpeedEngine", "face"),
        ("deepspeed.runtime.zero.core.layout", "def f():\n    import torch", "pure imports torch"),
        ("deepspeed.runtime.zero.core.fetch", "from deepspeed.runtime.zero.core import hooks", "glue"),
        ("deepspeed.runtime.zero.core.fetch", "from . import hooks", "glue"),
        ("deepspeed.comm.comm", "import deepspeed", "face"),
        ("deepspeed.novelty.thing", "", "no layer"),
        ("deepspeed.utils.novelty", "", "no layer"),
    ],
)
def test_a_violation_is_seen(module: str, source: str, said: str) -> None:
    known = {"deepspeed": "", "deepspeed.runtime.engine": "", "deepspeed.runtime.zero.core.hooks": "", module: source}
    [line] = violations(known)
    assert said in line and module in line


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deepspeed.runtime.engine", "from deepspeed.runtime.zero.core import fetch"),
        ("deepspeed.comm.comm", "if TYPE_CHECKING:\n    from deepspeed.runtime.engine import DeepSpeedEngine"),
        ("deepspeed.runtime.batch", "import math\nfrom deepspeed.errors import ConfigError"),
    ],
)
def test_what_is_allowed(module: str, source: str) -> None:
    assert (
        violations({module: source, "deepspeed.runtime.engine": source, "deepspeed.errors": ""} | {module: source})
        == []
    )
