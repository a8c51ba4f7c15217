"""The settings of torchtitan that are not read: harmless, or refused with the reason.

Names by table, of 0.3 (`torchtitan/config/configs.py`, `trainer.py`), 0.1 and 0.2 (`config_manager.py`,
`config/job_config.py`), and of the TOML of 2024.
"""

from hexiopt.exports.settings import above_one, other_optimizers, unless
from hexiopt.ledger import Vocabulary, words

_OFFLOAD = "keeps states in CPU memory, which is not modelled; set it false"
_COLUMNS = "cuts each expert by columns, which is not modelled; take 1"
_LOSS = "every rank of a TP group then holds all scores of the vocabulary, where each is priced with its part; "
_ASYNC = "hides TP's collectives behind products, where they are priced as exposed; set it false"
_LEAVE = "import the layout without it"


_OPTIMIZER = other_optimizers("adam adamw default_adamw default_adam", "import with AdamW")

VOCABULARY = Vocabulary(
    # Of context parallelism, and of experts in 8 bits, are settings of what is refused: the degree, and the converter.
    harmless=words("""
        activation_checkpoint.debug activation_checkpoint.determinism_check
        activation_checkpoint.visualize_memory_budget_pareto checkpoint checkpoint.* comm.* dataloader dataloader.*
        debug.deterministic_warn_only debug.enable_structured_logging debug.print_config debug.save_config_file
        debug.seed debug.spmd_typechecking dump_folder hf_assets_path job.* logging.* lr_scheduler lr_scheduler.*
        memory_estimation.* metrics metrics.* model.hf_assets_path model.print_after_conversion model.tokenizer_path
        optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.fused optimizer.lr optimizer.weight_decay
        parallelism.context_parallel_load_balancer parallelism.context_parallel_ptrr_mask_key
        parallelism.context_parallel_rotate_method profiler profiler.* profiling.* quantize.grouped_mm.* tokenizer
        tokenizer.*
        training.dataloader.* training.dataset training.dataset_path
        training.disable_cuda_graphs training.gc_freq training.max_norm training.seed training.steps
        training.warmup_steps validation.* validator validator.*
    """),
    refused={
        "comm.mode": unless(("default", "torchcomms"), "does not train on the GPUs; take default"),
        "compile.enable_async_tensor_parallel": _ASYNC,
        "debug.detect_anomaly": f"slows every operator, which is not modelled; {_LEAVE}",
        "experimental.context_parallel_degree": above_one("context parallelism is not read here; take 1"),
        "experimental.enable_async_tensor_parallel": _ASYNC,
        "fault_tolerance.enable": f"trains replicas of the job beside it, which are not modelled; {_LEAVE}",
        "float8.enable_fsdp_float8_all_gather": "gathers weights in FP8, where 16 bits are priced; set it false",
        "float8.force_recompute_fp8_weight_in_bwd": "casts weights twice, which is not modelled; set it false",
        "optimizer": _OPTIMIZER,
        "optimizer.early_step_in_backward": "frees gradients within the backward, which is not modelled; set it false",
        "optimizer.implementation": unless(
            ("fused", "foreach", "default"), "is slower than what is priced; take fused"
        ),
        "optimizer.name": _OPTIMIZER,
        "parallelism.context_parallel_degree": above_one("context parallelism is not read here; take 1"),
        "parallelism.disable_loss_parallel": f"{_LOSS}set it false",
        "parallelism.enable_async_tensor_parallel": _ASYNC,
        "parallelism.enable_fsdp_symm_mem": "gathers by symmetric memory, whose speed is not modelled; set it false",
        "parallelism.expert_tensor_parallel_degree": above_one(_COLUMNS),
        "parallelism.pipeline_parallel_schedule_csv": f"is a schedule of its own, which is not modelled; {_LEAVE}",
        "experimental.pipeline_parallel_schedule_csv": f"is a schedule of its own, which is not modelled; {_LEAVE}",
        "experimental.pipeline_parallel_split_mode": unless(("manual",), "splits by tracing; take manual"),
        "quantize.linear.float8.enable_fsdp_float8_all_gather": "gathers weights in FP8, where 16 bits are priced; "
        "set it false",
        "training.fp8_linear": unless(("", "dynamic"), "is not read here; take dynamic, or leave it out"),
        "training.dtype": unless(
            ("float32",), "keeps weights and moments in 16 bits, where 32 are modelled; take float32"
        ),
        "training.enable_cpu_offload": _OFFLOAD,
        "training.enable_loss_parallel": unless((True,), f"{_LOSS}set it true"),
        "training.context_parallel_degree": above_one("context parallelism is not read here; take 1"),
    },
)
