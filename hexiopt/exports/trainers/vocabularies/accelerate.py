"""The keys of Accelerate's configuration that are not read: harmless, or refused with the reason.

Names are those of Accelerate 1.15 and earlier (`accelerate/commands/config/config_args.py`, `commands/launch.py`,
`utils/dataclasses.py`). At the top level Accelerate itself refuses others.
"""

from hexiopt.exports.settings import OFFLOAD, above_one, unless
from hexiopt.ledger import Vocabulary, words

_GATHERS = "gathers weights in FP8, where 16 bits are priced; set it false"
_ARGUMENTS = "is not read here; import the arguments of Megatron-LM, with format=megatron"
_TOKENS = "divides the tokens of a sequence over GPUs, which is not read here; take 1"
_PLAN = unless((None,), "shards otherwise than the model says; leave it out")


TOP = words("""
    command_file commands compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_config
    enable_cpu_affinity fp16 fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port
    main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes
    parallelism_config rdzv_backend same_network use_cpu
""")
"""Keys of the top level that are not of TPUs."""

VOCABULARY = Vocabulary(
    # The paths on NVMe are of offload, which is refused; downcast_bf16 is of TPUs.
    harmless=words("""
        DistributedConfig.enable_sequence_parallel command_file commands debug deepspeed_config.deepspeed_hostfile
        deepspeed_config.deepspeed_moe_layer_cls_names deepspeed_config.deepspeed_multinode_launcher
        deepspeed_config.gradient_clipping
        deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path
        deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model downcast_bf16 enable_cpu_affinity
        fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_state_dict_type
        fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_transformer_layer_cls_to_wrap
        fsdp_config.fsdp_use_orig_params fp8_config.fp8_use_autocast_during_eval fp8_config.use_autocast_during_eval
        machine_rank main_process_ip main_process_port main_training_function
        megatron_lm_config.megatron_lm_gradient_clipping megatron_lm_config.megatron_lm_no_load_optim
        megatron_lm_config.megatron_lm_no_save_optim mpirun_config.* num_machines rdzv_backend same_network tpu_*
    """),
    refused={
        "DistributedConfig.ep_implementation": unless(
            ("auto", "all_to_all"), "brings experts their tokens otherwise than is priced; take all_to_all"
        ),
        "DistributedConfig.ep_plan": _PLAN,
        "DistributedConfig.fsdp_cpu_offload": OFFLOAD,
        "DistributedConfig.fsdp_plan": _PLAN,
        "DistributedConfig.pp_size": above_one("makes pipelines, which train in no Trainer; take 1"),
        "DistributedConfig.tp_plan": unless((None, "auto"), "shards otherwise than the model says; leave it out"),
        "compute_environment": unless(("LOCAL_MACHINE",), "is not read; take LOCAL_MACHINE"),
        "deepspeed_config.deepspeed_config_file": "has the settings; import that file, with format=deepspeed",
        "deepspeed_config.offload_optimizer_device": OFFLOAD,
        "deepspeed_config.offload_param_device": OFFLOAD,
        "fsdp_config.fsdp_activation_checkpointing_offload": OFFLOAD,
        "fsdp_config.fsdp_offload_params": OFFLOAD,
        "fp8_config.enable_fsdp_float8_all_gather": _GATHERS,
        "fp8_config.fp8_enable_fsdp_float8_all_gather": _GATHERS,
        "gpu_ids": unless(
            (None, "all"),
            "names GPUs of every machine; give the cluster of these, or ranks=ranks.tsv, and take the key out",
        ),
        "megatron_lm_config.megatron_lm_context_parallel_size": above_one(_TOKENS),
        "megatron_lm_config.megatron_lm_decoder_last_pipeline_num_layers": _ARGUMENTS,
        "megatron_lm_config.megatron_lm_expert*": above_one(_ARGUMENTS),
        "megatron_lm_config.megatron_lm_optimizer_cpu_offload": OFFLOAD,
        "megatron_lm_config.megatron_lm_overlap_cpu_optimizer_d2h_h2d": OFFLOAD,
        "megatron_lm_config.megatron_lm_recompute_granularity": _ARGUMENTS,
        "megatron_lm_config.megatron_lm_use_custom_fsdp": _ARGUMENTS,
        "megatron_lm_config.megatron_lm_use_precision_aware_optimizer": "may keep moments in fewer bits, which is not "
        "modelled; set it false",
        "parallelism_config.parallelism_config_cp_size": above_one(_TOKENS),
        "parallelism_config.parallelism_config_sp_size": above_one(_TOKENS),
        "tpu_use_cluster": "trains on TPUs, which are not modelled; import a layout of GPUs",
        "use_cpu": "trains on CPUs, which are not modelled; set it false",
    },
)
