# SPDX-License-Identifier: Apache-2.0
"""The public names are frozen: one that vanishes breaks users, one that appears is a promise and belongs in this
list."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

FROZEN = {
    "deepspeed": """
        DeepSpeedConfig DeepSpeedConfigError DeepSpeedEngine DeepSpeedOptimizer OnDevice __version__ accelerator
        add_config_arguments checkpoint checkpointing comm dist elasticity errors get_accelerator git_version_info
        init_distributed initialize launcher log_dist logger module_inject monitor ops profiling runtime tp_model_init
        utils version zero
    """,
    "deepspeed.zero": """
        DeepSpeedZeRoOffload GatheredParameters Init TiledLinear TiledLinearReturnBias ZeroParamStatus ZeroParamType
        register_external_parameter unregister_external_parameter unwrap_model_for_generation
    """,
    "deepspeed.utils": """
        LoggerFactory RepeatingLoader get_z3_leaf_modules groups is_initialized log_dist logger print_dist
        safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
        safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
        safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_module set_z3_leaf_modules
        set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules warning_once
        z3_leaf_module z3_leaf_parameter
    """,
    "deepspeed.comm": """
        ProcessGroup ReduceOp TORCH_DISTRIBUTED_DEFAULT_PORT all_gather all_gather_coalesced all_gather_into_tensor
        all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier broadcast
        broadcast_object_list comms_logger configure destroy_process_group gather get_all_ranks_from_group
        get_global_rank get_local_rank get_rank get_world_group get_world_size inference_all_reduce init_distributed
        irecv is_available is_initialized isend log_summary monitored_barrier mpi_discovery new_group recv reduce
        reduce_scatter reduce_scatter_tensor scatter send
    """,
}

# Paths that clients import from, beyond the four modules above.
ELSEWHERE = {
    "deepspeed.checkpoint.constants": (
        "BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT "
        "PARAM_SHAPES PARTITION_COUNT SINGLE_PARTITION_OF_FP32_GROUPS ZERO_STAGE"
    ),
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.elasticity": "compute_elastic_config",
    "deepspeed.git_version_info": "version torch_info installed_ops accelerator_name",
    "deepspeed.launcher.runner": (
        "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE EXPORT_ENVS fetch_hostfile main parse_inclusion_exclusion"
    ),
    "deepspeed.module_inject.layers": "GatherReplacedLayerParams",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.aio": "AsyncIOBuilder",
    "deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.profiling.flops_profiler": "get_model_profile",
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        "configure checkpoint is_configured reset get_cuda_rng_tracker model_parallel_cuda_manual_seed"
    ),
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer",
    "deepspeed.runtime.config": "DeepSpeedConfig",
    "deepspeed.runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.lr_schedules": ("LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR"),
    "deepspeed.runtime.utils": "move_to_device see_memory_usage set_random_seed",
    "deepspeed.runtime.zero": "GatheredParameters Init",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "deepspeed.runtime.zero.partition_parameters": (
        "GatheredParameters Init ZeroParamStatus get_accelerator register_external_parameter "
        "unregister_external_parameter zero_wrapper_for_fp_tensor_constructor _orig_torch_arange"
    ),
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.utils.logging": "log_dist logger print_dist",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer ThroughputTimer",
    "deepspeed.utils.zero_to_fp32": (
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint get_model_state_file "
        "get_optim_files load_state_dict_from_zero_checkpoint"
    ),
}

INITIALIZE = (
    "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
    "collate_fn config mesh_param config_params"
)


@pytest.mark.parametrize("module", FROZEN)
def test_public_names(module: str) -> None:
    found = importlib.import_module(module) if module != "deepspeed.zero" else importlib.import_module("deepspeed").zero
    expected = set(FROZEN[module].split())
    assert set(found.__all__) == expected
    missing = [name for name in expected if not hasattr(found, name)]
    assert missing == []


@pytest.mark.parametrize("module", ELSEWHERE)
def test_paths_that_clients_import(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in ELSEWHERE[module].split() if not hasattr(found, name)] == []


def test_one_class_under_both_paths() -> None:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    assert deepspeed.DeepSpeedEngine is DeepSpeedEngine
    assert deepspeed.zero.Init is Init and deepspeed.zero.GatheredParameters is GatheredParameters


def test_initialize_keeps_its_order() -> None:
    import deepspeed

    assert list(inspect.signature(deepspeed.initialize).parameters) == INITIALIZE.split()


def test_what_is_not_built_says_so_when_it_is_used() -> None:
    import deepspeed

    with pytest.raises(NotImplementedError, match="deepspeed.tp_model_init: tensor parallelism is not part of this"):
        deepspeed.tp_model_init(model=None, tp_size=2)
    weight = torch.nn.Parameter(torch.ones(2))
    with deepspeed.module_inject.layers.GatherReplacedLayerParams([weight], torch.nn.Module(), enabled=True):
        assert torch.equal(weight, torch.ones(2))


def test_initialised_means_that_comm_is() -> None:
    import deepspeed

    assert deepspeed.utils.is_initialized is deepspeed.comm.is_initialized
