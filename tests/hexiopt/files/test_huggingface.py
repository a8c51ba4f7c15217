"""The reader of `config.json`: its defaults, what it ignores and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.files.models.features import FEATURES, HARMLESS
from hexiopt.problem.architectures import ARCHITECTURES
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
MISTRAL = LLAMA | {"model_type": "mistral", "num_attention_heads": 16}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_attention_heads": 32}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_attention_heads": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
GPT_NEO = {"model_type": "gpt_neo", "hidden_size": 64, "num_layers": 24, "num_heads": 4, "vocab_size": 100}
GPT_NEOX = LLAMA | {"model_type": "gpt_neox"}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 100,
}
SIGNS = [key for feature in FEATURES for key in feature.signs]
ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GPT_NEO, GPT_NEOX, OPT)


def read(base: dict[str, Any], **change: Any) -> ModelSpec:
    return model_from_config(Section(base | change, "config.json"))


def refusal(base: dict[str, Any], **change: Any) -> str:
    with pytest.raises(InputError) as error:
        read(base, **change)
    text = str(error.value)
    assert text.startswith("config.json: ")
    return text


# Totals of published checkpoints (safetensors metadata, num_parameters(), or the model card).
@pytest.mark.parametrize(
    ("config", "count"),
    [
        pytest.param(  # Llama-3.2-1B: tied, stretched rotary positions
            LLAMA
            | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64}
            | {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}
            | {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "llama3", "factor": 32.0}},
            1_235_814_400,
            id="llama_3_2_1b",
        ),
        pytest.param(
            QWEN2
            | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
            | {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936}
            | {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768},
            494_032_768,
            id="qwen2_5_0_5b",
        ),
        pytest.param(
            QWEN2
            | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
            | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
            7_615_616_512,
            id="qwen2_5_7b",
        ),
        pytest.param(GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 124_439_808, id="gpt2"),
        pytest.param(
            GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257},
            1_557_611_200,
            id="gpt2_xl",
        ),
        pytest.param(
            GPT_NEOX
            | {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64}
            | {"intermediate_size": 24576, "vocab_size": 50432, "rotary_pct": 0.25},
            20_554_567_680,
            id="gpt_neox_20b",
        ),
        pytest.param(
            GPT_NEOX
            | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"intermediate_size": 16384, "vocab_size": 50432},
            6_857_302_016,
            id="pythia_6_9b",
        ),
    ],
)
def test_published_counts(config: dict[str, Any], count: int) -> None:
    assert read(config).num_params == count


DEFAULTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        LLAMA,
        {"num_kv_heads": 4, "head_dim": 16, "tied_embeddings": False, "max_positions": 2048}
        | {"activation": "silu", "norm_eps": 1e-6, "rope_theta": 1e4, "gated_mlp": True, "norm_bias": False}
        | {"attention_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": None},
    ),
    (MISTRAL, {"num_kv_heads": 8, "attention_window": 4096, "max_positions": 131_072}),
    (QWEN2, {"num_kv_heads": 32, "attention_bias": True, "output_bias": False, "attention_window": None}),
    (QWEN3, {"head_dim": 128, "qk_norm": "head", "attention_bias": False, "max_positions": 32_768}),
    (
        GPT2,
        {"ffn_size": 256, "learned_positions": 1024, "tied_embeddings": True, "gated_mlp": False}
        | {"norm_bias": True, "attention_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    (
        GPT_NEO,
        {"ffn_size": 256, "learned_positions": 2048, "attention_window": 256, "tied_embeddings": True}
        | {"attention_bias": False, "output_bias": True, "mlp_bias": True},
    ),
    (GPT_NEOX, {"learned_positions": 0, "attention_bias": True, "tied_embeddings": False}),
    (
        OPT,
        {"learned_positions": 2050, "final_norm": True, "embedding_size": 64, "tied_embeddings": True}
        | {"attention_bias": True, "output_bias": True, "mlp_bias": True, "activation": "relu"},
    ),
]


@pytest.mark.parametrize(("base", "expected"), DEFAULTS, ids=[str(base["model_type"]) for base, _ in DEFAULTS])
def test_defaults_of_transformers(base: dict[str, Any], expected: dict[str, Any]) -> None:
    model = read(base)
    assert {name: getattr(model, name) for name in expected} == expected


def test_null_is_the_default_but_for_mistral() -> None:
    assert read(LLAMA, num_key_value_heads=None, head_dim=None, rope_theta=None) == read(LLAMA)
    assert read(MISTRAL, num_key_value_heads=None).num_kv_heads == 16
    assert read(MISTRAL, sliding_window=None).attention_window is None


def test_stated_switches_are_kept() -> None:
    llama = read(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert llama.attention_bias
    assert llama.output_bias
    assert llama.mlp_bias
    assert llama.tied_embeddings
    assert not read(GPT_NEOX, attention_bias=False).output_bias
    bare = read(OPT, enable_bias=False)
    assert (bare.attention_bias, bare.output_bias, bare.mlp_bias) == (False, False, False)
    assert not read(OPT, _remove_final_layer_norm=True).final_norm
    assert not read(OPT, do_layer_norm_before=False).final_norm
    assert read(OPT, word_embed_proj_dim=32).projected_embedding == 32
    assert read(OPT, word_embed_proj_dim=64).projected_embedding is None


def test_rotary_positions_of_old_and_new_files() -> None:
    assert read(LLAMA, rope_theta=5e5, rope_scaling=None).rope_theta == 5e5
    assert read(LLAMA, rope_scaling={"type": "linear", "factor": 2.0}).rope_type == "linear"
    new = read(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3"})
    assert (new.rope_theta, new.rope_type) == (5e5, "llama3")
    assert read(GPT_NEOX, rotary_emb_base=20_000).rope_theta == 2e4


def test_windows() -> None:
    windowed = QWEN2 | {"use_sliding_window": True, "sliding_window": 512}
    assert read(windowed, max_window_layers=0).attention_window == 512
    assert read(windowed, max_window_layers=2).attention_window is None
    assert read(windowed).attention_window is None  # 28 layers of full attention come first
    later = read(windowed, max_window_layers=1)
    assert [kind.attention.window for kind in later.layers if kind.attention] == [None, 512]
    assert (later.architecture, later.attention_bias, later.output_bias) == ("decoder", True, False)
    assert read(later.to_dict()) == later
    assert read(windowed, layer_types=["sliding_attention"] * 2).attention_window == 512
    assert read(MISTRAL, layer_types=["full_attention"] * 2).attention_window is None
    assert read(windowed, layer_types=["full_attention", "sliding_attention"]).layers == later.layers
    assert "3 entries for 2 layers" in refusal(windowed, layer_types=["full_attention"] * 3)
    assert "linear_attention" in refusal(QWEN3, layer_types=["linear_attention"] * 2, use_sliding_window=True)
    assert "'sliding_attention' is not modelled in this type" in refusal(LLAMA, layer_types=["sliding_attention"] * 2)


def test_gpt_neo_layer_kinds() -> None:
    assert read(GPT_NEO, attention_types=[[["global"], 24]]).attention_window is None
    odd = read(GPT_NEO, num_layers=3, attention_types=[[["global", "local"], 1], [["global"], 1]])
    assert odd.attention_window == 256
    assert read(GPT_NEO, attention_layers=["global", "local"] * 12, window_size=64).attention_window == 64
    assert "must give 3 layers" in refusal(GPT_NEO, num_layers=3)
    assert "no other order" in refusal(GPT_NEO, attention_types=[[["local"], 24]])
    for wrong in ([["global"]], [[["global"], 10**9]], [[[], 3]], [[["global"], True]], ["global"]):
        assert "attention_types" in refusal(GPT_NEO, attention_types=wrong)


def test_names() -> None:
    assert read(LLAMA).name == "llama"
    assert read(LLAMA, _name_or_path="org/model").name == "org/model"
    assert read(LLAMA, _name_or_path="org/model", name="mine").name == "mine"
    assert read(LLAMA, _name_or_path="").name == "llama"
    assert "name must be" in refusal(LLAMA, name="")
    assert "name must be" in refusal(LLAMA, name=7)


@pytest.mark.parametrize("base", ALL, ids=lambda base: str(base["model_type"]))
def test_irrelevant_keys_are_ignored_and_harmless_announcements_accepted(base: dict[str, Any]) -> None:
    noise = {key: {"any": ["value"]} for key in HARMLESS - {"max_window_layers"} if key not in base}
    assert read(base | noise) == read(base)
    nothing: list[Any] = [None, False, 0, {}, []]
    for empty in nothing:
        assert read(base | dict.fromkeys(SIGNS, empty)) == read(base)


@pytest.mark.parametrize("key", sorted(SIGNS))
def test_unmodelled_shapes_are_refused(key: str) -> None:
    text = refusal(LLAMA, **{key: {"some": 1} if key.endswith("config") else 8})
    assert text.startswith(f"config.json: {key}: ")
    assert ";" in text or "instead" in text


@pytest.mark.parametrize("base", ALL, ids=lambda base: str(base["model_type"]))
def test_each_size_must_be_stated(base: dict[str, Any]) -> None:
    for key in base:
        without = {name: value for name, value in base.items() if name != key}
        assert f"{key}: is missing" in refusal(without)
        assert f"{key}: is missing" in refusal(base, **{key: None})


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (
            LLAMA,
            {"model_type": "olmoo"},
            "model_type: 'olmoo' is not known; did you mean olmo",
        ),
        (LLAMA, {"num_key_value_head": 2}, "did you mean num_key_value_heads?; remove it if"),
        (LLAMA, {"zzz": 2}, "zzz: unknown key; remove it if it does not change the model's shape"),
        (GPT2, {"rope_theta": 1e4}, "rope_theta: unknown key"),
        (LLAMA, {"hidden_size": 0}, "hidden_size: 0 is out of range"),
        (LLAMA, {"num_hidden_layers": 10_001}, "out of range"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "true or false"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "not finite"),
        (LLAMA, {"rms_norm_eps": 0}, "out of range"),
        (LLAMA, {"hidden_act": 3}, "hidden_act"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, "differs by layer"),
        (QWEN3, {"head_dim": None}, "head_dim: is missing"),
        (OPT, {"layer_norm_elementwise_affine": False}, "norms have weights"),
        (MISTRAL, {"attention_bias": True}, "attention_bias: unknown key"),
    ],
)
def test_refuses(base: dict[str, Any], change: dict[str, Any], says: str) -> None:
    assert says in refusal(base, **change)


def test_reads_json_and_yaml_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "m.yaml").write_text("\n".join(f"{key}: {value}" for key, value in LLAMA.items()))
    models = {read_model(path).name: read_model(path) for path in (tmp_path / "config.json", str(tmp_path / "m.yaml"))}
    assert set(models) == {tmp_path.name, "m"}, "named by the folder, or by the file"
    assert {replace(model, name="llama") for model in models.values()} == {read(LLAMA)}
    assert read_model(tmp_path) == models[tmp_path.name]
    (tmp_path / "list.json").write_text("[1]")
    for missing in ("list.json", "none.json"):
        with pytest.raises(InputError, match=missing):
            read_model(tmp_path / missing)


KEYS = sorted(
    {key for facts in ARCHITECTURES.values() for key in facts.keys.values()}
    | {"layer_types", "attention_types", "attention_layers", "use_sliding_window", "max_window_layers"}
    | set(SIGNS)
    | {"rope_scaling", "rope_parameters", "name", "_name_or_path", "model_type"}
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.integers(0, 64)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["global", "local", "full_attention", "sliding_attention", "default", *ARCHITECTURES])
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(
    st.sampled_from([{}, *ALL]),
    st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), JUNK, max_size=4),
)
def test_junk_gives_a_model_or_one_line(base: dict[str, Any], change: dict[str, Any]) -> None:
    try:
        model = read(base | change)
    except InputError:
        return
    assert read(model.to_dict()) == model
    assert model.num_params > 0


@given(JUNK)
def test_anything_at_all_gives_a_model_or_one_line(data: Any) -> None:
    with pytest.raises(InputError):
        model_from_config(Section(data, "config.json"))
