"""Parameters of every type that is read, against transformers' own model, which is made without memory for weights."""

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.facts import Key
from hexiopt.files.models.hybrids import HYBRIDS
from hexiopt.files.models.mixtures import MIXTURES
from hexiopt.files.models.types import TYPES
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section
from tests import model_types
from tests.model_types import UNBUILT
from tests.slow import slow_but

QUICK = ("llama", "qwen3", "opt", "olmo2", "phi3", "stablelm", "cohere", "glm4", "falcon", "bloom", "apertus", "gptj")
NAMES = sorted(set(TYPES) - {DECODER, *MIXTURES, *HYBRIDS})  # those are in test_model_kinds
# Its output projection is as wide as the hidden size on both sides, or its norms are.
SQUARE = ("helium", "bitnet", "stablelm")
SWITCHES: dict[str, dict[str, tuple[Any, ...]]] = {  # that functions of a row read
    "falcon": {
        "new_decoder_architecture": (False, True),
        "multi_query": (False, True),
        "parallel_attn": (False, True),
        "num_ln_in_parallel_attn": (None, 1, 2),
        "num_kv_heads": (None, 2),
    },
    "gpt_bigcode": {"multi_query": (False, True)},
    "lfm2": {"intermediate_size": (96, 1000), "block_auto_adjust_ff_dim": (False, True), "block_multiple_of": (8, 256)},
    "opt": {"_remove_final_layer_norm": (False, True), "do_layer_norm_before": (False, True)},
    "apertus": {"hidden_act": ("xielu", "silu")},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Transformers warns of token ids beyond a small vocabulary."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def count_parameters(config: Any) -> int:
    """The parameters of transformers' model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def configuration(kind: str, **values: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**values)


def read(config: dict[str, Any]) -> ModelSpec:
    return model_from_config(Section(json.loads(json.dumps(config, default=str)), "config.json"))


def draw_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """Small random sizes and switches, by the keys of the type."""
    facts = TYPES[kind].facts
    kv_heads, group, head_dim = rng.randint(1, 3), rng.randint(1, 3), 2 * rng.randint(2, 8)
    if not isinstance(facts["num_kv_heads"], Key):
        group = 1
    if kind == "falcon":
        kv_heads *= 2
    heads = kv_heads * group
    own_dim = 4 if kind not in SQUARE and isinstance(facts["head_dim"], Key) and rng.random() < 0.5 else head_dim
    sizes = {
        "num_layers": rng.randint(1, 3),
        "hidden_size": heads * head_dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": own_dim,
        "ffn_size": rng.randint(10, 60),
        "vocab_size": rng.randint(50, 99),
        "max_positions": rng.randint(20, 99),
    }
    out: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    switches: dict[str, bool] = {}
    for field, fact in facts.items():
        if not isinstance(fact, Key):
            continue
        if isinstance(fact.default, bool):
            switches[fact.names[0]] = rng.random() < 0.5
        elif field in sizes:
            out[fact.names[0]] = sizes[field]
    if kind == "gpt_neo":
        out["attention_types"] = [[["global"], sizes["num_layers"]]]
    if kind == "internlm3":  # which has all biases or none
        switches["mlp_bias"] = switches["attention_bias"]
    switches.pop("use_sliding_window", None)
    return out | switches | {name: rng.choice(values) for name, values in SWITCHES.get(kind, {}).items()}


@pytest.mark.parametrize("kind", slow_but(QUICK, NAMES))
def test_default_configuration_has_the_parameters_of_transformers(kind: str) -> None:
    config = configuration(kind, **UNBUILT.get(kind, {}))
    spec = read(config.to_dict())
    assert spec.num_params == count_parameters(config)
    assert (spec.form is None) == (spec.architecture != DECODER)


@pytest.mark.parametrize("kind", slow_but(QUICK, NAMES))
def test_random_configurations_have_the_parameters_of_transformers(kind: str) -> None:
    """The whole file as transformers writes it, and the stated keys alone, with the defaults of the type."""
    rng = random.Random(kind)
    for _ in range(4):
        values = draw_config(kind, rng)
        config = configuration(kind, **values)
        expected = count_parameters(config)
        whole, short = read(config.to_dict()), read({"model_type": kind, **values})
        assert whole.num_params == expected, values
        assert short.num_params == expected, values
        assert whole.replace(name="same") == short.replace(name="same"), values
        assert read(whole.to_dict()) == whole


@pytest.mark.slow
def test_defaults_are_those_of_transformers() -> None:
    """Of every key that a type reads; sizes must be stated."""
    for kind in NAMES:
        config = configuration(kind).to_dict()
        for field, fact in TYPES[kind].facts.items():
            if (
                isinstance(fact, Key)
                and fact.names[0] in config
                and field in ("norm_eps", "activation", "max_positions")
            ):
                assert config[fact.names[0]] == fact.default, (kind, field)


@pytest.mark.parametrize("kind", [*QUICK, "mixtral", "gemma2", "bert", "mamba"])
def test_the_page_of_models_has_the_type_as_it_is_read(kind: str) -> None:
    assert model_types.row(kind)[1] in model_types.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_page_of_models_is_current_and_refuses_by_feature() -> None:
    assert model_types.PAGE.read_text(encoding="utf-8") == model_types.page(), "run make reference"
    outcomes = [model_types.row(kind)[0] for kind in model_types.kinds()]
    assert outcomes.count("read") >= 90
    assert "otherwise" not in outcomes


JUNK = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2.5,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "full_attention",
    [],
    ["x"],
    {},
    {"a": 1},
)


@pytest.mark.parametrize("kind", slow_but(NAMES[::4], NAMES))
def test_junk_in_a_file_gives_a_model_or_one_line(kind: str) -> None:
    rng = random.Random(kind)
    keys = [name for fact in TYPES[kind].facts.values() if isinstance(fact, Key) for name in fact.names]
    keys += ["layer_types", "rope_scaling", "rope_parameters", "sliding_window", "attn_config", *SWITCHES.get(kind, {})]
    for _ in range(150):
        config = {"model_type": kind, **draw_config(kind, rng)}
        for name in rng.sample(keys, rng.randint(1, 3)):
            config[name] = rng.choice(JUNK)
            if rng.random() < 0.2:
                del config[name]
        try:
            model = model_from_config(Section(config, "config.json"))
        except InputError as error:
            text = str(error)
        else:
            text = "config.json: "
            assert read(model.to_dict()) == model
        assert text.startswith("config.json: ")
