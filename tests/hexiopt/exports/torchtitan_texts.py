"""Layouts as people write them down for torchtitan (`stated_layouts.py`): its TOML of three years, its Python since."""

EXPERT_TOML = """
        [job]
        description = "DeepSeek-V3 16B model training"
        [model]
        name = "deepseek_v3"
        flavor = "16B"
        hf_assets_path = "./assets/hf/deepseek-moe-16b-base"
        [optimizer]
        name = "AdamW"
        lr = 2.2e-4
        [training]
        local_batch_size = 4
        seq_len = 4096
        max_norm = 1.0
        steps = 1000
        dataset = "c4"
        [parallelism]
        data_parallel_replicate_degree = 1
        data_parallel_shard_degree = -1
        fsdp_reshard_after_forward = "default"
        tensor_parallel_degree = 1
        enable_async_tensor_parallel = false
        pipeline_parallel_degree = 1
        pipeline_parallel_schedule = "Interleaved1F1B"
        expert_parallel_degree = 8
        expert_tensor_parallel_degree = 1
        [activation_checkpoint]
        mode = "full"
        [compile]
        enable = true
        components = ["loss"]
        [quantize.linear.float8]
        enable_fsdp_float8_all_gather = false
        [quantize.grouped_mm.float8]
        fqns = ["experts"]
        """
EXPERT_PYTHON = """
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b


def experts():
    config = deepseek_v3_16b()
    config.training.local_batch_size = 2
    config.training.seq_len = 8192
    config.debug.moe_force_load_balance = True
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.expert_parallel_degree = 4
    config.activation_checkpoint = None
    return config
"""

TOML = {
    "spring of 2024": (
        8,
        """
        [job]
        dump_folder = "./outputs"
        description = "Llama 2 7B training"
        [profiling]
        enable_profiling = true
        profile_freq = 100
        [metrics]
        log_freq = 10
        enable_tensorboard = true
        [model]
        name = "llama2"
        flavor = "7B"
        norm_type = "rmsnorm"
        tokenizer_path = "./tokenizer.model"
        [optimizer]
        name = "AdamW"
        lr = 3e-4
        [training]
        batch_size = 8
        seq_len = 2048
        warmup_steps = 200
        max_norm = 1.0
        steps = 1000
        data_parallel_degree = -1
        tensor_parallel_degree = 1
        fp8_linear = ""
        compile = false
        dataset = "c4"
        [experimental]
        pipeline_parallel_degree = 1
        [checkpoint]
        enable_checkpoint = false
        folder = "checkpoint"
        [activation_checkpoint]
        mode = "full"
        """,
    ),
    "2024 with a pipeline": (
        8,
        """
        [model]
        name = "llama3"
        flavor = "8B"
        [training]
        batch_size = 8
        seq_len = 8192
        tensor_parallel_degree = 2
        data_parallel_degree = 2
        enable_loss_parallel = true
        mixed_precision_param = "bfloat16"
        mixed_precision_reduce = "float32"
        [experimental]
        pipeline_parallel_degree = 2
        pipeline_parallel_split_points = ["layers.18"]
        pipeline_parallel_schedule = "1f1b"
        pipeline_parallel_split_mode = "manual"
        pipeline_parallel_microbatches = 4
        [activation_checkpoint]
        mode = "selective"
        selective_ac_option = "2"
        """,
    ),
    "autumn of 2024, float8": (
        16,
        """
        [job]
        description = "Llama 3 8B training"
        [model]
        name = "llama3"
        flavor = "8B"
        [optimizer]
        name = "AdamW"
        lr = 3e-4
        fused = true
        [training]
        batch_size = 1
        seq_len = 8192
        data_parallel_replicate_degree = 1
        data_parallel_shard_degree = -1
        tensor_parallel_degree = 1
        compile = true
        gc_freq = 50
        [experimental]
        context_parallel_degree = 1
        pipeline_parallel_degree = 1
        enable_async_tensor_parallel = false
        [activation_checkpoint]
        mode = "none"
        [float8]
        enable_float8_linear = true
        enable_fsdp_float8_all_gather = false
        precompute_float8_dynamic_scale_for_fsdp = false
        """,
    ),
    "0.1": (
        8,
        """
        [job]
        dump_folder = "./outputs"
        print_args = false
        [model]
        name = "llama3"
        flavor = "8B"
        converters = []
        [optimizer]
        name = "AdamW"
        lr = 3e-4
        eps = 1e-8
        implementation = "fused"
        [lr_scheduler]
        warmup_steps = 200
        [training]
        local_batch_size = 1
        seq_len = 8192
        max_norm = 1.0
        steps = 1000
        compile = false
        dataset = "c4"
        [parallelism]
        data_parallel_replicate_degree = 1
        data_parallel_shard_degree = 8
        tensor_parallel_degree = 1
        pipeline_parallel_degree = 1
        context_parallel_degree = 1
        fsdp_reshard_after_forward = "always"
        enable_async_tensor_parallel = false
        [checkpoint]
        interval = 500
        async_mode = "disabled"
        [activation_checkpoint]
        mode = "selective"
        selective_ac_option = "4"
        [comm]
        init_timeout_seconds = 300
        """,
    ),
    "0.2, 70B with TP": (
        32,
        """
        [model]
        name = "llama3"
        flavor = "70B"
        hf_assets_path = "./assets/hf/Llama-3.1-70B"
        [training]
        local_batch_size = 8
        global_batch_size = 64
        seq_len = 8192
        dtype = "float32"
        [parallelism]
        data_parallel_replicate_degree = 1
        data_parallel_shard_degree = -1
        tensor_parallel_degree = 8
        fsdp_reshard_after_forward = "default"
        disable_loss_parallel = false
        [activation_checkpoint]
        mode = "full"
        early_stop = false
        [compile]
        enable = true
        components = ["model", "loss"]
        [quantize.linear.float8]
        enable_fsdp_float8_all_gather = false
        filter_fqns = ["output"]
        [debug]
        seed = 42
        [validation]
        enable = false
        """,
    ),
    "0.2, a pipeline with fewer layers at its ends": (
        8,
        """
        [training]
        local_batch_size = 8
        seq_len = 4096
        [parallelism]
        data_parallel_shard_degree = 2
        pipeline_parallel_degree = 4
        pipeline_parallel_first_stage_less_layers = 1
        pipeline_parallel_last_stage_less_layers = 2
        pipeline_parallel_schedule = "1F1B"
        pipeline_parallel_microbatch_size = 2
        [activation_checkpoint]
        mode = "none"
        """,
    ),
    "0.2, layers a stage": (
        4,
        """
        [training]
        local_batch_size = 16
        seq_len = 4096
        [parallelism]
        data_parallel_shard_degree = 1
        data_parallel_replicate_degree = 1
        pipeline_parallel_degree = 4
        pipeline_parallel_layers_per_stage = 5
        pipeline_parallel_first_stage_less_layers = 4
        pipeline_parallel_last_stage_less_layers = 4
        pipeline_parallel_schedule = "Interleaved1F1B"
        pipeline_parallel_microbatch_size = 1
        [activation_checkpoint]
        mode = "full"
        """,
    ),
    "hybrid sharding": (
        16,
        """
        [model]
        name = "llama3"
        flavor = "8B"
        [training]
        local_batch_size = 2
        seq_len = 8192
        [parallelism]
        data_parallel_replicate_degree = 2
        data_parallel_shard_degree = 8
        [activation_checkpoint]
        mode = "full"
        [memory_estimation]
        enable = false
        [fault_tolerance]
        enable = false
        group_size = 0
        """,
    ),
    "replicated": (
        8,
        """
        [training]
        local_batch_size = 4
        seq_len = 2048
        mixed_precision_param = "bfloat16"
        [parallelism]
        data_parallel_replicate_degree = 8
        data_parallel_shard_degree = 1
        [activation_checkpoint]
        mode = "none"
        """,
    ),
    "replicated, of 2024": (
        8,
        """
        [training]
        batch_size = 4
        seq_len = 2048
        data_parallel_degree = 8
        data_parallel_type = "ddp"
        [activation_checkpoint]
        mode = "full"
        """,
    ),
    "mx": (
        8,
        """
        [model]
        name = "llama3"
        flavor = "8B"
        converters = ["quantize.linear.mx"]
        [training]
        local_batch_size = 2
        seq_len = 8192
        [parallelism]
        data_parallel_shard_degree = -1
        [quantize.linear.mx]
        recipe_name = "mxfp8_cublas"
        [activation_checkpoint]
        mode = "full"
        """,
    ),
}

PYTHON = {
    "in assignments": """
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3.config_registry import llama3_8b


def ours():
    config = llama3_8b()
    config.training.local_batch_size = 4
    config.training.seq_len = 4096
    config.training.mixed_precision_param = "bfloat16"
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "GPipe"
    config.parallelism.pipeline_parallel_microbatch_size = 2
    config.parallelism.fsdp_reshard_after_forward = "never"
    config.parallelism.enable_sequence_parallel = True
    config.activation_checkpoint = FullAC.Config()
    config.checkpoint.interval = 500
    config.compile.enable = True
    return config
""",
    "as a constructor": """
from torchtitan.components.optimizer import default_adamw


def llama3_8b():
    spec = model_registry("8B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=None,
        compile=CompileConfig(enable=True, components=["model"]),
    )
""",
}
