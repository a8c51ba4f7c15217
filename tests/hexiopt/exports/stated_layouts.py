"""Layouts as people write them down, in every format that is read: the facts of public examples, written anew.

Sources, by format: torchtitan's train configurations of 2024 to 2026 (github.com/pytorch/torchtitan), DeepSpeed's and
transformers' documented examples (deepspeed.ai/docs/config-json, huggingface.co/docs/transformers/deepspeed), what
`accelerate config` writes, Galvatron's and FlashFlex's own files, Megatron-LM's and FlagScale's example scripts, and
recipes of Megatron-Bridge as overrides.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.exports.trainers.torchtitan_models import MODELS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from tests.hexiopt.exports.random_expert_plans import EXPERT_PLANS
from tests.hexiopt.exports.random_mixtures import grid_of_cells, hybrid, mixture
from tests.hexiopt.exports.random_plans import LLAMA_7B, Drawn, draw_case
from tests.hexiopt.exports.torchtitan_texts import EXPERT_PYTHON, EXPERT_TOML, PYTHON, TOML
from tests.hexiopt.shapes_of_kinds import model_of


@dataclass(frozen=True)
class StatedLayout:
    """A file of `trainer` for `num_gpus` GPUs in machines of eight, or for the `devices` of a `cluster` in the order of
    ranks; `kind` is how its keys are written."""

    name: str
    trainer: str
    kind: str
    text: str
    num_gpus: int = 8
    model: ModelSpec | None = LLAMA_7B
    cluster: Cluster | None = None
    devices: tuple[int, ...] = ()


DEEPSEEK_16B = model_of(*MODELS[1].layers, hidden_size=2048, vocab_size=102400)
LLAMA_70B = LLAMA_7B.replace(
    name="llama-70b", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_size=28672
)

_EXPERT_JSON = """{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2,
      "train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": true,
      "autoep_size": 4, "preset_model": "deepseek_v3", "expert_tensor_parallel_size": 1}}"""
_EXPERT_YAML = """
        # DistributedConfig(tp_size=2, fsdp_size=2, dp_replicate_size=2, ep_size=4, fsdp_mixed_precision=True)
        # per_device_train_batch_size=2 gradient_accumulation_steps=4 gradient_checkpointing=True
        compute_environment: LOCAL_MACHINE
        distributed_type: MULTI_GPU
        mixed_precision: bf16
        num_processes: 8
        """

_DEEPSPEED = {
    "ZeRO-1": """{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10,
      "gradient_accumulation_steps": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true},
      "zero_optimization": {"stage": 1, "overlap_comm": true, "reduce_bucket_size": 5e8},
      "wall_clock_breakdown": false}""",
    "ZeRO-2 of transformers": """{"fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000,
      "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
      "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
      "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8,
      "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true},
      "gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 4}""",
    "ZeRO-3": """{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "overlap_comm": true,
      "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": 16777216,
      "stage3_prefetch_bucket_size": 15099494, "stage3_param_persistence_threshold": 40960,
      "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
      "stage3_gather_16bit_weights_on_model_save": true}, "train_batch_size": 64,
      "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}""",
    "offload off": """{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "none", "pin_memory": true}, "offload_param": {"device": "none"}},
      "train_batch_size": 32, "gradient_accumulation_steps": 4}""",
    "AutoTP": """{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": true},
      "tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 1}}""",
    "plain": """{"train_micro_batch_size_per_gpu": 8}""",
    "wide gradients": """{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,
      "bf16": {"enabled": true}, "fp16": {"enabled": false}, "data_types": {"grad_accum_dtype": "fp32"},
      "communication_data_type": "fp32", "zero_optimization": {"stage": 1}, "wandb": {"enabled": true, "project": "x"},
      "zero_allow_untested_optimizer": true, "flops_profiler": {"enabled": false, "profile_step": 1}}""",
    "deprecated": """{"train_batch_size": 16, "bf16": {"enabled": true}, "zero_optimization": true,
      "activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false,
      "number_checkpoints": null, "profile": false}}""",
}

_ACCELERATE = {
    "FSDP 1": """
        compute_environment: LOCAL_MACHINE
        debug: false
        distributed_type: FSDP
        downcast_bf16: 'no'
        enable_cpu_affinity: false
        fsdp_config:
          fsdp_activation_checkpointing: true
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_backward_prefetch: BACKWARD_PRE
          fsdp_cpu_ram_efficient_loading: true
          fsdp_forward_prefetch: false
          fsdp_offload_params: false
          fsdp_sharding_strategy: FULL_SHARD
          fsdp_state_dict_type: SHARDED_STATE_DICT
          fsdp_sync_module_states: true
          fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
          fsdp_use_orig_params: true
        machine_rank: 0
        main_training_function: main
        mixed_precision: bf16
        num_machines: 1
        num_processes: 8
        rdzv_backend: static
        same_network: true
        tpu_env: []
        tpu_use_cluster: false
        tpu_use_sudo: false
        use_cpu: false
        """,
    "FSDP 1 by number": """
        distributed_type: FSDP
        fsdp_config: {fsdp_sharding_strategy: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
        mixed_precision: fp16
        num_processes: 8
        """,
    "hybrid": """
        distributed_type: FSDP
        fsdp_config: {sharding_strategy: HYBRID_SHARD, auto_wrap_policy: TRANSFORMER_BASED_WRAP}
        mixed_precision: bf16
        num_processes: 16
        num_machines: 2
        main_process_ip: 10.0.0.1
        main_process_port: 29500
        """,
    "FSDP 2": """
        # per_device_train_batch_size=2 gradient_accumulation_steps=4
        compute_environment: LOCAL_MACHINE
        distributed_type: FSDP
        fsdp_config:
          fsdp_version: 2
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_reshard_after_forward: true
          fsdp_activation_checkpointing: false
          fsdp_state_dict_type: SHARDED_STATE_DICT
        mixed_precision: bf16
        num_machines: 1
        num_processes: 8
        parallelism_config:
          parallelism_config_dp_replicate_size: 2
          parallelism_config_dp_shard_size: 2
          parallelism_config_tp_size: 2
          parallelism_config_cp_size: 1
        """,
    "DDP": """
        compute_environment: LOCAL_MACHINE
        distributed_type: MULTI_GPU
        gpu_ids: all
        machine_rank: 0
        mixed_precision: bf16
        num_machines: 1
        num_processes: 8
        dynamo_config: {dynamo_backend: INDUCTOR}
        """,
    "one GPU": "distributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 1\n",
    "DeepSpeed": """
        distributed_type: DEEPSPEED
        deepspeed_config:
          gradient_accumulation_steps: 8
          gradient_clipping: 1.0
          offload_optimizer_device: none
          offload_param_device: none
          zero3_init_flag: true
          zero3_save_16bit_model: true
          zero_stage: 3
        mixed_precision: bf16
        num_processes: 8
        """,
    "Megatron-LM": """
        distributed_type: MEGATRON_LM
        megatron_lm_config:
          megatron_lm_gradient_clipping: 1.0
          megatron_lm_num_micro_batches: 4
          megatron_lm_pp_degree: 2
          megatron_lm_recompute_activations: true
          megatron_lm_sequence_parallelism: true
          megatron_lm_tp_degree: 2
          megatron_lm_use_distributed_optimizer: true
        mixed_precision: bf16
        num_processes: 8
        """,
    "fp8": """
        distributed_type: FSDP
        fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_sharding_strategy: NO_SHARD}
        mixed_precision: fp8
        fp8_config: {backend: TE, fp8_format: HYBRID, amax_history_length: 32, amax_compute_algorithm: max}
        num_processes: 8
        """,
}

_GALVATRON = {
    "two stages": """{"pp_deg": 2, "tp_sizes_enc": "TWOS", "tp_consecutive_flags": "ONES", "cp_sizes_enc": "ONES",
      "dp_types_enc": "ZEROS", "use_sp": "ZEROS", "checkpoint": "ZEROS", "global_bsz": 32, "chunks": 4,
      "pp_division": "16,16", "pipeline_type": "pipedream_flush", "default_dp_type": "zero2", "vtp": 2, "vsp": 0}""",
    "sharded": """{"pp_deg": 1, "tp_sizes_enc": "ONES", "tp_consecutive_flags": "ONES", "dp_types_enc": "ONES",
      "checkpoint": "ONES", "global_bsz": 16, "chunks": 1, "pp_division": "32", "default_dp_type": "ddp",
      "embed_sdp": 0}""",
}

_FLASHFLEX = {
    "two pipelines": """{"hetero_configs": [[2, 1], [1, 4]], "layer_partitions": [[20, 12], [10, 22]],
      "devices_id": [[[0, 0], [0]], [[0], [0, 0, 0, 0]]]}""",
    "with its arguments": """{"hetero_configs": [[4, 4]], "layer_partitions": [[16, 16]],
      "hexiopt": {"chunks": [4], "global_bsz_size": [8], "pipeline_type": "1F1B", "recompute": "none"}}""",
}

_MEGATRON_MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 32003 --make-vocab-size-divisible-by 64 "
)
_MEGATRON = {
    "TP and PP": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --bf16 "
    "--micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --lr 3e-4 --train-iters 1000",
    "interleaved": "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --bf16 --micro-batch-size 2 "
    "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 64 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --use-distributed-optimizer --overlap-grad-reduce",
    "a layout": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --fp16 "
    "--pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L' --micro-batch-size 1 --global-batch-size 32 "
    "--recompute-activations --log-interval 10 --save-interval 500",
    "uneven ends": "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 "
    "--decoder-last-pipeline-num-layers 7 --bf16 --micro-batch-size 1 --global-batch-size 32 "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "without sequence parallelism": "--tensor-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 16 --bf16 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1 --clip-grad 1.0 --eval-iters 10",
    "data parallelism": "--micro-batch-size 2 --global-batch-size 64 --bf16 --use-distributed-optimizer "
    "--overlap-param-gather --overlap-grad-reduce --distributed-backend nccl --seed 1234",
}

_BRIDGE = {
    "TP and PP": """
        model.tensor_model_parallel_size=2
        model.pipeline_model_parallel_size=2
        model.sequence_parallel=true
        model.bf16=true
        model.seq_length=4096
        train.micro_batch_size=1
        train.global_batch_size=64
        train.train_iters=100
        ddp.use_distributed_optimizer=true
        ddp.overlap_grad_reduce=true
        optimizer.lr=0.0003
        """,
    "interleaved": """
        model.tensor_model_parallel_size=1
        model.pipeline_model_parallel_size=4
        model.virtual_pipeline_model_parallel_size=2
        model.recompute_granularity=full
        model.recompute_method=uniform
        model.recompute_num_layers=1
        model.bf16=true
        train.micro_batch_size=1
        train.global_batch_size=64
        """,
}

_FLAGSCALE = {
    "two meshes": """
        system:
          tensor_model_parallel_size: 2
          pipeline_model_parallel_size: 2
          sequence_parallel: true
          use_distributed_optimizer: true
          bf16: true
          hetero:
            enable_hetero: true
            hetero_process_meshes: [2, 1, 1, 2, 1, 4, 1, 1, 1, 1]
            hetero_pipeline_layer_split: [20, 12]
            hetero_device_types: [gpu, gpu]
            hetero_current_device_type: gpu
        model:
          num_layers: 32
          hidden_size: 4096
          num_attention_heads: 32
          ffn_hidden_size: 11008
          swiglu: true
          normalization: RMSNorm
          position_embedding_type: rope
          disable_bias_linear: true
          untie_embeddings_and_output_weights: true
          vocab_size: 32003
          seq_length: 4096
          max_position_embeddings: 4096
          micro_batch_size: 1
          global_batch_size: 32
          lr: 0.0003
        """,
}


def _dedent(text: str) -> str:
    lines = text.strip("\n").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines) + "\n"


def _galvatron(text: str) -> str:
    for word, digit in (("ONES", "1"), ("TWOS", "2"), ("ZEROS", "0")):
        text = text.replace(word, ",".join([digit] * 32))
    return text


def stated_layouts() -> list[StatedLayout]:
    """All layouts that people state."""
    return [
        *(
            StatedLayout(name, "torchtitan", "toml", _dedent(text), gpus, LLAMA_70B if "70B" in name else LLAMA_7B)
            for name, (gpus, text) in TOML.items()
        ),
        *(StatedLayout(name, "torchtitan", "python", text) for name, text in PYTHON.items()),
        *(StatedLayout(name, "deepspeed", "json", text) for name, text in _DEEPSPEED.items()),
        *(
            StatedLayout(name, "accelerate", "yaml", _dedent(text), {"hybrid": 16, "one GPU": 1}.get(name, 8))
            for name, text in _ACCELERATE.items()
        ),
        *(StatedLayout(name, "galvatron", "json", _galvatron(text)) for name, text in _GALVATRON.items()),
        *(StatedLayout(name, "flashflex", "json", text) for name, text in _FLASHFLEX.items()),
        *(
            StatedLayout(name, "megatron", "shell", f"torchrun pretrain_gpt.py {_MEGATRON_MODEL}{text}\n", model=None)
            for name, text in _MEGATRON.items()
        ),
        *(StatedLayout(name, "megatron_bridge", "lines", _dedent(text)) for name, text in _BRIDGE.items()),
        *(StatedLayout(name, "flagscale", "yaml", _dedent(text), model=None) for name, text in _FLAGSCALE.items()),
        StatedLayout("EP", "torchtitan", "toml", _dedent(EXPERT_TOML), 16, DEEPSEEK_16B),
        StatedLayout("EP in Python", "torchtitan", "python", EXPERT_PYTHON, 8, DEEPSEEK_16B),
        StatedLayout("AutoEP", "deepspeed", "json", _EXPERT_JSON, 8, DEEPSEEK_16B),
        StatedLayout("EP", "accelerate", "yaml", _dedent(_EXPERT_YAML), 8, DEEPSEEK_16B),
    ]


_KINDS = {
    "torchtitan": "python",
    "deepspeed": "json",
    "galvatron": "json",
    "flashflex": "json",
    "accelerate": "yaml",
    "flagscale": "yaml",
    "megatron": "shell",
    "megatron_bridge": "lines",
}


Draws = list[tuple[str, str, Callable[[random.Random], Drawn]]]  # a name, the trainer, and what draws a plan for it


def exported_layouts(seeds: range) -> list[StatedLayout]:
    """The files that every exporter writes for random plans."""
    draws: Draws = [(trainer, trainer, partial(draw_case, trainer)) for trainer in _KINDS]
    return _export(draws + [(f"{trainer} experts", trainer, draw) for trainer, draw in EXPERT_PLANS.items()], seeds)


def exported_mixtures(seeds: range) -> list[StatedLayout]:
    """Scripts of Megatron-LM for random models of several kinds of layers, and of blocks."""
    layers, blocks = lambda rng: grid_of_cells(rng, mixture(rng)), lambda rng: grid_of_cells(rng, hybrid(rng))
    return _export([("layers", "megatron", layers), ("blocks", "megatron", blocks)], seeds)


def _export(draws: Draws, seeds: range) -> list[StatedLayout]:
    layouts = []
    for name, trainer, draw in draws:
        kind = _KINDS[trainer]
        for seed in seeds:
            problem, plan = draw(random.Random(f"stated {name} {seed}"))
            program = TRAINERS[trainer].write(problem, plan)
            text = next(iter(program.files.values()))
            model = None if trainer in ("megatron", "flagscale") else problem.model
            where = problem.cluster, program.devices
            layouts.append(StatedLayout(f"exported {seed}", trainer, kind, text, len(where[1]), model, *where))
    return layouts
