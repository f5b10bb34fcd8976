# SPDX-License-Identifier: Apache-2.0
"""Getters of configuration values on the engine, generated from one table: name -> path in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GETTERS: dict[str, str] = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "steps_per_print": "steps_per_print",
    "gradient_clipping": "gradient_clipping",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "communication_data_type": "communication_data_type",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "bfloat16_enabled": "bf16.enabled",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "zero_optimization": "zero_enabled",
    "zero_optimization_stage": "zero_optimization_stage",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_offload_optimizer": "zero_config.offload_optimizer",
    "zero_offload_param": "zero_config.offload_param",
    "zero_sub_group_size": "zero_config.sub_group_size",
    "zero_max_live_parameters": "zero_config.max_live_parameters",
    "zero_max_reuse_distance": "zero_config.max_reuse_distance",
    "zero_prefetch_bucket_size": "zero_config.prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_config.param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_config.model_persistence_threshold",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_gather_16bit_weights_on_model_save": "zero_config.gather_16bit_weights_on_model_save",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "dataloader_drop_last": "dataloader_drop_last",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_tag_validation_enabled": "checkpoint.tag_validation",
}


def _getter(name: str, path: str) -> Callable[[Any], Any]:
    keys = path.split(".")

    def get(self: Any) -> Any:
        value = self._config
        for key in keys:
            value = getattr(value, key)
        return value

    get.__name__ = get.__qualname__ = name
    get.__doc__ = f"The configuration's ``{path}``."
    return get


class ConfigGetters:
    """Base of the engine with one method per row of ``GETTERS``."""

    _config: Any

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are sharded (stage 3)."""
        return bool(self._config.zero_optimization_stage >= 3)

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded (stage 2 and above)."""
        return bool(self._config.zero_optimization_stage >= 2)


for _name, _path in GETTERS.items():
    setattr(ConfigGetters, _name, _getter(_name, _path))
