"""Parameter and FLOP counts of `ModelSpec`, and what it refuses."""

import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.problem.architectures import ARCHITECTURES
from hexiopt.problem.form import QK_NORMS, Form
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.reading import Section
from tests.conftest import ROOT

CONF = ROOT / "conf" / "model"

# Totals that Hugging Face states for the checkpoints (safetensors metadata, or num_parameters()).
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama_30b": 32_528_943_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "gpt2_345m": 354_823_168,
    "opt_350m": 331_196_416,
    "gpt_neo_2_7b": 2_651_307_520,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_7b": 6_919_161_856,
    "deepseek_v3": 671_026_404_352,
    "glm4_5_air": 106_852_245_504,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "llama4_scout": 107_769_861_120,
    "gemma3_27b": 27_009_346_304,
    "nemotron3_nano_30b": 31_577_937_344,
    "granite4_h_small": 32_207_337_984,
    "minimax_m2": 228_689_748_992,
}
OURS = {
    "gpt_3b": 3_027_941_376,
    "gpt_7b": 6_856_253_440,
    "gpt_13b": 13_100_697_600,
    "gpt_70b": 70_089_703_424,
    "tiny": 803_968,
    "tiny_moe": 7_219_712,
}
NAMES = sorted(PUBLISHED | OURS)

TINY = ModelSpec(
    name="t",
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=100,
    max_positions=128,
)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    facts = ARCHITECTURES[architecture]
    size = st.integers(1, 512)
    num_kv_heads, group, head_dim = (
        draw(st.integers(1, 8)),
        draw(st.integers(1, 4)),
        2 * draw(st.integers(1, 64)),
    )
    num_heads = num_kv_heads * group
    grouped = "num_kv_heads" in facts.keys
    attention_bias = draw(st.booleans()) if "attention_bias" in facts.keys else facts.attention_bias
    mlp_bias = attention_bias if facts.mlp_bias is None else facts.mlp_bias
    form = None if facts.form is not None else draw(forms())
    hidden_size = draw(size) if grouped else num_heads * head_dim
    values: dict[str, Any] = {
        "num_layers": draw(st.integers(2, 100)),
        "num_kv_heads": num_kv_heads if grouped else num_heads,
        "ffn_size": draw(size),
        "vocab_size": draw(size),
        "max_positions": draw(size),
        "tied_embeddings": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()) if "mlp_bias" in facts.keys else mlp_bias,
        "activation": draw(st.sampled_from(["silu", "gelu_new"])),
    }
    optional = {
        "final_norm": st.booleans(),
        "projected_embedding": st.none() | size.filter(lambda width: width != hidden_size),
        "attention_window": st.none() | size,
        "norm_eps": st.floats(1e-8, 1.0),
        "rope_theta": st.floats(1.0, 1e9) | st.integers(1, 10**9),
    }
    values |= {name: draw(strategy) for name, strategy in optional.items() if name in facts.keys}
    if "rope_theta" in facts.keys:
        values["rope_type"] = draw(st.sampled_from(["default", "llama3", "yarn"]))
    return ModelSpec(
        name=draw(st.sampled_from(["m", "Größe 1"])),
        architecture=architecture,
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        attention_bias=attention_bias,
        form=form,
        **values,
    )


def forms() -> st.SearchStrategy[Form]:
    return st.builds(
        Form,
        gated_mlp=st.booleans(),
        norm=st.sampled_from(["rms", "layer"]),
        norm_vectors=st.integers(0, 2),
        norms=st.integers(1, 4),
        qk_norm=st.sampled_from(QK_NORMS),
        qk_norm_vectors=st.integers(1, 2),
        inner_norms=st.booleans(),
        output_bias=st.none() | st.booleans(),
        activation_params=st.integers(0, 2),
        positions=st.sampled_from(["rope", "learned", "none"]),
        extra_positions=st.integers(0, 2),
        embedding_norm=st.booleans(),
        head_bias=st.booleans(),
    )


def test_the_configurations_are_these() -> None:
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted([*NAMES, "hf"])


@pytest.mark.parametrize("name", NAMES)
def test_configuration_has_the_stated_count(name: str) -> None:
    path = CONF / f"{name}.yaml"
    model = read_model(path)
    count = (PUBLISHED | OURS)[name]
    assert model.name == name
    assert model.num_params == count
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"{count:,}" in text or name == "tiny"


@given(specs())
def test_parts_sum_to_the_layer_and_layers_to_the_model(model: ModelSpec) -> None:
    parts = [
        row.weights.on(largest_shard(model, 1)) + row.vectors.on(largest_shard(model, 1))
        for row in model.layer.operators
    ]
    assert min(parts) >= 0
    assert sum(parts) == model.layer_params
    assert model.embedding_params + model.num_layers * model.layer_params + model.head_params == model.num_params


@given(specs())
def test_layer_equals_its_tensors(model: ModelSpec) -> None:
    """The count again, from a list of tensors as a checkpoint has them."""
    h, q, kv, f = model.hidden_size, model.q_size, model.num_kv_heads * model.head_dim, model.ffn_size
    matrices = {"q": (h, q), "k": (h, kv), "v": (h, kv), "out": (q, h), "up": (h, f), "down": (f, h)}
    if model.gated_mlp:
        matrices["gate"] = (h, f)
    biased = {
        **dict.fromkeys("qkv", model.attention_bias),
        "out": model.output_bias,
        **dict.fromkeys(("up", "gate", "down"), model.mlp_bias),
    }
    tensors = [rows * columns for rows, columns in matrices.values()]
    tensors += [columns for name, (_, columns) in matrices.items() if biased[name]]
    form = model.form or ARCHITECTURES[model.architecture].form
    assert form is not None
    tensors += [h] * form.norms * form.norm_vectors + [1] * form.activation_params
    normed = {"head": [model.head_dim] * 2, "heads": [model.head_dim] * (model.num_heads + model.num_kv_heads)}
    tensors += (normed | {"whole": [q, kv]}).get(form.qk_norm, []) * form.qk_norm_vectors
    tensors += [q, f] * form.norm_vectors if form.inner_norms else []
    assert model.layer_params == sum(tensors)
    assert model.layer_gemm_flops_per_token == 2 * sum(rows * columns for rows, columns in matrices.values())


@given(specs())
def test_to_dict_is_json_and_reads_back_equal(model: ModelSpec) -> None:
    mapping = json.loads(json.dumps(model.to_dict(), allow_nan=False))
    again = model_from_config(Section(mapping, "plan.json"))
    assert again == model
    assert hash(again) == hash(model)
    assert json.dumps(again.to_dict(), sort_keys=True) == json.dumps(model.to_dict(), sort_keys=True)
    assert pickle.loads(pickle.dumps(model)) == model


def test_flops_of_llama2_7b_by_hand() -> None:
    model = read_model(CONF / "llama2_7b.yaml")
    gemm = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    attention = 2 * 4096 * 4096
    head = 2 * 4096 * 32000
    assert model.layer_gemm_flops_per_token == gemm
    assert model.attention_flops_per_token(4096) == attention
    assert model.head_flops_per_token == head
    assert model.embedding_flops_per_token == 0
    assert model.model_flops_per_token(4096) == 3 * (32 * (gemm + attention) + head)
    # Six FLOP a parameter and token, but for the embedding's look-up and attention.
    looked_up = model.num_params - 32000 * 4096
    assert model.model_flops_per_token(1) == pytest.approx(6 * looked_up, rel=1e-3)


def test_causal_attention_is_half_of_the_full_one() -> None:
    seq_len = 64
    by_row = sum(2 * 2 * (row + 0.5) * TINY.q_size for row in range(seq_len))
    assert TINY.attention_flops_per_token(seq_len) * seq_len == by_row


def test_projected_embedding_counts_both_ways() -> None:
    model = read_model(CONF / "opt_350m.yaml")
    assert model.embedding_size == 512
    assert model.embedding_params == 50272 * 512 + 2050 * 1024 + 512 * 1024
    assert model.head_params == 512 * 1024
    assert model.final_norm_params == 0
    assert model.head_flops_per_token == 2 * (50272 * 512 + 512 * 1024)
    assert model.embedding_flops_per_token == 2 * 512 * 1024


def test_tied_head_has_flops_but_no_parameters() -> None:
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    assert TINY.num_params - tied.num_params == TINY.vocabulary_params == 100 * 64
    assert tied.head_params == tied.final_norm_params == 64
    assert tied.model_flops_per_token(9) == TINY.model_flops_per_token(9)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number from 1 to 10000"),
        ({"num_layers": 10_001}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"num_layers": None}, "num_layers"),
        ({"hidden_size": 2**20 + 1}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 15}, "odd"),
        ({"vocab_size": 2**24 + 1}, "vocab_size"),
        ({"ffn_size": "96"}, "ffn_size"),
        ({"max_positions": 2**27 + 1}, "max_positions"),
        ({"num_kv_heads": 3}, "4 heads are not a multiple of 3 key-value heads"),
        ({"tied_embeddings": 1}, "tied_embeddings must be true or false"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"activation": ""}, "activation"),
        ({"rope_type": 3}, "rope_type"),
        ({"name": " "}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": None}, "name"),
        ({"architecture": "mamba"}, "known: llama"),
        ({"architecture": ["llama"]}, "known: llama"),
        ({"final_norm": False}, "always has a final norm"),
        ({"projected_embedding": 32}, "no projected_embedding"),
        ({"attention_window": 32}, "no attention_window"),
        ({"architecture": "mistral", "attention_bias": True}, "mistral has attention_bias false"),
        ({"architecture": "qwen2"}, "qwen2 has attention_bias true"),
        ({"architecture": "qwen3", "mlp_bias": True}, "qwen3 has mlp_bias false"),
        ({"architecture": "mistral", "attention_window": 0}, "attention_window"),
        ({"architecture": "gpt2", "attention_bias": True, "mlp_bias": True}, "as many key-value heads"),
        ({"architecture": "gpt_neox", "mlp_bias": True, "num_kv_heads": 4, "head_dim": 8}, "4 heads times"),
        ({"architecture": "gpt_neo", "mlp_bias": True, "num_kv_heads": 4, "rope_theta": 5.0}, "cannot state"),
        ({"architecture": "gpt_neo", "mlp_bias": True, "num_kv_heads": 4, "rope_type": "yarn"}, "learns its"),
        (
            {"architecture": "gpt_neo", "mlp_bias": True, "num_kv_heads": 4, "num_layers": 1} | {"attention_window": 8},
            "every second layer",
        ),
        ({"architecture": "opt", "num_kv_heads": 4, "mlp_bias": True}, "mlp_bias false"),
        ({"architecture": "opt", "num_kv_heads": 4, "projected_embedding": 64}, "nothing is projected"),
    ],
)
def test_refuses(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        dataclasses.replace(TINY, **change)
    assert says in str(error.value)
