"""What the papers report, from `experiments/data/hexiscale.yaml` and `hexiseq.yaml`, and how ours compares, in
words."""

from collections.abc import Iterable
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from experiments.studies.frame.words import span
from hexiopt.own_packages import own_package
from hexiopt.reading import read_mapping

HEXISCALE = "HexiScale, arXiv 2409.01143"
HEXISEQ = "HexiSeq, arXiv 2605.07569"


@cache
def paper(name: str) -> dict[str, Any]:
    """What a paper reports, as its file states it."""
    with as_file(files(own_package("experiments")).joinpath(f"data/{name}.yaml")) as file:
        return read_mapping(file)


def ratio_range(what: str) -> str:
    """The range of ratios that HexiScale's paper reports, in words."""
    ratios = paper("hexiscale")[what]
    return f"{ratios['least']:g} to {ratios['most']:g} ×"


def setting_figures(number: str, model: str) -> dict[str, float]:
    """The measurements of HexiScale's paper for a model in a setting; empty where it has none.

    They are peak FLOPS over the partner cluster's, the MFU of HexiScale and of Megatron as shares, and tokens/s over
    Megatron's, which is the ratio of MFU times FLOPS.
    """
    setting = paper("hexiscale")["settings"].get(number, {})
    if model not in setting.get("mfu", {}):
        return {}
    mfu, megatron, flops = setting["mfu"][model] / 100, setting["megatron"][model] / 100, setting["flops"]
    return {"flops": flops, "mfu": mfu, "megatron": megatron, "times": mfu / megatron * flops}


def verdict(who: str, ratios: Iterable[float], what: str, than: str = "ours") -> str:
    """A sentence comparing our ratios over `who` with the range `what` of HexiScale's paper; `than` names our side."""
    values, papers = list(ratios), paper("hexiscale")[what]
    fact = f"{than} is {span(values, '.2f')} × as fast; {HEXISCALE}, says {ratio_range(what)}"
    if min(values) < papers["least"]:
        return f"{who} does better here than the paper says: {fact}."
    if max(values) > papers["most"]:
        return f"{who} does worse here than the paper says: {fact}."
    return f"{who} is where the paper says: {fact}."
