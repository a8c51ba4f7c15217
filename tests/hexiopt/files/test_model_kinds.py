"""Types whose layers are of several kinds: parameters against transformers' own model, made without memory for weights,
and what is read of each key."""

import random
from typing import Any

import pytest

from hexiopt.files.models.facts import REQUIRED, Joint, Key, Mixers, ModelType
from hexiopt.files.models.hybrids import HYBRIDS
from hexiopt.files.models.mixtures import MIXTURES
from hexiopt.files.models.types import TYPES
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.kinds import Experts
from hexiopt.problem.model import ModelSpec
from tests.hexiopt.files.test_model_types import configuration, count_parameters, quiet, read
from tests.model_types import UNBUILT
from tests.slow import slow_but

__all__ = ["quiet"]

KINDS = {**MIXTURES, **HYBRIDS}
NAMES = sorted(set(KINDS) - {"kimi_k2"})  # which transformers calls deepseek_v3
QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_next", "gemma4_text", "llama4_text", "glm4_moe")
WINDOWED = ("gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "cwm", "vaultgemma", "smollm3", "qwen2", "qwen3")

SIZES: dict[str, tuple[int, ...]] = {
    "num_hidden_layers": (2, 3, 4, 7),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (4, 8),
    "hidden_size": (32, 64),
    "intermediate_size": (10, 33),
    "intermediate_size_mlp": (12, 35),
    "vocab_size": (50, 99),
    "max_position_embeddings": (8, 20, 99),
    "sliding_window": (4, 16),
    "attention_chunk_size": (4, 16),
    "q_lora_rank": (5, 9),
    "kv_lora_rank": (6, 10),
    "qk_nope_head_dim": (4, 6),
    "qk_rope_head_dim": (2, 4),
    "v_head_dim": (4, 10),
    "first_k_dense_replace": (0, 1, 2),
    "moe_intermediate_size": (7, 20),
    "shared_intermediate_size": (9, 24),
    "shared_expert_intermediate_size": (9, 24),
    "moe_shared_expert_intermediate_size": (9, 24),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "moe_num_shared_experts": (1, 2),
    "decoder_sparse_step": (1, 2),
    "interleave_moe_layer_step": (1, 2),
    "moe_layer_interval": (1, 2),
    "moe_layer_start_index": (0, 1),
    "moe_layer_end_index": (-1, 1, 2),
    "max_window_layers": (0, 1, 5),
    "num_nextn_predict_layers": (0, 1, 2),
    "mamba_n_heads": (2, 4, 8),
    "mamba_n_groups": (1, 2),
    "mamba_d_state": (4, 6),
    "mamba_d_conv": (3, 4),
    "mamba_num_heads": (4, 8),
    "mamba_head_dim": (4, 6),
    "ssm_state_size": (4, 6),
    "n_groups": (1, 2),
    "conv_kernel": (3, 4),
    "moe_latent_size": (0, 12),
    "linear_num_value_heads": (4, 8),
    "linear_num_key_heads": (2, 4),
    "linear_key_head_dim": (4, 6),
    "linear_value_head_dim": (4, 10),
    "linear_conv_kernel_dim": (3, 4),
    "global_head_dim": (6, 12),
    "num_global_key_value_heads": (1, 2),
}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def keys_of(kind: ModelType) -> list[Key]:
    """The keys of all rows."""
    rows = (kind.facts, kind.attention, kind.full, kind.recurrent, kind.experts)
    facts = [fact for row in rows for fact in row.values()]
    facts += [*([kind.extra] if kind.extra else []), *([kind.mixers.window] if kind.mixers else [])]
    keys = [fact for fact in facts if isinstance(fact, Key)]
    return [*keys, *(key for fact in facts if isinstance(fact, Joint) for key in fact.keys)]


def draw_config(name: str, rng: random.Random) -> dict[str, Any]:
    """Small random sizes and switches by the keys of a type."""
    kind = KINDS[name]
    stated = {key.names[0] for key in keys_of(kind)} | {*kind.placement.names, *(kind.mixers or Mixers()).names}
    out: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    out |= {size: rng.choice(values) for size, values in SIZES.items() if size in stated}
    out |= {key.names[0]: rng.random() < 0.5 for key in keys_of(kind) if isinstance(key.default, bool)}
    if "use_sliding_window" in stated:
        out["use_sliding_window"] = rng.random() < 0.5
    if kind.mixers and kind.mixers.others == "recurrent":
        out["num_hidden_layers"] = rng.choice((4, 5, 8))  # so many that one attends
    count = rng.randint(2, 6)
    out |= {key.names[0]: count for key in keys_of(kind) if key.names[0] in COUNTS}
    out |= {key.names[0]: rng.randint(1, count) for key in keys_of(kind) if key.names[0] in PER_TOKEN}
    out |= {word: value for word, value in special(name, out, rng).items() if value is not None}
    return {word: value for word, value in out.items() if word not in kind.ignores}


def special(name: str, values: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """What a type states in its own way; None: nothing."""
    layers = values.get("num_hidden_layers", 0)
    attending = rng.randrange(max(layers, 1))
    mixed = ["full_attention" if i == attending else "linear_attention" for i in range(layers)]
    if name in ("granitemoehybrid", "bamba", "falcon_h1"):  # whose heads share a width that follows
        return {
            "layer_types": mixed if name == "granitemoehybrid" else None,
            "attn_layer_indices": [attending] if name == "bamba" else None,
            "mamba_d_ssm": 16 if name == "falcon_h1" else None,
            "num_local_experts": rng.choice((0, 6)) if name == "granitemoehybrid" else None,
            "mamba_n_groups": 2 if values["mamba_n_heads"] > 1 else 1,
        }
    if name == "nemotron_h":
        words = ["linear_attention", "moe", "full_attention", "mlp"]
        blocks = [*rng.choices(words, k=rng.randint(1, 5)), "full_attention"]
        values.pop("num_hidden_layers")
        return {"layers_block_type": blocks, "mtp_layers_block_type": ["full_attention", "moe"]}
    if name == "gemma4_text":
        return {"hidden_size_per_layer_input": 0, "layer_types": rng.choice((None, ["sliding_attention"] * layers))}
    if name in ("qwen3_moe", "qwen2_moe", "qwen3_next"):
        return {"mlp_only_layers": rng.sample(range(layers), rng.randint(0, layers - 1))}
    if name == "llama4_text" and rng.random() < 0.5:
        return {"moe_layers": rng.sample(range(layers), 1), "no_rope_layers": rng.choices((0, 1), k=layers)}
    if "mlp_layer_types" in KINDS[name].names and rng.random() < 0.5:
        return {"mlp_layer_types": rng.choices(("dense", "sparse"), k=layers)}
    return {}


@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_default_configuration_has_the_parameters_of_transformers(name: str) -> None:
    config = configuration(name, **UNBUILT.get(name, {}))
    spec = read(config.to_dict())
    assert spec.num_params == count_parameters(config)
    assert spec.architecture == DECODER


@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_random_configurations_have_the_parameters_of_transformers(name: str) -> None:
    """The whole file as transformers writes it, and the stated keys alone, with the defaults of the type."""
    rng = random.Random(name)
    for _ in range(10):
        values = draw_config(name, rng)
        config = configuration(name, **values)
        expected = count_parameters(config)
        whole, short = read(config.to_dict()), read({"model_type": name, **values})
        assert whole.num_params == expected, values
        assert short.num_params == expected, values
        assert whole.replace(name="same") == short.replace(name="same"), values
        assert read(whole.to_dict()) == whole
        assert experts_of(short) == experts_of_model(config), values
        assert windows_of(short) == windows_of_configuration(config), values


def windows_of(model: ModelSpec) -> list[int | None]:
    """The window of each layer, None where no sequence of the model is longer."""
    windows = [kind.attention and kind.attention.window for kind in model.layers]
    windows = windows or [model.attention_window] * model.num_layers
    return [window if window is not None and window < model.max_positions else None for window in windows]


def windows_of_configuration(config: Any) -> list[int | None]:
    """The same by the words of transformers; a type without words has windows in all layers or none."""
    sliding, chunk = (getattr(config, name, None) or 10**9 for name in ("sliding_window", "attention_chunk_size"))
    words = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sizes = {"sliding_attention": sliding, "chunked_attention": chunk}
    longest = config.max_position_embeddings
    return [size if (size := sizes.get(word, longest)) < longest else None for word in words]


def experts_of(model: ModelSpec) -> list[int]:
    return [kind.experts.count if kind.experts else 0 for kind in model.layers] or [0] * model.num_layers


def experts_of_model(config: Any) -> list[int]:
    """The number of experts of each layer of transformers' model, by the shape of their matrices."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    out = [0] * config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if ".experts.down_proj" in name and not name.endswith("bias"):
            out[int(name.split(".layers.")[1].split(".")[0])] = parameter.shape[0]
    return out


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_stand_where_transformers_has_them(name: str) -> None:
    rng = random.Random(name)
    window = TYPES[name].mixers.window if TYPES[name].mixers else None
    assert window is not None
    for _ in range(10):
        layers = rng.randint(1, 9)
        sizes = {"num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 10, "vocab_size": 99, "max_position_embeddings": 99, "sliding_window": 8}
        if TYPES[name].mixers and TYPES[name].mixers.switch:
            sizes |= {"use_sliding_window": rng.random() < 0.7, "max_window_layers": rng.randint(0, 9)}
        config = configuration(name, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        expected = [8 if word == "sliding_attention" else None for word in config.layer_types]
        for model in (read(config.to_dict()), read({"model_type": name, **sizes})):
            windows = [kind.attention and kind.attention.window for kind in model.layers]
            assert (windows or [model.attention_window] * layers) == expected


def test_defaults_are_those_of_transformers() -> None:
    """Of every key of a part whose default is a number or a switch."""
    for name in NAMES:
        config = configuration(name, **UNBUILT.get(name, {})).to_dict()
        for key in keys_of(KINDS[name]):
            stated = key.names[0] not in UNBUILT.get(name, {}) and config.get(key.names[0]) is not None
            if stated and key.names[0] != "sliding_window" and key.default is not REQUIRED and key.default is not None:
                assert config[key.names[0]] == key.default, (name, key.names[0])


def test_a_number_may_be_stated_for_each_layer() -> None:
    values = draw_config("hunyuan_v1_moe", random.Random(0))
    once = read({"model_type": "hunyuan_v1_moe", **values})
    listed = {"moe_topk": [values["moe_topk"]] * values["num_hidden_layers"]}
    assert read({"model_type": "hunyuan_v1_moe", **values, **listed}) == once
    assert isinstance(once.layers[0].experts, Experts)
