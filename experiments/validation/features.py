"""Runs of models and ways of training that are not priced yet: their rows are skipped, by the feature that says so.

A row says so in its notes (`experts=64 top6`, `EP=8`, `LoRA`), in the name of its model (`mixtral-8x7b`,
`qwen3-30b-a3b`), or in a column of its own (`num_experts`, `lora_rank`).
"""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from hexiopt.ledger import OFF

ADAPTERS, QUANTISED = "adapters (LoRA)", "quantised weights"
_FEATURES = {
    "mixture of experts": (
        r"\bexperts?\s*[=:]\s*\d|\bEP\s*=\s*(?:[2-9]|1\d)|\bmoe|mixture.of.experts",
        r"moe|mixtral|\d+x\d+b|\ba\d+(?:\.\d+)?b\b|deepseek-?v[2-9]|gpt-oss",
        ("*expert*", "*moe*", "ep", "top_k", "topk"),
    ),
    ADAPTERS: (
        r"\b(?:q|do)?lora\b|\badapters?\b|(?<!\+)\bpeft\b",  # not the trainer `transformers+peft`
        r"lora\b",
        ("*lora*", "*adapter*", "*peft*"),
    ),
    QUANTISED: (r"\bquant\s*=\s*(?!none\b)\w", r"\b(?:gptq|awq|nf4|int[48])\b", ("*quant*",)),
    "state-space or linear-attention layers": (
        r"\bmamba|\blinear attention|\bstate.space",
        r"mamba|hybrid|nemotron-(?:3|h)\b",
        ("*mamba*",),
    ),
    "multi-head latent attention": (r"\bMLA\b", r"$^", ("*mla*",)),
    "multi-token prediction": (r"\bMTP\b(?!\s*=\s*0)", r"$^", ("*mtp*",)),
    "a vision encoder": (r"\bvision", r"\bvlm?\b|-vl\b", ("*vision*",)),
}
"""By feature: patterns of the notes and of the model's name, ignoring case, and names of columns."""


OF_KINDS = (
    *("mixture of experts", "multi-head latent attention", "multi-token prediction"),
    "state-space or linear-attention layers",
)
"""Features of models whose layers are of kinds that are known, and so priced."""


def unpriced_features(
    notes: str, model_name: str, others: Mapping[str, str], priced: Collection[str] = ()
) -> str | None:
    """The features of a run that are not priced, in words; None where there are none. `others` are its cells of columns
    beyond those of a row, `priced` features that its row states well enough."""
    features = [
        feature
        for feature, (in_notes, in_name, columns) in _FEATURES.items()
        if feature not in priced
        and (
            re.search(in_notes, notes, re.IGNORECASE)
            or re.search(in_name, model_name, re.IGNORECASE)
            or any(
                _matches(name, columns) and value.strip().lower() not in (*OFF, "1", "-")
                for name, value in others.items()
            )
        )
    ]
    return " and ".join(features) or None


def states_feature(column: str) -> bool:
    """Whether a column beyond those of a row says which feature a run has."""
    return any(_matches(column, columns) for _, _, columns in _FEATURES.values())


def _matches(column: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(column.strip().lower(), pattern) for pattern in patterns)
