# SPDX-License-Identifier: Apache-2.0
"""Promise: what known callers write is accepted, means what they expect, and is complete and frozen afterwards."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from deepspeed.errors import UsageError
from deepspeed.runtime.config import SECTIONS, DeepSpeedConfig
from deepspeed.runtime.config_sections import ScalarConfig, TagValidation
from deepspeed.runtime.config_utils import ConfigSection, warn_once
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from tests.harness.skips import needs

BASE: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
AUTO_FP16 = dict.fromkeys(
    ["enabled", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"], "auto"
)
CALLERS = {
    "accelerate": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "auto_cast": True},
    },
    "trainer": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "fp16": AUTO_FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "lightning": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
            "offload_param": {
                "device": "cpu",
                "nvme_path": "/local_nvme",
                "buffer_count": 5,
                "buffer_size": 100_000_000,
                "max_in_cpu": 1_000_000_000,
                "pin_memory": False,
            },
        },
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
    },
    "reinforcement": {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "sub_group_size": "auto",
            "stage3_max_live_parameters": "auto",
            "stage3_max_reuse_distance": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": "auto",
            "zero_hpz_partition_size": 2,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "reduce_scatter": True,
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"load_universal": False},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
    },
    "recipes": {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 0,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "compile": {"disable": False, "backend": "inductor"},
        "fp16": {"enabled": "auto", "initial_scale_power": 32},
        "train_batch_size": 8.0,
    },
    "extras": {
        **BASE,
        "_comment": "a remark",
        "comms_config": {"x": 1},
        "monitor_config": {},
        "zero_optimization.reduce_bucket_size": 12.5,
        "amp": {"enabled": False},
        "bfloat16": {"enabled": True},
        "sequence_parallel_size": 1,
    },
}


@pytest.mark.parametrize("caller", CALLERS)
def test_configurations_of_known_callers(caller):
    config = DeepSpeedConfig(CALLERS[caller], world_size=4)
    assert config.train_batch_size == (
        config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * config.world_size
    )
    assert config.raw == CALLERS[caller]


def test_values_of_callers_arrive():
    accelerate = DeepSpeedConfig(CALLERS["accelerate"], world_size=4)
    assert accelerate.param_dtype is torch.bfloat16 and accelerate.steps_per_print == float("inf")
    assert accelerate.gradient_clipping == 1.0 and accelerate.zero_config.gather_16bit_weights_on_model_save is True
    trainer = DeepSpeedConfig(CALLERS["trainer"], world_size=4)
    assert trainer.zero_config.optimizer_device is OffloadDeviceEnum.cpu
    assert trainer.zero_config.param_device is OffloadDeviceEnum.cpu
    assert trainer.zero_config.max_live_parameters == 10**9 and isinstance(trainer.zero_config.max_live_parameters, int)
    assert trainer.param_dtype is torch.float32 and trainer.fp16.initial_scale_power == 16
    assert trainer.optimizer is not None and trainer.optimizer.params["lr"] == "auto"
    reinforcement = DeepSpeedConfig(CALLERS["reinforcement"], world_size=4)
    assert reinforcement.gradient_accumulation_steps == 8 and reinforcement.grad_accum_dtype is torch.float32
    assert reinforcement.zero_config.zero_hpz_partition_size == 2
    recipes = DeepSpeedConfig(CALLERS["recipes"], world_size=4)
    assert recipes.zero_config.max_live_parameters == 0 and recipes.zero_config.sub_group_size == 0
    assert recipes.fp16.initial_scale_power == 32 and recipes.train_batch_size == 8
    assert DeepSpeedConfig(CALLERS["extras"], world_size=4).bf16.enabled


def test_defaults_where_nothing_is_said():
    config = DeepSpeedConfig(BASE, world_size=1)
    zero = config.zero_config
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.sub_group_size) == (5 * 10**8, 5 * 10**7, 10**9)
    assert (zero.param_persistence_threshold, zero.zero_hpz_partition_size, zero.overlaps_comm) == (10**5, 1, True)
    assert (config.gradient_clipping, config.steps_per_print, config.bf16.check_grad_overflow) == (1.0, None, True)
    assert config.checkpoint.tag_validation is TagValidation.warn
    assert config.optimizer is None and config.scheduler is None and not config.monitor.enabled
    assert (config.communication_data_type, config.grad_accum_dtype, config.param_dtype) == (None, None, torch.float32)
    assert not config.leaf_module.classes_given and len(config.leaf_module.classes) == 3


@pytest.mark.parametrize("name", [key for key in DeepSpeedZeroConfig.other_spellings if "fp16" not in key])
def test_both_spellings_mean_the_same(name):
    field = DeepSpeedZeroConfig.other_spellings[name]
    for key in (name, field):
        config = DeepSpeedConfig({**BASE, "zero_optimization": {"stage": 3, key: 1}}, world_size=1)
        assert getattr(config.zero_config, field) == 1


def test_legacy_forms():
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    config = DeepSpeedConfig({**BASE, "zero_optimization": zero}, world_size=1).zero_config
    assert config.offload_optimizer is not None and config.offload_param is not None
    assert config.optimizer_device == config.param_device == "cpu" and not config.offload_optimizer.pin_memory
    zero = {"stage": 3, "cpu_offload": False, "stage3_gather_fp16_weights_on_model_save": True, "mics_shard_size": -1}
    config = DeepSpeedConfig({**BASE, "zero_optimization": zero}, world_size=1).zero_config
    assert config.optimizer_device is OffloadDeviceEnum.none and config.gather_16bit_weights_on_model_save
    leaf = {"stage": 3, "leaf_module": {"classes": "Block", "names": ["a.b"]}}
    config = DeepSpeedConfig({**BASE, "zero_optimization": leaf}, world_size=1)
    assert config.leaf_module.classes == ("Block",) and config.leaf_module.classes_given


@pytest.mark.parametrize("value", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_spellings_of_a_dtype(value):
    assert DeepSpeedConfig({**BASE, "communication_data_type": value}, world_size=1).communication_data_type is (
        torch.bfloat16
    )


def test_param_dtype_may_be_repeated_where_it_agrees():
    for key, dtype in (("bf16", "bf16"), ("fp16", "fp16")):
        config = DeepSpeedConfig({**BASE, key: {"enabled": True}, "data_types": {"param_dtype": dtype}}, world_size=1)
        assert config.param_dtype is config.data_types.param_dtype


def test_sources_are_equivalent(tmp_path):
    text = json.dumps(BASE)
    path = tmp_path / "config.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = DeepSpeedConfig(BASE, world_size=2).to_dict()
    for source in (path, str(path), encoded):
        assert DeepSpeedConfig(source, world_size=2).to_dict() == expected


def test_hjson(tmp_path):
    pytest.importorskip("hjson", reason=needs("hjson"))
    path = tmp_path / "config.hjson"
    path.write_text("{\n  # a remark\n  train_batch_size: 8\n  zero_optimization: {stage: 3}\n}")
    assert DeepSpeedConfig(path, world_size=2).train_micro_batch_size_per_gpu == 4


def test_world_size_comes_from_mpu_or_environment(monkeypatch):
    class Mpu:
        def get_data_parallel_world_size(self):
            return 2

    monkeypatch.setenv("WORLD_SIZE", "8")
    assert DeepSpeedConfig(BASE).train_micro_batch_size_per_gpu == 1
    assert DeepSpeedConfig(BASE, Mpu()).train_micro_batch_size_per_gpu == 4
    assert DeepSpeedConfig(BASE, world_size=4).train_micro_batch_size_per_gpu == 2
    monkeypatch.delenv("WORLD_SIZE")
    assert DeepSpeedConfig(BASE).train_micro_batch_size_per_gpu == 8


def test_frozen_and_apart_from_the_users_dict():
    user = copy.deepcopy(BASE)
    config = DeepSpeedConfig(user, world_size=1)
    with pytest.raises(UsageError, match="train_batch_size"):
        config.train_batch_size = 3
    with pytest.raises(ValueError, match="frozen"):
        config.zero_config.stage = 1
    user["zero_optimization"]["stage"] = 1
    assert config.raw["zero_optimization"]["stage"] == 3


def test_prints_as_strict_json():
    config = DeepSpeedConfig(
        {**CALLERS["accelerate"], "comet": {"api_key": "secret"}, "communication_data_type": "fp32"}, world_size=4
    )
    plain = json.loads(str(config), parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert plain["steps_per_print"] == "inf" and plain["communication_data_type"] == "float32"
    assert plain["zero_optimization"]["stage"] == 3 and plain["train_batch_size"] == 4
    assert "secret" not in str(config)
    assert set(SECTIONS) <= set(plain)


def test_one_warning_lists_all_unknown_keys_with_near_matches(capsys):
    warn_once.cache_clear()
    strange = {"zero_optimisation": {}, "zero_optimization.stage": 3, "foo_bar_baz": 1, "_note": 1, "aio": {"depth": 1}}
    for _ in range(2):
        DeepSpeedConfig({**BASE, **strange}, world_size=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(lines) == 1
    for word in ("zero_optimisation (Did you mean 'zero_optimization'?)", "dotted", "foo_bar_baz", "aio.depth"):
        assert word in lines[0]
    assert "_note" not in lines[0]


def test_every_field_says_who_acts_or_why_it_is_inert():
    def sections(cls: type[BaseModel]):
        yield cls
        for field in cls.model_fields.values():
            for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(part, type) and issubclass(part, ConfigSection):
                    yield from sections(part)

    found = {cls for top in (ScalarConfig, *SECTIONS.values()) for cls in sections(top)}
    assert len(found) > len(SECTIONS)
    for cls in found:
        assert cls.model_config["frozen"] and cls.model_config["extra"] == "forbid"
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict) and len(extra.keys() & {"acted_by", "inert"}) == 1, f"{cls.__name__}.{name}"
            assert field.description, f"{cls.__name__}.{name}"


def test_enums_of_callers():
    assert [member.value for member in OffloadDeviceEnum] == ["none", "cpu", "nvme"]
    assert {member.name for member in OffloadStateTypeEnum} == {
        "optim_states",
        "hp_params",
        "lp_params",
        "lp_grads",
        "contiguous_grad_buffer",
    }
    # Checkpoints name the class by this path, and compare its values with plain integers.
    assert ZeroStageEnum.__module__ == "deepspeed.runtime.zero.config" and ZeroStageEnum(3) == 3
