"""Layouts with experts as people write them down: the facts of public files, written anew.

MODEL_ARGS of Megatron-LM's tests (`tests/functional_tests/test_cases` of github.com/NVIDIA/Megatron-LM d98e8a6), an
example of Primus (`examples/megatron/configs/MI300X` of github.com/AMD-AGI/Primus fd1eeab), FlagScale's
`examples/deepseek_v3/conf/train/hetero.yaml` (github.com/flagos-ai/FlagScale 16a2dd5), a recipe of Megatron-Bridge
(github.com/NVIDIA-NeMo/Megatron-Bridge 067f987), and the layout of DeepSeek-V3 on 1,024 H100
(`best_practice/deepseek-v3/run_deepseek_v3_h100.sh` of github.com/yanring/Megatron-MoE-ModelZoo e865051).
"""

import re
from pathlib import Path

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import read_layout
from hexiopt.exports.formats import ImportedPlan
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.shipped import read_shipped
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section

MIXTRAL = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --tensor-model-parallel-size: {tp}
  --pipeline-model-parallel-size: 4
  --num-layers-per-virtual-pipeline-stage: 1
  --expert-model-parallel-size: {ep}
  {etp}
  --use-distributed-optimizer: true
  --overlap-grad-reduce: false
  --sequence-parallel: true
  --disable-bias-linear: true
  --micro-batch-size: 1
  --global-batch-size: 256
  --data-path: ${{DATA_BLEND}}
  --untie-embeddings-and-output-weights: true
  --position-embedding-type: rope
  --normalization: RMSNorm
  --swiglu: true
  --num-layers: 32
  --hidden-size: 4096
  --ffn-hidden-size: 14336
  --num-attention-heads: 32
  --group-query-attention: true
  --num-query-groups: 8
  --seq-length: 4096
  --max-position-embeddings: 4096
  --vocab-size: 32000
  --num-experts: 8
  --moe-router-topk: 2
  --moe-router-load-balancing-type: aux_loss
  --moe-grouped-gemm: true
  --moe-aux-loss-coeff: 1e-2
  --moe-token-dispatcher-type: alltoall
  {more}
  --bf16: true
"""
NEMOTRON = """
MODEL_ARGS:
  --tensor-model-parallel-size: 1
  --pipeline-model-parallel-size: 1
  --expert-model-parallel-size: 8
  --expert-tensor-parallel-size: 1
  --spec: "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]"
  --hybrid-layer-pattern: MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME{further}
  --hidden-size: 2688
  --num-attention-heads: 32
  --group-query-attention: true
  --num-query-groups: 2
  --kv-channels: 128
  --ffn-hidden-size: 1856
  --moe-ffn-hidden-size: 1856
  --moe-shared-expert-intermediate-size: 3712
  --mamba-num-heads: 64
  --mamba-head-dim: 64
  --mamba-state-dim: 128
  --mamba-num-groups: 8
  --num-experts: 128
  --moe-router-topk: 6
  --squared-relu: true
  --position-embedding-type: none
  --normalization: RMSNorm
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --seq-length: 8192
  --max-position-embeddings: 8192
  --vocab-size: 131072
  --micro-batch-size: 2
  --global-batch-size: 512
  --bf16: true
  {more}
"""
PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    model: mixtral_8x7B_v0.1.yaml
    overrides:
      moe_router_force_load_balancing: true
      micro_batch_size: 2
      global_batch_size: ${GBS:32}
      seq_length: 4096
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 8
      overlap_grad_reduce: true
      lr_decay_iters: null
      moe_shared_expert_overlap: false
      use_turbo_deepep: true
"""
BRIDGE = """
from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config


def config():
    cfg = qwen3_30b_a3b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.expert_model_parallel_size = 8
    cfg.model.moe_router_force_load_balancing = True
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 2
    return cfg
"""
FLAGSCALE = """
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 3
  expert_model_parallel_size: 2
  expert_tensor_parallel_size: 2
  disable_bias_linear: true
  add_qkv_bias: true
  qk_layernorm: true
  sequence_parallel: true
  use_distributed_optimizer: true
  precision: {{bf16: true}}
  hetero:
    enable_hetero: true
    hetero_pipeline_layer_split: [11, 6, 7]
    hetero_process_meshes: [{meshes}]
    expert_tensor_parallel_size_per_process_mesh: [1, 1, 1]
    use_partial_reduce_for_shared_embedding: True
    hetero_device_types: [A800, A800, A800]
    hetero_current_device_type: A800
model:
  num_layers: 24
  hidden_size: 2048
  ffn_hidden_size: 1408
  num_attention_heads: 16
  seq_length: 4096
  max_position_embeddings: 4096
  norm_epsilon: 1e-6
  swiglu: true
  normalization: RMSNorm
  position_embedding_type: rope
  untie_embeddings_and_output_weights: true
  multi_latent_attention: true
  q_lora_rank: 1536
  kv_lora_rank: 512
  qk_head_dim: 128
  qk_pos_emb_head_dim: 64
  v_head_dim: 128
  moe_shared_expert_intermediate_size: 1408
  num_experts: 64
  moe_router_score_function: sigmoid
  moe_layer_freq: "[0]+[1]*23"
  moe_router_topk: 6
  mtp_num_layers: 1
  micro_batch_size: 1
  global_batch_size: 16
data:
  tokenizer: {{vocab_size: 100008, make_vocab_size_divisible_by: 64}}
"""
DEEPSEEK = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 --expert-model-parallel-size "
    "64 --expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 8192 --seq-length 4096 --bf16 "
    "--use-distributed-optimizer {more} --pipeline-model-parallel-layout {layout}"
)


def shipped_model(name: str) -> ModelSpec:
    return model_from_config(Section(read_shipped("model", name), name), name)


def read(
    folder: Path, name: str, text: str, gpus: int, model: ModelSpec | None = None, recompute: str = "auto"
) -> ImportedPlan:
    file = folder / "layout"
    file.write_text(text, encoding="utf-8")
    where = Cluster.of({"h100_80gb_sxm": gpus}, inter_gb_per_s=50)
    return read_layout(name, file, where, model, Workload(recompute=recompute), Space(), None)


def test_model_args_share_experts_over_replicas_and_tensor_parallel_ranks(tmp_path: Path) -> None:
    text = MIXTRAL.format(tp=2, ep=8, etp="--expert-tensor-parallel-size: 1", more="")
    imported_plan = read(tmp_path, "megatron", text, 64)
    assert "TP 2, PP 4, VP 8, DP 8, EP 8" in imported_plan.notes[0]
    assert "micro-batch 1, batch 256" in imported_plan.notes[0]
    assert len(imported_plan.plan.pipelines) == 2
    assert {stage.parallelism.degrees for p in imported_plan.plan.pipelines for stage in p.stages} == {"4×2"}
    assert [p.micro_batch_size for p in imported_plan.plan.pipelines] == [4, 4]
    assert imported_plan.problem.model.layers == shipped_model("mixtral_8x7b").layers
    assert PlanPricer(imported_plan.problem).price(imported_plan.plan).step_time_s > 0


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "more", "refused"),
    [
        (2, 4, "", "", "expert-tensor-parallel-size: is not stated, so that the TP degree 2 cuts experts by columns"),
        (1, 4, "--expert-tensor-parallel-size: 2", "", "expert-tensor-parallel-size: 2 cuts experts by columns"),
        (4, 2, "--expert-tensor-parallel-size: 1", "", "expert-model-parallel-size 2 is not a multiple of TP 4"),
        (1, 8, "", "--moe-expert-capacity-factor: 1.0", "import it dropless"),
        (1, 8, "", "--moe-layer-freq: ([0]*3+[1]*30)", "is for 33 layers, the model has 32"),
        (1, 8, "", "--moe-layer-freq: __import__('os')", "is no list such as"),
        (1, "${EP}", "", "", "is set where the job is started; state it"),
        (1, 8, "", "--mtp-num-layers: 2\n  --mtp-use-repeated-layer: true", "one layer for several tokens"),
        (1, 8, "", "--window-size: 128,4", "is not the tokens before and 0"),
        (1, 8, "", "--experimental-attention-variant: dsa", "'dsa' is not read"),
    ],
)
def test_what_plans_cannot_say_is_refused(
    tmp_path: Path, tp: int, ep: int | str, etp: str, more: str, refused: str
) -> None:
    text = MIXTRAL.format(tp=tp, ep=ep, etp=etp, more=more)
    with pytest.raises(InputError, match=re.escape(refused)):
        read(tmp_path, "megatron", text, 64)


def test_blocks_of_a_pattern_are_layers(tmp_path: Path) -> None:
    imported_plan = read(tmp_path, "megatron", NEMOTRON.format(further="", more=""), 8)
    model = shipped_model("nemotron3_nano_30b")
    assert imported_plan.problem.model.layers == model.layers
    assert imported_plan.problem.model.num_params == model.num_params
    further = read(tmp_path, "megatron", NEMOTRON.format(further="/*E/*E", more=""), 8).problem.model
    assert [len(kind.parts) for kind in further.extra_layers] == [2, 2]
    with pytest.raises(InputError, match="128 is not that of model granite4_h_small"):
        read(tmp_path, "megatron", NEMOTRON.format(further="", more=""), 8, shipped_model("granite4_h_small"))
    other = NEMOTRON.format(further="", more="").replace("MEMEM*E", "MMEEM*E", 1)
    with pytest.raises(InputError, match="has other blocks than model nemotron3_nano_30b"):
        read(tmp_path, "megatron", other, 8, model)
    with pytest.raises(InputError, match="context parallelism is not modelled"):
        read(tmp_path, "megatron", NEMOTRON.format(further="", more="--context-parallel-size: 2"), 8)


def test_a_configuration_of_primus_is_read_with_its_own_defaults(tmp_path: Path) -> None:
    imported_plan = read(tmp_path, "megatron", PRIMUS, 8, shipped_model("mixtral_8x7b"))
    assert "TP 1, PP 1, VP 1, DP 8, EP 8" in imported_plan.notes[0]
    assert imported_plan.problem.workload.global_batch == 32
    assert imported_plan.problem.workload.routing == "forced"
    assert imported_plan.plan.sharding.stage == 1
    assert any("by Primus' default: bf16 True, sequence_parallel True" in note for note in imported_plan.notes)
    with pytest.raises(InputError, match="Primus files do not state it"):
        read(tmp_path, "megatron", PRIMUS, 8)


def test_a_recipe_of_megatron_bridge_keeps_experts_whole(tmp_path: Path) -> None:
    imported_plan = read(tmp_path, "megatron_bridge", BRIDGE, 32, shipped_model("qwen3_30b_a3b"))
    assert "TP 1, PP 2, VP 1, DP 16, EP 8" in imported_plan.notes[0]
    assert "micro-batch 2" in imported_plan.notes[0]
    assert any("recipes have it: model.expert_tensor_parallel_size 1" in note for note in imported_plan.notes)
    assert imported_plan.problem.workload.routing == "forced"


def test_meshes_of_flagscale_have_expert_degrees(tmp_path: Path) -> None:
    text = FLAGSCALE.format(meshes="1,1,2,2,1, 1,1,2,2,1, 1,1,2,2,1")
    imported_plan = read(tmp_path, "flagscale", text, 6)
    assert "DP 2, EP 2" in imported_plan.notes[0]
    assert len(imported_plan.problem.model.extra_layers) == 1
    assert len(imported_plan.plan.pipelines) == 1
    with pytest.raises(InputError, match="2 copies of experts that 2 replicas each share, other stages have other"):
        read(tmp_path, "flagscale", FLAGSCALE.format(meshes="1,1,2,4,1, 1,1,2,2,1, 1,1,2,2,1"), 8)
    with pytest.raises(InputError, match="mesh 1 has EP 3, no multiple of TP 2"):
        read(tmp_path, "flagscale", FLAGSCALE.format(meshes="1,1,2,2,1, 2,1,3,2,1, 1,1,2,2,1"), 8)


@pytest.mark.parametrize(
    ("layout", "more", "refused"),
    [
        ("Ettt|(tt|)*28t|tmL", "--mtp-num-layers 1", "make parts a multiple of the stages"),
        ("Et|(tt|)*30mL", "--mtp-num-layers 1", "stages without layers are not modelled"),
        ("Et|(tt|)*29t|tL", "--mtp-num-layers 1", "has 0 m, for 1 layers that predict further tokens"),
        ("Et|(tt|)*29t|tmL", "--mtp-num-layers 0", "has 1 m, for 0 layers that predict further tokens"),
    ],
)
def test_layouts_without_layers_or_with_other_layers_are_refused(
    tmp_path: Path, layout: str, more: str, refused: str
) -> None:
    with pytest.raises(InputError, match=refused):
        read(tmp_path, "megatron", DEEPSEEK.format(layout=layout, more=more), 1024, shipped_model("deepseek_v3"))


def test_deepseek_v3_on_1024_gpus_has_layers_for_further_tokens_or_none(tmp_path: Path) -> None:
    model, layout = shipped_model("deepseek_v3"), "Et|(tt|)*29t|tmL"
    imported_plan = read(tmp_path, "megatron", DEEPSEEK.format(layout=layout, more="--mtp-num-layers 1"), 1024, model)
    assert "TP 2, PP 8, VP 4, DP 64, EP 64" in imported_plan.notes[0]
    assert {p.micro_batch_size for p in imported_plan.plan.pipelines} == {32}
    assert imported_plan.problem.space.max_micro_batch_size == 32
    text = DEEPSEEK.format(layout=layout.replace("m", ""), more="--mtp-num-layers 0")
    without = read(tmp_path, "megatron", text, 1024, model)
    assert not without.problem.model.extra_layers
    assert any("0 layers predict further tokens, where model deepseek_v3 has 1" in note for note in without.notes)


def test_other_recompute_is_refused_unless_the_user_says_what_to_price(tmp_path: Path) -> None:
    more = "--recompute-granularity selective --recompute-modules mla_up_proj mlp --mtp-num-layers 1"
    text, model = DEEPSEEK.format(layout="Et|(tt|)*29t|tmL", more=more), shipped_model("deepseek_v3")
    with pytest.raises(InputError, match="mla_up_proj mlp: is not modelled; say what to price"):
        read(tmp_path, "megatron", text, 1024, model)
    imported_plan = read(tmp_path, "megatron", text, 1024, model, recompute="full")
    assert {policy for p in imported_plan.plan.pipelines for stage in p.stages for policy in stage.recompute} == {
        "full"
    }
