"""Models whose layers are of kinds: published counts, files as they are published, kinds written by hand, refusals."""

import json
import random
import re
from dataclasses import fields
from typing import Any

import pytest
import yaml

import hexiopt as hx
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.kind_words import layers_in_words
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.problem.kinds import PARTS
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section
from tests.hexiopt.files.test_model_kinds import KINDS, NAMES, draw_config
from tests.hexiopt.files.test_model_types import JUNK
from tests.model_types import PAGE
from tests.slow import slow_but

MOONLIGHT = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 11_264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163_840,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
}
KIMI_K2 = MOONLIGHT | {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
NEMOTRON_SUPER = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "intermediate_size": 2688,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_latent_size": 1024,
    "vocab_size": 131_072,
    "max_position_embeddings": 262_144,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
GEMMA4_26B = {
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "top_k_experts": 8,
    "enable_moe_block": True,
    "sliding_window": 1024,
    "vocab_size": 262_144,
    "max_position_embeddings": 262_144,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
TINY = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "mlp_only_layers": [0],
}


LLAMA4 = {
    "model_type": "llama4_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "vocab_size": 100,
    "attention_chunk_size": 16,
}
CHUNKS = ["full_attention", *["chunked_attention"] * 3]


def read(config: dict[str, Any]) -> ModelSpec:
    return model_from_config(Section(config, "m"))


def refusal(config: dict[str, Any], **change: Any) -> str:
    with pytest.raises(hx.InputError) as error:
        read(config | change)
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "gflops"),
    [  # model TFLOP/s over tokens/s of a GPU at 4,096 tokens: Megatron-Bridge 067f987, model verification cards
        ("deepseek_v3", 276.03e3 / 1061.2),
        ("qwen3_30b_a3b", 487.88e3 / 21_205.0),
        ("qwen3_235b_a22b", 1300.44e3 / 8784.5),
        (MOONLIGHT, 386.59e3 / 22_528.0),
        (NEMOTRON_SUPER, 248.61e3 / 2969.3),
    ],
    ids=["deepseek_v3", "qwen3_30b_a3b", "qwen3_235b_a22b", "moonlight", "nemotron_super"],
)
def test_flops_are_those_of_megatron_bridge(model: Any, gflops: float) -> None:
    spec = hx.model(model)
    if model is NEMOTRON_SUPER:  # its recipe predicts two further tokens by one module
        spec = spec.replace(extra_layers=2 * spec.extra_layers)
    assert spec.model_flops_per_token(4096) / 1e9 == pytest.approx(gflops, rel=0.01)


def test_published_totals() -> None:
    nemotron = read(NEMOTRON_SUPER)
    assert nemotron.num_params == 120_668_687_360
    assert nemotron.num_params + nemotron.extra_params == 123_611_012_096  # of its checkpoint
    assert read(KIMI_K2).num_params == 1_026_408_209_408
    assert read(MOONLIGHT).num_params == 15_960_108_544  # as Megatron-Bridge's card and the meta device count it
    gemma = read(GEMMA4_26B)
    assert (round(gemma.num_params / 1e9, 1), round(gemma.active_params / 1e9, 1)) == (25.2, 3.8)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek_v3", 36.6), ("gpt_oss_20b", 3.6), ("gpt_oss_120b", 5.1), ("nemotron3_nano_30b", 3.2)],
)
def test_active_parameters_count_the_head_and_no_look_up(name: str, billions: float) -> None:
    """As DeepSeek, OpenAI and NVIDIA publish them; Qwen's 3.3 and 22 billion count the embedding too."""
    assert round(hx.model(name).active_params / 1e9, 1) == billions


def test_layers_are_told_in_one_line() -> None:
    model = hx.model("deepseek_v3")
    assert layers_in_words(model.layers, model.extra_layers) == (
        "61 layers: 3 dense, 58 of 256 experts, 8 a token + 1 shared; 61 latent attention of 128 heads; 1 more for "
        "further tokens"
    )
    assert "24 layers" in hx.model("gpt_oss_20b").notes[0]
    assert "12 attention of 64 heads (8 for keys) in a window of 128" in hx.model("gpt_oss_20b").notes[0]
    assert "36 gated delta rule of 32 heads, 12 attention of 16" in hx.model("qwen3_next_80b_a3b").notes[0]
    assert "30 dense beside 128 experts, 8 a token" in read(GEMMA4_26B).notes[0]
    assert layers_in_words(()) == ""
    assert repr(model).count("\n") == 0


def test_published_files_with_narrow_weights_are_read_and_noted() -> None:
    deepseek = MOONLIGHT | {
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
        "moe_layer_freq": 1,
        "ep_size": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "pretraining_tp": 1,
    }
    model = read(deepseek)
    assert model == read(MOONLIGHT)
    assert any(note.startswith("quantization_config: its makers store weights in fp8") for note in model.notes)
    assert "quantised" in refusal(deepseek, quantization_config={"quant_method": "awq"})
    kimi = read(KIMI_K2 | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}})
    assert kimi == read(KIMI_K2)
    assert "moe_layer_freq: 2 is not modelled; only 1 is" in refusal(deepseek, moe_layer_freq=2)


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (TINY, {"num_experts_per_tok": 9}, "m: experts: top_k 9 is more than all 8 experts; choose at most 8"),
        (TINY, {"num_experts_per_tok": None}, "num_experts_per_tok: is missing; state it"),
        (TINY, {"num_local_experts": 4}, "num_experts: differs from num_local_experts"),
        (TINY, {"n_shared_experts": 1}, "n_shared_experts: unknown key"),
        (TINY, {"kv_lora_rank": 8}, "kv_lora_rank: latent attention: not modelled; use a type in which it is read"),
        (TINY, {"mlp_only_layers": [4]}, "mlp_only_layers[0]: 4 is not the number of a layer; state one from 0 to 3"),
        (TINY, {"decoder_sparse_step": 0}, "decoder_sparse_step: 0 is out of range"),
        (TINY, {"mamba_d_state": 8}, "mamba_d_state: recurrent layers"),
        (NEMOTRON_SUPER, {"hybrid_override_pattern": "MEX"}, "'MEX' is not a pattern of M, *, -, E"),
        (NEMOTRON_SUPER, {"hybrid_override_pattern": "MMMM"}, "no layer attends"),
        (NEMOTRON_SUPER, {"num_hidden_layers": 3}, "hybrid_override_pattern: 88 entries for 3 layers; state each"),
        (NEMOTRON_SUPER, {"mtp_hybrid_override_pattern": "**"}, "at most an attention and a recurrence"),
        (NEMOTRON_SUPER, {"hybrid_override_pattern": None}, "layers_block_type: is missing; state it"),
        (GEMMA4_26B, {"hidden_size_per_layer_input": 256}, "embeddings of their own: not modelled"),
        (GEMMA4_26B, {"num_kv_shared_layers": 10}, "layers that share keys and values"),
        (GEMMA4_26B, {"per_layer_config": {"31": {"head_dim": 8}}}, "per_layer_config.31: is not a layer; number them"),
        (GEMMA4_26B, {"per_layer_config": {"3": {"heads": 8}}}, "heads: unknown key"),
        (LLAMA4, {"layer_types": CHUNKS}, "has chunks in other layers than rotary positions; state both for the same"),
        (LLAMA4, {"attention_chunk_size": None}, "attention_chunk_size: is null; state the tokens of a chunk"),
        (MOONLIGHT, {"index_topk": 2048}, "index_topk: sparse attention by an indexer: not modelled"),
    ],
)
def test_refuses(config: dict[str, Any], change: dict[str, Any], says: str) -> None:
    assert says in refusal(config, **change)


def test_chunks_are_no_windows_where_all_layers_are_alike() -> None:
    """Such a model has no field for them: its layers are stated."""
    for flag, chunked in ((1, True), (0, False)):
        model = read(LLAMA4 | {"moe_layers": [], "no_rope_layers": 4 * [flag]})
        attentions = {kind.attention for kind in model.layers}
        assert [(a.chunked, a.window, a.qk_norm) for a in attentions if a] == [
            (True, 16, "plain") if chunked else (False, None, "none")
        ]


def test_a_file_without_embeddings_of_layers_says_so() -> None:
    """Transformers takes 256 where it is absent."""
    without = {key: value for key, value in GEMMA4_26B.items() if key != "hidden_size_per_layer_input"}
    assert "hidden_size_per_layer_input: layers that share" in refusal(without)


# Kinds written by hand, and as `to_dict` writes them.

WRITTEN: dict[str, Any] = {
    "model_type": "decoder",
    "hidden_size": 64,
    "vocab_size": 100,
    "max_positions": 128,
    "activation": "silu",
    "layer_kinds": [
        {
            "parts": [
                {"part": "attention", "heads": 4, "kv_heads": 2, "qk_dim": 16, "v_dim": 16, "window": 8},
                {"part": "dense", "ffn_size": 96},
            ]
        },
        {"parts": [{"part": "experts", "count": 8, "top_k": 2, "ffn_size": 24}], "norms": 1},
    ],
    "layer_pattern": [0, 1, 0, 1, 1],
}


def written_config(**change: Any) -> dict[str, Any]:
    return json.loads(json.dumps(WRITTEN | change))


def test_kinds_are_written_by_hand() -> None:
    model = read(written_config())
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_size) == (5, 4, 2, 16, 96)
    assert [kind.attention is not None for kind in model.layers] == [True, False, True, False, False]
    assert model.layers[0].attention is not None
    assert model.layers[0].attention.window == 8
    assert model.layers[1].norms == 1
    assert read(model.to_dict()) == model
    assert read(written_config(extra_layer_kinds=[WRITTEN["layer_kinds"][0]])).extra_layers == model.layers[:1]


def test_the_page_of_models_describes_models() -> None:
    page = PAGE.read_text(encoding="utf-8")
    described = [read(yaml.safe_load(text)) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert [len(model.kinds) for model in described] == [1, 2]
    for part in PARTS.values():
        line = next(line for line in page.splitlines() if line.startswith(f"- `{part.name}`: "))
        assert all(re.search(rf"\b{field.name}\b", line) for field in fields(part))


def change_part(kind: int, number: int, **change: Any) -> dict[str, Any]:
    config = written_config()
    values = config["layer_kinds"][kind]["parts"][number] | change
    config["layer_kinds"][kind]["parts"][number] = {key: value for key, value in values.items() if value != "absent"}
    return config


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (change_part(0, 0, part="attenton"), "layer_kinds[0].parts[0].part: 'attenton' is not known; did you mean"),
        (change_part(0, 0, head=3), "layer_kinds[0].parts[0].head: unknown key; did you mean heads or kv_heads?"),
        (change_part(0, 0, heads="absent"), "layer_kinds[0].parts[0].heads: is missing; state it"),
        (change_part(0, 0, heads=None), "layer_kinds[0].parts[0].heads: is null; state a value"),
        (change_part(0, 0, heads=2.5), "layer_kinds[0].parts[0]: attention: heads: 2.5 is not a whole number"),
        (change_part(0, 0, sinks=1), "sinks: 1 is not true or false"),
        (change_part(0, 0, kv_heads=3), "4 heads are not a multiple of 3 key-value heads; change one"),
        (change_part(0, 0, qk_norm="some"), "qk_norm: 'some' is not known; take one of none"),
        (change_part(1, 0, top_k=9), "layer_kinds[1].parts[0]: experts: top_k 9 is more than all 8 experts"),
        (
            written_config(layer_pattern=[0, 2]),
            "layer_pattern[1]: 2 is not the number of a kind; state one from 0 to 1",
        ),
        (written_config(layer_pattern=[]), "layer_pattern: [] has no layer"),
        (written_config(layer_pattern=None), "layer_pattern"),
        (written_config(layer_kinds=[]), "layer_kinds: [] has no kind; state one"),
        (written_config(layer_kinds=None), "layer_pattern: [0, 1, 0, 1, 1] stands beside layer_kinds"),
        (written_config(num_layers=4), "layers has 5 kinds for 4 layers"),
        (written_config(num_heads=8), "num_heads, num_kv_heads and head_dim are those of the first attention"),
        (written_config(attention_window=4), "windows stand in its kind"),
        (written_config(layer_kinds=[{"parts": []}], layer_pattern=[0]), "at least one part"),
    ],
)
def test_kinds_written_wrong_are_refused(config: dict[str, Any], says: str) -> None:
    assert says in refusal(config)


def assert_a_model_or_one_line(config: dict[str, Any]) -> None:
    try:
        model = read(config)
    except hx.InputError as error:
        text = str(error)
    else:
        text = "m: "
        assert read(json.loads(json.dumps(model.to_dict()))) == model
    assert text.startswith("m: ")


@pytest.mark.parametrize("name", slow_but(NAMES[::4], NAMES))
def test_junk_in_a_file_gives_a_model_or_one_line(name: str) -> None:
    rng = random.Random(name)
    keys = sorted(KINDS[name].names | {"layer_types", "rope_parameters", "quantization_config", "per_layer_config"})
    for _ in range(100):
        config = {"model_type": name, **draw_config(name, rng)}
        for key in rng.sample(keys, rng.randint(1, 3)):
            config[key] = rng.choice(JUNK)
        assert_a_model_or_one_line(config)


def test_junk_in_written_kinds_gives_a_model_or_one_line() -> None:
    rng = random.Random(0)
    for _ in range(400):
        config = written_config()
        kinds = config["layer_kinds"]
        target = rng.choice([config, kinds[0], kinds[1], *kinds[0]["parts"], *kinds[1]["parts"]])
        target[rng.choice([*target, "window", "norms", "extra_layer_kinds"])] = rng.choice(JUNK)
        assert_a_model_or_one_line(config)


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron3_nano_30b", "gemma3_27b", "llama4_scout", "gpt_oss_20b"])
def test_problems_of_such_models_survive_their_files(name: str) -> None:
    problem = hx.Problem(hx.cluster("small_mixed"), hx.model(name))
    data = json.loads(json.dumps(problem_to_dict(problem)))
    again = problem_from_section(Section(data, "plan.json"))
    assert again.model == problem.model
    assert problem_sha256(again) == problem_sha256(problem)
