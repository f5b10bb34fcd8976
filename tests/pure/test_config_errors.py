# SPDX-License-Identifier: Apache-2.0
"""Promise: a wrong configuration is refused at once; the message starts with the key's path and says what to do."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys

import pytest

from deepspeed.errors import (
    BatchConfigError,
    ConfigConflictError,
    ConfigError,
    DeepSpeedConfigError,
    NotSupportedError,
    UnsupportedConfigError,
)
from deepspeed.runtime.config import FEATURES, REMOVED, SECTIONS, UNSUPPORTED, DeepSpeedConfig

WORLD = 4


def build(config: dict, zero: dict | None = None, world: int = WORLD) -> DeepSpeedConfig:
    return DeepSpeedConfig(
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, **(zero or {})}, **config}, world_size=world
    )


@pytest.mark.parametrize(
    ("zero", "path", "words"),
    [
        ({"zero_hpz_partiton_size": 2}, "zero_hpz_partiton_size", ["2", "Did you mean 'zero_hpz_partition_size'?"]),
        ({"stage3_max_live_paramters": 2}, "stage3_max_live_paramters", ["'stage3_max_live_parameters'"]),
        ({"grad_hooks": True}, "grad_hooks", ["unknown key", "True"]),
        ({"cpu_offload_params": True}, "cpu_offload_params", ["unknown key"]),
        ({"offload_param": {"devise": "cpu"}}, "offload_param.devise", ["'cpu'", "Did you mean 'device'?"]),
        ({"offload_optimizer": {"device": "gpu"}}, "offload_optimizer.device", ["'gpu'", "none", "cpu"]),
        ({"offload_param": "cpu"}, "offload_param", ["'cpu'"]),
        ({"offload_optimizer": {"ratio": 1.5}}, "offload_optimizer.ratio", ["1.5"]),
        ({"leaf_module": {"class": "A"}}, "leaf_module.class", ["classes"]),
        ({"leaf_module": {"classes": 3}}, "leaf_module.classes", ["3"]),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size", ["greater than 0", "got 0"]),
        ({"reduce_bucket_size": -1}, "reduce_bucket_size", ["-1"]),
        ({"reduce_bucket_size": 1.5}, "reduce_bucket_size", ["1.5", "integer"]),
        ({"reduce_bucket_size": "big"}, "reduce_bucket_size", ["'big'", "integer"]),
        ({"reduce_bucket_size": True}, "reduce_bucket_size", ["True"]),
        ({"reduce_bucket_size": None}, "reduce_bucket_size", ["None"]),
        ({"sub_group_size": -1}, "sub_group_size", ["-1"]),
        ({"stage3_prefetch_bucket_size": -5}, "prefetch_bucket_size", ["-5"]),
        ({"stage": 4}, "stage", ["4"]),
        ({"stage": "three"}, "stage", ["'three'"]),
        ({"overlap_comm": "maybe"}, "overlap_comm", ["'maybe'"]),
        (
            {"max_live_parameters": 1, "stage3_max_live_parameters": 1},
            "stage3_max_live_parameters",
            ["twice", "'max_live_parameters'"],
        ),
        (
            {"stage3_gather_fp16_weights_on_model_save": True, "gather_16bit_weights_on_model_save": True},
            "gather_16bit_weights_on_model_save",
            ["twice"],
        ),
        ({"cpu_offload": True, "offload_optimizer": {"device": "none"}}, "cpu_offload", ["offload_optimizer"]),
        ({"cpu_offload": "yes"}, "cpu_offload", ["'yes'"]),
        ({"zero_hpz_partition_size": 3}, "zero_hpz_partition_size", ["3", "world size 4", "1, 2, 4"]),
        ({"zero_hpz_partition_size": 8}, "zero_hpz_partition_size", ["8", "world size 4", "1, 2, 4"]),
        ({"zero_hpz_partition_size": 0}, "zero_hpz_partition_size", ["0", "1, 2, 4"]),
    ],
)
def test_zero_section(zero, path, words):
    with pytest.raises(ConfigError) as caught:
        build({}, zero)
    message = str(caught.value)
    assert message.startswith("zero_optimization.") and path in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"fp16": {"enable": True}}, "fp16.enable:", ["Did you mean 'enabled'?"]),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale:", ["-1"]),
        ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale:", ["nan"]),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window:", ["0"]),
        ({"bf16": True}, "bf16:", ["object", "True"]),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16:", ["twice"]),
        ({"data_types": {"grad_accum_dtype": "fp64"}}, "data_types.grad_accum_dtype:", ["'fp64'", "fp32", "bf16"]),
        ({"communication_data_type": "int8"}, "communication_data_type:", ["'int8'"]),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype:", ["bfloat16", "float32"]),
        ({"gradient_clipping": -1}, "gradient_clipping:", ["-1"]),
        ({"gradient_clipping": "much"}, "gradient_clipping:", ["'much'"]),
        ({"steps_per_print": 0}, "steps_per_print:", ["0"]),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op:", ["'max'"]),
        ({"optimizer": {}}, "optimizer.type:", ["required"]),
        ({"optimizer": {"type": "Adam", "param": {}}}, "optimizer.param:", ["'params'"]),
        ({"optimizer": "Adam"}, "optimizer:", ["'Adam'"]),
        ({"scheduler": {"params": {}}}, "scheduler.type:", ["required"]),
        ({"checkpoint": {"tag_validation": "Perhaps"}}, "checkpoint.tag_validation:", ["Ignore", "Warn", "Fail"]),
        ({"checkpoint": {"load_universall": True}}, "checkpoint.load_universall:", ["'load_universal'"]),
        ({"tensorboard": {"enabled": True, "path": "x"}}, "tensorboard.path:", ["unknown"]),
        ({"comms_logger": {"prof": 1}}, "comms_logger.prof:", ["unknown"]),
        ({"timers": {"throughput": {"enable": 1}}}, "timers.throughput.enable:", ["'enabled'"]),
        ({"wandb": []}, "wandb:", ["object"]),
    ],
)
def test_other_sections(config, path, words):
    with pytest.raises(ConfigError) as caught:
        build(config)
    message = str(caught.value)
    assert message.startswith(path)
    for word in words:
        assert word in message


def test_every_problem_of_a_section_is_listed():
    with pytest.raises(ConfigError) as caught:
        build({}, {"reduce_bucket_size": 0, "sub_group_size": -1, "offload_param": {"devise": 1, "pin": 2}})
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_auto_batch_sizes_are_refused_by_name(key):
    with pytest.raises(BatchConfigError, match=key):
        build({key: "auto"})


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [1.5, "x", True, [], 0, -3])
def test_wrong_batch_sizes_are_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"^{key}:"):
        build({key: value})


@pytest.mark.parametrize("pair", [("fp16", "bf16"), ("fp16", "torch_autocast"), ("bf16", "torch_autocast")])
def test_two_precisions_contradict(pair):
    with pytest.raises(ConfigConflictError) as caught:
        build({key: {"enabled": True} for key in pair})
    assert isinstance(caught.value, AssertionError)
    assert all(key in str(caught.value) for key in pair)


# One value per rule of UNSUPPORTED that the rule must refuse.
REFUSED_VALUES = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "data_types.buffer_dtype": "bf16",
    "data_types.keep_in_fp32_modules": ["norm"],
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "tensor_parallel.autotp_size": 2,
    "checkpoint.checkpoint_serialization": False,
    "checkpoint.writer": {"type": "fast"},
}


@pytest.mark.parametrize("rule", UNSUPPORTED, ids=lambda rule: rule.key)
def test_what_is_not_built_raises_by_name(rule):
    *parents, last = rule.key.split(".")
    config: dict = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    place = config
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = REFUSED_VALUES.get(rule.key, True)
    with pytest.raises(UnsupportedConfigError) as caught:
        DeepSpeedConfig(config, world_size=WORLD)
    assert str(caught.value).startswith(rule.key) and rule.remedy in str(caught.value)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, NotSupportedError)
    place[last] = "auto"
    if rule.key != "zero_optimization.stage":
        DeepSpeedConfig(config, world_size=WORLD)


@pytest.mark.parametrize("config", [{}, {"zero_optimization": True}, {"zero_optimization": {"stage": "auto"}}])
def test_no_stage_is_not_stage_3(config):
    with pytest.raises(UnsupportedConfigError, match="zero_optimization.stage"):
        DeepSpeedConfig({"train_batch_size": 8, **config}, world_size=WORLD)


@pytest.mark.parametrize("key", [*REMOVED, *FEATURES])
def test_removed_features_raise_where_on_and_not_where_off(key):
    for value in (True, {"enabled": True}, {"part": {"enabled": True}}, {"ratio": 2}):
        with pytest.raises(UnsupportedConfigError, match=f"^{key}:"):
            build({key: value})
    for value in (False, None, {}, {"enabled": False}, {"enabled": "auto"}, {"part": {"enabled": False}}):
        build({key: value})


@pytest.mark.parametrize("key", [key for key in SECTIONS if key not in ("optimizer", "scheduler")])
@pytest.mark.parametrize("value", [3, "text", [1]])
def test_a_section_that_is_no_object_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"^{key}"):
        build({key: value})


def test_sources_that_cannot_be_read(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"train_batch_size": ')
    twice = tmp_path / "twice.json"
    twice.write_text('{"a": {"b": 1, "b": 2}}')
    array = tmp_path / "array.json"
    array.write_text("[1]")
    for source, words in [
        (str(tmp_path / "missing.json"), ["missing.json", "neither an existing file nor"]),
        (bad, ["bad.json"]),
        (twice, ["b: given twice", "1", "2"]),
        (base64.urlsafe_b64encode(b'{"b": 1, "b": 2}').decode(), ["b: given twice"]),
        (base64.urlsafe_b64encode(b"[1]").decode(), ["list"]),
        (array, ["list"]),
        (3, ["int"]),
        (None, ["NoneType"]),
    ]:
        with pytest.raises(DeepSpeedConfigError) as caught:
            DeepSpeedConfig(source, world_size=1)
        for word in words:
            assert word in str(caught.value)


def test_hjson_without_the_package_says_so(tmp_path, monkeypatch):
    path = tmp_path / "config.hjson"
    path.write_text("{train_batch_size: 8}")
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="install the hjson package"):
        DeepSpeedConfig(path, world_size=1)


def test_world_size_variable_is_checked(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 3}})


def test_reading_a_configuration_starts_nothing():
    """No process group, no CUDA context, and none of the heavy packages of callers."""
    code = (
        "import sys, torch, deepspeed.runtime.config, json\n"
        "deepspeed.runtime.config.DeepSpeedConfig({'train_batch_size': 4, 'zero_optimization': {'stage': 3}})\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
        "print(json.dumps([m for m in ('transformers', 'accelerate', 'tensorboard', 'wandb') if m in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "WORLD_SIZE": "2"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
