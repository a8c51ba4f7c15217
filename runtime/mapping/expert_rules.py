"""How routers choose experts, and what experts compute, by the types of Hugging Face: facts that no price reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from hexiopt.problem.model import ModelSpec

SOFTMAX, SIGMOID, OF_CHOSEN = "softmax", "sigmoid", "softmax of the chosen"


@dataclass(frozen=True)
class RouterRule:
    """How logits become choices and weights.

    `scores` are the softmax over all experts, the sigmoid of each, or, once experts are chosen, the softmax over those
    (gpt-oss). With `is_normalized` the weights of a token's experts sum to one, before all are multiplied by `scale`.
    Of `num_groups` of experts only the `top_groups` with the largest sums of two scores are chosen from (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). With `has_bias`, a bias that balances loads is added to the scores for the choice.
    """

    scores: str = SOFTMAX
    is_normalized: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False


@dataclass(frozen=True)
class GateClamp:
    """The activation of gpt-oss: (up + 1) · gate · sigmoid(alpha · gate), where both are clamped to `limit`."""

    alpha: float
    limit: float


class _TypeRule(NamedTuple):
    """The rule of a type of Hugging Face where its file states none of the keys that it `reads`."""

    rule: RouterRule
    reads: tuple[str, ...] = ()


_FIELD_OF = {
    "norm_topk_prob": "is_normalized",
    "routed_scaling_factor": "scale",
    "n_group": "num_groups",
    "topk_group": "top_groups",
}
_PLAIN = _TypeRule(RouterRule(), ("norm_topk_prob",))
_RULES: Mapping[str, _TypeRule] = {
    "mixtral": _TypeRule(RouterRule(is_normalized=True)),
    "olmoe": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3_moe": _PLAIN,
    "deepseek_v3": _TypeRule(RouterRule(SIGMOID, True, 2.5, 8, 4, has_bias=True), tuple(_FIELD_OF)),
    "glm4_moe": _TypeRule(RouterRule(SIGMOID, True, has_bias=True), tuple(_FIELD_OF)),
    "gpt_oss": _TypeRule(RouterRule(OF_CHOSEN)),
    "qwen3_next": _TypeRule(RouterRule(is_normalized=True), ("norm_topk_prob",)),
}
ROUTED_TYPES = tuple(_RULES)
"""The types of Hugging Face whose routers are known."""


def model_type(model: ModelSpec) -> str:
    """The type of Hugging Face of a model with experts."""
    return str(_config(model)["model_type"])


def router_rule(model: ModelSpec) -> RouterRule:
    """The rule of a model: that of its type, with what its file states."""
    values = dict(model.router)
    rule, reads = _RULES[model_type(model)]
    return replace(rule, **{_FIELD_OF[key]: values[key] for key in reads if key in values})


def gate_clamp(model: ModelSpec) -> GateClamp | None:
    """How the gates of a model's experts are clamped, if they are."""
    config = _config(model)
    if model_type(model) != "gpt_oss":
        return None
    return GateClamp(float(config.get("swiglu_alpha", 1.702)), float(config.get("swiglu_limit", 7.0)))


@lru_cache(maxsize=16)
def _parsed(config: str) -> Mapping[str, Any]:
    values: Mapping[str, Any] = json.loads(config)
    return values


def _config(model: ModelSpec) -> Mapping[str, Any]:
    return _parsed(model.config)
