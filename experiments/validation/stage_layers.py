"""How the layers of a measured run divide into stages.

Notes that are read: `layer partition` (of pipeline modules, two of which precede the layers), `layers_per_stage` (with
the embedding and the head as layers), and `layout`, as in Megatron-Core: `Et*4|(tttt|)*14tmL` are layer ranges of the
stages in turn, with E the embedding, t a layer, m a layer that predicts further tokens, L the head.
"""

import json
import re
from itertools import pairwise

from experiments.validation.rows import Row
from experiments.validation.shapes import InexpressibleError
from hexiopt.problem.model import ModelSpec

_MODULES_BEFORE = 2  # modules of AMP's pipeline before the layers
_MOST_RANGES = 4096


def stage_layers(row: Row, model: ModelSpec, num_stages: int) -> list[int]:
    """The number of layers of each stage [stages]; as even as possible, earlier stages first, where nothing is stated.

    Megatron counts embedding, head and layers that predict further tokens as layers where the layers of a model with
    experts do not divide; here these are the last stage's. Raises InexpressibleError.
    """
    num_layers = model.num_layers
    cut, counts_text, layout = row.note("layer partition"), row.note("layers_per_stage"), row.note("layout")
    if cut is not None:
        edges = [min(max(int(n) - _MODULES_BEFORE, 0), num_layers) for n in re.findall(r"\d+", cut.split("]")[0])]
        return [end - first for first, end in pairwise(edges)]
    if counts_text is not None:
        try:
            counts = [int(n) for n in json.loads(counts_text)]
        except (TypeError, ValueError):
            raise InexpressibleError(f"layers_per_stage={counts_text} is not a list of numbers") from None
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    layout = layout or next(iter(re.findall(r"(?:^|;)layout (E[^;\s]+)", row.notes)), None)
    if layout is not None and model.shares_experts:
        return _by_layout(layout, num_stages)
    further = len(model.extra_layers)
    if model.shares_experts and num_layers % num_stages and not (num_layers + 2 + further) % num_stages:
        layers_per_stage = (num_layers + 2 + further) // num_stages
        return [layers_per_stage - 1] + [layers_per_stage] * (num_stages - 2) + [layers_per_stage - 1 - further]
    low, extra = divmod(num_layers, num_stages)
    return [low + (k < extra) for k in range(num_stages)]


def _by_layout(layout: str, num_stages: int) -> list[int]:
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([a-zA-Z])\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * min(int(match[2]), _MOST_RANGES), layout)
    ranges = layout.split("|")
    if len(ranges) % num_stages:
        raise InexpressibleError("layers do not divide into the stages")
    counts = [sum(part.count("t") for part in ranges[s::num_stages]) for s in range(num_stages)]
    for s in range(num_stages - 1):  # further layers are priced in the last stage: one of its layers takes their place
        moved = sum(part.count("m") for part in ranges[s::num_stages])
        counts[s], counts[-1] = counts[s] + moved, counts[-1] - moved
    return counts
