# SPDX-License-Identifier: Apache-2.0
"""The section `zero_optimization.leaf_module`: which modules are gathered as one piece."""

from __future__ import annotations

from deepspeed.runtime.config_utils import ConfigSection, Names, acted

DEFAULT_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class DeepSpeedZeroLeafModuleConfig(ConfigSection):
    """Modules whose descendants are gathered together: by class, by module name, or by suffix of the name.

    A single string counts as a list of one. Names in the default class list that a model does not have are no error.
    """

    classes: Names = acted(DEFAULT_LEAF_CLASSES, by="engine (leaf modules)", doc="qualified or short class names")
    names: Names = acted((), by="engine (leaf modules)", doc="module names as in named_modules()")
    name_suffixes: Names = acted((), by="engine (leaf modules)", doc="endings of module names")

    @property
    def classes_given(self) -> bool:
        """Whether the user listed classes; only then is a class that is not found worth a warning."""
        return "classes" in self.model_fields_set
