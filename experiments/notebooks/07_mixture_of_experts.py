# %% [markdown]
# # A mixture of experts on a mixed cluster
#
# Of the 117 billion parameters of gpt-oss-120b a token meets 5.7 billion: each layer has 128 experts, of which a router
# chooses four. Memory is that of a large model, compute that of a small one, and what lies between them is moving
# tokens to their experts and back. This notebook goes from the model's `config.json` on the Hub to a plan for 56 GPUs
# of three types, asks how far the plan may be from the best, and what it gains to keep experts whole.
#
# ## The model, as the Hub has it
#
# `hx.model("openai/gpt-oss-120b")` reads this file from the local cache of the Hub, or from the Hub. Here it stands in
# full, so that the notebook needs no network.

# %%
import json
from pathlib import Path

import hexiopt as hx
from experiments.studies.cases.mixtures import by_columns

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
Path("gpt-oss-120b").mkdir()
Path("gpt-oss-120b/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
model = hx.model("gpt-oss-120b/config.json")
print(f"{model.num_params:,} parameters")
model

# %% [markdown]
# Fields are read, not names: 36 layers of two kinds, as attention alternates between a window of 128 tokens and all of
# them, each with 128 experts.
#
# ## The cluster
#
# Sixteen H100, twenty-four A100 and sixteen L40S, in machines as they were bought. All states of this model take 16
# bytes a parameter, 1.9 TB; the GPUs have 4 TB together. Neither the H100 nor the L40S hold the model alone.

# %%
cluster = hx.cluster(
    {
        "name": "three_purchases",
        "inter_machine": {"bandwidth_gb_per_s": 12.5, "latency_us": 20},
        "machines": [
            {
                "name": "h100",
                "gpu": "h100_80gb_sxm",
                "num_gpus": 8,
                "intra_bandwidth_gb_per_s": 450,
                "count": 2,
                "network_interfaces": 8,
                "nic_bandwidth_gb_per_s": 50,
            },
            {
                "name": "a100",
                "gpu": "a100_80gb_sxm",
                "num_gpus": 8,
                "intra_bandwidth_gb_per_s": 300,
                "count": 3,
                "network_interfaces": 4,
                "nic_bandwidth_gb_per_s": 25,
            },
            {"name": "l40s", "gpu": "l40s", "num_gpus": 4, "intra_bandwidth_gb_per_s": 20, "count": 4},
        ],
    }
)
problem = hx.Problem(cluster, model, hx.Workload(global_batch=256, seq_len=4096))
problem

# %% [markdown]
# ## The plan

# %%
plan = hx.solve(problem, time_limit_s=600, max_steps=300, progress=False)
print(plan)

# %%
hx.plot.layers(plan).figure

# %% [markdown]
# A stage is a group of GPUs of one machine. They share the experts, so that each holds some of them whole, and are
# replicas of all else: `8×1` is eight replicas of TP degree 1 that share 128 experts, 16 each. Which degree is fastest
# the price decides. Where types differ, so do their layers.
#
# ## How good is it?
#
# No plan whatsoever can be faster than the lower bound. The gap is what a better search, or a better bound, could still
# find; it is not a promise that there is such a plan.

# %%
bound_s = hx.lower_bound(problem, time_limit_s=5)
gap = 1 - bound_s / plan.objective
print(f"step {plan.objective:.2f} s, lower bound {bound_s:.2f} s, gap {gap:.1%}")

# %% [markdown]
# ## Whole experts against experts cut as an MLP
#
# Tensor parallelism cuts an MLP by its columns. Experts can be cut so too: every GPU of a stage then has a slice of all
# 128 experts, and gets every token once. It needs no all-to-all and is evenly loaded, but each product becomes as many
# times narrower as there are GPUs, and each GPU permutes and stores four copies of every token of the stage instead of
# its own. `by_columns` prices plans so, and the same search looks for the best of them.

# %%
columns = hx.solve(problem, time_limit_s=600, max_steps=300, pricer=by_columns, progress=False)
step_s = {"whole experts": {"step": plan.objective}, "cut by columns": {"step": columns.objective}}
print(f"cut by columns: {columns.objective / plan.objective:.2f} times the step of whole experts")
hx.plot.bars(step_s, unit="step time (s)").figure

# %% [markdown]
# The difference depends on links and experts. Where links are fast whole experts compute best; where they are slow, or
# experts are small and a token takes many, copies of tokens may take longer than the narrower products do. Measured on
# six clusters and six models: [mixtures of experts on mixed clusters](../../docs/results/mixtures.md).
#
# ## To Megatron-LM
#
# Megatron-LM runs grids: equal pipelines, equal batches, one recompute policy. So the plan that it shall run is planned
# within that space. Exports say in one line what a trainer cannot run, rather than write something else.

# %%
GRID = {
    "uneven_tp": False,
    "uneven_structure": False,
    "uneven_batch": False,
    "batch_remainder": False,
    "recompute_per_stage": False,
    "recompute_per_layer": False,
    "replicas": False,
    "machine_sharding": False,
}
work = problem.workload.replace(schedule="1f1b", optimizer_sharding="1")
grid = hx.solve(problem.replace(workload=work), time_limit_s=600, max_steps=300, constraints=GRID, progress=False)
print(f"a grid takes {grid.objective / plan.objective:.2f} times the step of the free plan")
try:
    exported = hx.export(grid.plan, "megatron", "megatron")
    for name in sorted(exported.files):
        print(f"--- {name}", Path("megatron", name).read_text(encoding="utf-8")[:1500], sep="\n")
except hx.InputError as refusal:
    print(refusal)
