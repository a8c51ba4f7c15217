"""The keys of DeepSpeed's JSON configuration that are not read: harmless, or refused with the reason.

Names are those of DeepSpeed 0.19 and earlier (`deepspeed/runtime/config.py`, `constants.py`, `zero/config.py`; older
ones as https://www.deepspeed.ai/docs/config-json lists them). What sets the size of buckets, prefetches or overlaps is
neither: it is named as not read.
"""

from hexiopt.exports.settings import OFFLOAD, other_optimizers, unless
from hexiopt.ledger import Reason, Vocabulary, words

_QUANTIZED = "sends quantised weights or gradients (ZeRO++), which is not modelled; set it false"
_GROUPS = "shards inside groups of ranks, which is not read here; import the layout without"
_STATES = "keeps master weights or moments in 16 bits, where 32 are modelled; set it false"
_LENGTH = "changes what a step computes from step to step, which is not modelled; import the layout without"


_ONE = (None, -1, 0, 1)  # degrees that say that nothing is divided; -1 is the default of some
ZERO_REFUSED: dict[str, Reason] = {
    "offload_optimizer.device": OFFLOAD,
    "offload_param.device": OFFLOAD,
    "cpu_offload": OFFLOAD,
    "cpu_offload_param": OFFLOAD,
    "cpu_offload_params": OFFLOAD,
    "zenflow*": "updates the optimizer beside training (ZenFlow), which is not modelled; leave it out",
    "zero_hpz_partition_size": unless(_ONE, _GROUPS),
    "mics_shard_size": unless(_ONE, _GROUPS),
    "mics_hierarchical_params_gather": _GROUPS,
    "zero_quantized_weights": _QUANTIZED,
    "zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_quantized_gradients": _QUANTIZED,
    "zeropp_loco_param*": _QUANTIZED,
}
# Keys of offload_optimizer and offload_param say more of offload, which their device states.
_ZERO_HARMLESS = words("""
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks gather_16bit_weights_on_model_save
    ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings offload_optimizer.*
    offload_param.* override_module_apply pipeline_loading_checkpoint round_robin_gradients
    save_muon_momentum_buffer_in_memory stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save
""")

VOCABULARY = Vocabulary(
    harmless=words("""
        activation_checkpointing.profile aio.* bf16.check_grad_overflow bf16.check_overflow
        bfloat16.check_grad_overflow checkpoint.* comet.* comms_logger.* csv_monitor.* data_types.buffer_dtype
        dataloader_drop_last disable_python_gc dump_state expert_parallel.expert_pattern
        expert_parallel.moe_layer_pattern expert_parallel.num_experts_attr expert_parallel.router_pattern
        expert_parallel.shared_experts_gate_pattern expert_parallel.shared_experts_pattern expert_parallel.top_k_attr
        expert_parallel.load_balance_coeff expert_parallel.expert_w1 expert_parallel.expert_w2 expert_parallel.expert_w3
        expert_parallel.has_shared_experts expert_parallel.num_expert_groups expert_parallel.num_limited_groups
        expert_parallel.preset_model expert_parallel.route_norm expert_parallel.route_scale
        expert_parallel.routed_scaling_factor expert_parallel.score_apply expert_parallel.score_func
        expert_parallel.validate_folding_routing flops_profiler.* fp16.auto_cast
        fp16.consecutive_hysteresis fp16.fused_mode fp16.hysteresis fp16.initial_scale_power fp16.loss_scale
        fp16.loss_scale_window fp16.min_loss_scale gradient_allreduce_op gradient_clipping gradient_predivide_factor
        hexiopt.notes hexiopt.target log_level memory_breakdown monitor_config.* nebula.* optimizer.legacy_fusion
        optimizer.params.* pipeline.seed_layers prescale_gradients scheduler.* seed steps_per_print tensorboard.*
        timers.* vocabulary_size wandb.* zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """)
    | {f"zero_optimization.{name}" for name in _ZERO_HARMLESS},
    refused={
        **{f"zero_optimization.{name}": reason for name, reason in ZERO_REFUSED.items()},
        "activation_checkpointing.cpu_checkpointing": OFFLOAD,
        "activation_checkpointing.partition_activations": "divides checkpoints over the TP group, which is not "
        "modelled; set it false",
        "amp.enabled": "trains by Apex's own rules of precision, which are not modelled; use bf16 or fp16",
        "autotuning.enabled": "searches batch and ZeRO stage itself; import the file that it wrote",
        "bf16.bf16_master_weights_and_grads": _STATES,
        "bf16.bf16_optimizer_states": _STATES,
        "bfloat16.bf16_master_weights_and_grads": _STATES,
        "compile.deepcompile": "lets a compiler move gathers (DeepCompile), which is not modelled; set it false",
        "compile.offload*": OFFLOAD,
        "compression_training*": "compresses the model during training, which is not modelled; leave it out",
        "curriculum_learning.enabled": _LENGTH,
        "data_efficiency.enabled": _LENGTH,
        "elasticity.enabled": "sets the batch to the GPUs that there are; write the batch that it takes",
        "expert_parallel.comm_backend": unless(("comm",), "sends tokens otherwise than is priced here; take comm"),
        "expert_parallel.expert_tensor_parallel_size": unless(
            _ONE, "cuts each expert by columns, which is not modelled; take 1"
        ),
        "expert_parallel.top_k": unless(("auto",), "is not the model's; set it in the model, and take auto"),
        "expert_parallel.use_grouped_mm": unless(
            (True,), "runs experts one by one, which is not modelled; set it true"
        ),
        "fp16.fp16_master_weights_and_grads": _STATES,
        "hybrid_engine.enabled": "generates between training steps, which is not modelled; import the training alone",
        "moe*": "experts of deepspeed.moe are not read; import a layout of AutoEP",
        "msamp.enabled": "keeps states in FP8 (MS-AMP), which is not modelled; import the layout without",
        "optimizer.type": other_optimizers("adam adamw fusedadam torch_adam auto", "import with Adam or AdamW"),
        "progressive_layer_drop.enabled": _LENGTH,
        "quantize_training.enabled": "quantises weights during training, which is not modelled; leave it out",
        "sequence_parallel_size": unless(
            _ONE, "Ulysses' sequence parallelism is not read here; import a layout without"
        ),
        "sparse_attention*": "computes attention sparsely, which is not modelled; leave it out",
        "sparse_gradients": "sends embeddings' gradients sparsely, which is not modelled; set it false",
        "tensor_parallel.tp_overlap_comm": "hides TP's collectives, which are priced as exposed; set it false",
        "torch_autocast.enabled": "keeps FP32 weights and computes in another precision, which is not read here; use "
        "bf16 or fp16",
        "use_data_before_expert_parallelism": "parts EP groups otherwise than by consecutive ranks; set it false",
        "weight_quantization*": "quantises weights, which is not modelled; leave it out",
    },
)
