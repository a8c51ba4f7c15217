"""What training needs of a model beyond its shape, from the `config.json` that `ModelSpec.config` keeps."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, log, sqrt
from types import MappingProxyType
from typing import Any

from hexiopt.errors import InputError
from hexiopt.problem.architectures import DECODER, MAX_ROPE_THETA
from hexiopt.problem.execution import OF_CHOSEN, RULES, SIGMOID, Execution, Rotation, RouterRule, Temperature
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section


@dataclass(frozen=True)
class Stated:
    """The number above 0 under a key, or `default` where it is absent; None where it is null. `then` makes the fact."""

    key: str
    default: float | None = None
    then: Callable[[float], float] = float

    def of(self, config: Section) -> float | None:
        """The fact. Raises InputError."""
        if self.key in config and config.raw(self.key, None) is None:
            return None
        value: float | None = config.number(self.key, above=0, at_most=MAX_ROPE_THETA, default=self.default)
        return None if value is None else self.then(value)


@dataclass(frozen=True)
class Switch:
    """The flag under a key, or `default` where it is absent or null."""

    key: str
    default: bool

    def of(self, config: Section) -> bool:
        """The fact. Raises InputError."""
        return self.default if config.raw(self.key, None) is None else bool(config.flag(self.key))


_INFINITY = {"__float__": "Infinity"}  # as transformers writes it


@dataclass(frozen=True)
class Limits:
    """The two numbers under the first of `keys` that is there, from 0 on; None where none is."""

    keys: tuple[str, ...]

    def of(self, config: Section) -> tuple[float, float] | None:
        """The fact. Raises InputError."""
        key = next((key for key in self.keys if config.raw(key, None) is not None), None)
        if key is None:
            return None
        limits = [inf if limit == _INFINITY else limit for limit in config.items(key)]
        if len(limits) != 2 or not all(isinstance(limit, int | float) and limit >= 0 for limit in limits):
            config.fail(key, "is not two numbers from 0 on; state the least and the largest step")
        return float(limits[0]), float(limits[1])


class Tuning:
    """How queries of later tokens are scaled, where the file does not switch it off: Llama 4's keys."""

    def of(self, config: Section) -> Temperature | None:
        """The fact. Raises InputError."""
        is_on = config.raw("attn_temperature_tuning", None)  # a number in the first files
        if not isinstance(is_on, int | None):
            config.fail("attn_temperature_tuning", "is not true or false; write one of them")
        if is_on is not None and not is_on:
            return None
        tokens = config.number("floor_scale", above=0, at_most=MAX_ROPE_THETA, default=8192)
        return Temperature(tokens, config.number("attn_scale", at_least=0, at_most=MAX_ROPE_THETA, default=0.1))


@dataclass(frozen=True)
class Router:
    """The `rule` of a model's router, with what its file states under the keys that its type `reads`."""

    rule: RouterRule
    reads: tuple[str, ...] = ("norm_topk_prob",)

    def __call__(self, model: ModelSpec) -> RouterRule:
        """The fact."""
        values = dict(model.router)
        return replace(self.rule, **{_ROUTER[key]: values[key] for key in self.reads if key in values})


_ROUTER = {
    "norm_topk_prob": "is_normalized",
    "routed_scaling_factor": "scale",
    "n_group": "num_groups",
    "topk_group": "top_groups",
}
Facts = Mapping[str, Any]  # fields of `Execution`: values, what reads them, or functions of the model


def _root_of_width(model: ModelSpec) -> float:
    return sqrt(model.hidden_size)


def _inverse_root(value: float) -> float:
    return 1 / sqrt(value)


def _inverse(value: float) -> float:
    return 1 / value


_CAPS = {
    "score_cap": Stated("attn_logit_softcapping", 50.0),
    "logit_cap": Stated("final_logit_softcapping", 30.0),
}
_GEMMA = {
    "unit_norms": True,
    "embedding_scale": _root_of_width,
    "score_scale": Stated("query_pre_attn_scalar", 256, _inverse_root),
}
_GRANITE = {
    "score_scale": Stated("attention_multiplier", 1.0),
    "embedding_scale": Stated("embedding_multiplier", 1.0),
    "residual_scale": Stated("residual_multiplier", 1.0),
    "logit_scale": Stated("logits_scaling", 1.0, _inverse),
}
_PLAIN_ROUTER = {"router": Router(RouterRule())}
_BALANCED_ROUTER = {"router": Router(RouterRule(SIGMOID, True, has_bias=True), tuple(_ROUTER))}
_GRANITE_EXPERTS = _GRANITE | {"router": Router(RouterRule(OF_CHOSEN), ())}
_MAMBA = {"step_limits": Limits(("mamba_dt_limit", "time_step_limit"))}
TRAINED: Mapping[str, Facts] = MappingProxyType(
    {
        "llama": {},
        "mistral": {},
        "qwen2": {},
        "qwen3": {},
        "gemma2": _GEMMA | _CAPS,
        "gemma3_text": _GEMMA | {"logit_cap": Stated("final_logit_softcapping")},
        "olmo2": {"norms_after": True},
        "olmo3": {"norms_after": True},
        "arcee": {},
        "seed_oss": {},
        "granite": _GRANITE,
        "granite_swa": _GRANITE,
        "deepseek_v3": {
            "rope_interleaved": Switch("rope_interleave", True),
            "router": Router(RouterRule(SIGMOID, True, 2.5, 8, 4, has_bias=True), tuple(_ROUTER)),
        },
        "bamba": _MAMBA,
        "granitemoe": _GRANITE_EXPERTS,
        "granitemoe_swa": _GRANITE_EXPERTS,
        "granitemoeshared": _GRANITE_EXPERTS,
        "granitemoehybrid": _GRANITE_EXPERTS | _MAMBA,
        "nemotron_h": _MAMBA | _BALANCED_ROUTER,
        "qwen3_next": {"unit_norms": True, "router": Router(RouterRule(is_normalized=True))},
        "youtu": {"rope_interleaved": Switch("rope_interleave", True)},
        "mixtral": {"router": Router(RouterRule(is_normalized=True), ())},
        "olmoe": _PLAIN_ROUTER,
        "qwen2_moe": _PLAIN_ROUTER,
        "qwen3_moe": _PLAIN_ROUTER,
        "glm4_moe": _BALANCED_ROUTER,
        "gpt_oss": {
            "router": Router(RouterRule(OF_CHOSEN), ()),
            "gate_alpha": Stated("swiglu_alpha", 1.702),
            "gate_limit": Stated("swiglu_limit", 7.0),
        },
        "llama4_text": {
            "rope_interleaved": True,
            "temperature": Tuning(),
            "router": Router(RouterRule(SIGMOID), ()),
        },
        "cwm": {},
        "iquestcoder": {},
        "hyperclovax": {
            "score_scale": Stated("attention_multiplier"),
            "embedding_scale": Stated("embedding_multiplier", 1.0),
            "residual_scale": Stated("residual_multiplier", 1.0),
            "logit_scale": Stated("logits_scaling", 1.0),
        },
        "ministral": {},
        "gemma": {"unit_norms": True, "embedding_scale": _root_of_width},
        "vaultgemma": _GEMMA | _CAPS,
        "helium": {"rope_interleaved": True},
        "ernie4_5": {"rope_interleaved": True},
        "exaone4": {"norms_after": True},
        "flex_olmo": {"norms_after": True} | _PLAIN_ROUTER,
        "mellum": {"router": Router(RouterRule(is_normalized=True))},
        "dots1": {"router": Router(RouterRule(SIGMOID, has_bias=True), tuple(_ROUTER))},
        "solar_open": {"router": Router(RouterRule(SIGMOID, True, has_bias=True), tuple(_ROUTER))},
        "glm4_moe_lite": {
            "rope_interleaved": Switch("rope_interleave", True),
            "router": Router(RouterRule(SIGMOID, True, 1.8, has_bias=True), tuple(_ROUTER)),
        },
    }
)
"""The types that are trained, by Hugging Face's names, and the facts in which each differs from Llama."""

_WINDOW_THETA = {"gemma3_text": Stated("rope_local_base_freq", 10_000.0)}
"""The base of RoPE in layers with windows, which scale no frequencies, of types that state one for all others."""
_UNSCALED_WINDOWS = ("gemma3_text", "olmo3")
_ROTATED_WINDOWS = {"llama4_text": "attention_chunk_size", "exaone4": "sliding_window"}
"""Types that rotate no queries and keys of layers that attend to all tokens, unless this key is null."""

_NUMBERS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
    "partial_rotary_factor": "share",
    "rope_theta": "theta",
}
_SHARES: Mapping[str, float] = {"qwen3_next": 0.25, "bamba": 0.5, "glm4_moe": 0.5}
"""The share of a head that is rotated, of types that state it beside `rope_scaling`, by default."""
_BY_LAYER = "full_attention", "sliding_attention"
_YARN = {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_UNSTATED_ROPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"rope_type": "yarn", **_YARN},
    "mellum": dict(zip(_BY_LAYER, ({"rope_theta": 500_000.0}, {"rope_theta": 10_000.0}), strict=True)),
}
"""What types have where a file states nothing of it, if it is not the default."""
_HOLDERS = ("rope_parameters", "rope_scaling")


def execution_of(model: ModelSpec) -> Execution | None:
    """The facts of a model; None where its type is not one that is trained, or it was described by its fields alone.

    Raises InputError where its `config.json` states what cannot be trained.
    """
    config = json.loads(model.config) if model.config else {}
    kind = config.get("model_type", model.architecture)
    if kind not in TRAINED or kind == DECODER:
        return None
    return _execution(kind, model.config, model.router, model)


@lru_cache(maxsize=64)
def _execution(kind: str, config: str, router: tuple[tuple[str, Any], ...], model: ModelSpec) -> Execution:
    """Models that are equal may differ in `config` and `router`."""
    section = Section(json.loads(config) if config else {}, f"model {model.name}")
    values: dict[str, Any] = {}
    for name, fact in TRAINED[kind].items():
        if isinstance(fact, Stated | Switch | Limits | Tuning):
            value = fact.of(section)
        else:
            value = fact(model) if callable(fact) else fact
        if value is not None:
            values[name] = value
    rotation, of_windows = _rotations(kind, section, model)
    return Execution(**{"type": kind, "rotation": rotation, "window_rotation": of_windows} | values)


def _rotations(kind: str, config: Section, model: ModelSpec) -> tuple[Rotation | None, Rotation | None]:
    """Those of layers that attend to all tokens, and of layers with windows. Raises InputError."""
    if not model.rope or (kind == "granitemoehybrid" and config.raw("position_embedding_type", None) != "rope"):
        return None, None
    if model.rope_type != "default" and not model.config:
        raise InputError(
            f"model {model.name}: rope_type {model.rope_type}: its parameters are not stated; take its config.json"
        )
    holder = next((name for name in _HOLDERS if config.raw(name, None)), None)
    rope = Section(dict(_UNSTATED_ROPES.get(kind, {})), "") if holder is None else config.section(holder)
    if any(isinstance(rope.raw(name, None), dict) for name in _BY_LAYER):
        full, window = (_rotation(rope.section(name), model, {}) for name in _BY_LAYER)
    else:
        usual = _SHARES.get(kind)
        share = 1.0 if usual is None else config.number("partial_rotary_factor", above=0, at_most=1, default=usual)
        full = window = _rotation(rope, model, {"share": share})
        if kind in _UNSCALED_WINDOWS:
            theta = _WINDOW_THETA[kind].of(config) if kind in _WINDOW_THETA else full.theta
            window = Rotation(theta=theta or full.theta, share=full.share)
    thetas = config.raw("layer_rope_theta", None)
    if isinstance(thetas, list) and set(thetas) != {full.theta}:
        config.fail("layer_rope_theta", "differs by layer, which cannot be trained; state rope_theta for all")
    key = _ROTATED_WINDOWS.get(kind)
    is_rotated = key is None or (key in config and config.raw(key, None) is None)
    of_all = full if is_rotated else None
    if window != of_all and not model.layers:
        raise InputError(
            f"model {model.name}: layers with and without windows rotate positions differently, and no window is "
            "shorter than max_position_embeddings; state a shorter one"
        )
    return of_all, window


def _rotation(rope: Section, model: ModelSpec, usual: Mapping[str, Any]) -> Rotation:
    rule = rope.text("rope_type", default=None) or rope.text("type", default=None) or "default"
    if rule not in RULES:
        rope.fail("rope_type", f"cannot be trained; take one of {', '.join(RULES)}")
    values: dict[str, Any] = {"theta": model.rope_theta, "original_positions": model.max_positions, **usual}
    for key, field in _NUMBERS.items():
        value = rope.number(key, above=0, at_most=MAX_ROPE_THETA, default=None)
        values |= {} if value is None else {field: value}
    truncates = bool(rope.flag("truncate", True))
    rope.finish()
    rotation = Rotation(rule=rule, truncates=truncates, **values)
    if rule in ("linear", "llama3", "yarn") and "factor" not in rope:
        rope.refuse_missing("factor")
    return rotation


def yarn_scale(rotation: Rotation, mscale: float) -> float:
    """The factor by which YaRN scales queries and keys together for a longer context (section 3.4 of its paper)."""
    return 1.0 if rotation.factor <= 1 else 0.1 * mscale * log(rotation.factor) + 1.0
