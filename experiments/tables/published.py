"""What the papers report, from `experiments/data/hexiscale.yaml` and `hexiseq.yaml`; how ours compares, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from experiments.tables.markdown import span
from hexiopt.reading import read_mapping

SOURCE = "HexiScale, arXiv 2409.01143"
HEXISEQ_SOURCE = "HexiSeq, arXiv 2605.07569"


@dataclass(frozen=True)
class Range:
    """A range of ratios that a paper reports."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g} ×"


@dataclass(frozen=True)
class Measured:
    """What the paper measured in a setting: its FLOPS over the partner's, and MFU as shares."""

    flops_ratio: float
    mfu: float
    megatron_mfu: float

    @property
    def throughput_ratio(self) -> float:
        """HexiScale's tokens/s over Megatron's: MFU times FLOPS."""
        return self.mfu / self.megatron_mfu * self.flops_ratio


@dataclass(frozen=True)
class Ratios:
    """The mean and the highest of ratios that a paper reports."""

    mean: float
    most: float


@cache
def _data(paper: str = "hexiscale") -> dict[str, Any]:
    with as_file(files("experiments").joinpath(f"data/{paper}.yaml")) as file:
        return read_mapping(file)


def homogeneous_mean() -> float:
    """Mean throughput over the best homogeneous baseline."""
    return float(_data()["homogeneous"]["mean"])


def homogeneous_most() -> float:
    """The best of these ratios."""
    return float(_data()["homogeneous"]["most"])


def rival_range() -> Range:
    """Throughput over the heterogeneity-aware planners of `compared_rivals`."""
    return Range(_data()["rivals"]["least"], _data()["rivals"]["most"])


def compared_rivals() -> tuple[str, ...]:
    """The solvers that stand for the planners the paper compares with."""
    return tuple(_data()["rivals"]["names"])


def random_range() -> Range:
    """Throughput over a random partition."""
    return Range(_data()["random"]["least"], _data()["random"]["most"])


def measured(number: str, model: str) -> Measured | None:
    """What the paper measured for a model in a setting; None where it did not."""
    setting = _data()["settings"].get(number, {})
    if model not in setting.get("mfu", {}):
        return None
    return Measured(setting["flops"], setting["mfu"][model] / 100, setting["megatron"][model] / 100)


def sequence_ratios(where: str) -> Ratios:
    """Throughput of HexiSeq over the best baseline on its `testbed` or in its `simulations`."""
    return Ratios(**_data("hexiseq")[where])


def sequence_pairs() -> float:
    """How far mixed clusters are at most from homogeneous ones of like FLOPS, as a share of throughput."""
    return float(_data("hexiseq")["pairs"])


def scheduling_s() -> dict[int, float]:
    """HexiSeq's seconds of scheduling by number of GPUs."""
    return dict(_data("hexiseq")["scheduling_s"])


def verdict(who: str, ratios: Sequence[float], paper: Range, than: str = "ours") -> str:
    """A sentence that compares ratios of `than` over `who` with a paper's range of them."""
    low, high = min(ratios), max(ratios)
    fact = f"{than} is {span(ratios, '.2f')} × as fast; {SOURCE}, says {paper}"
    if low < paper.least:
        return f"{who} does better here than the paper says: {fact}."
    if high > paper.most:
        return f"{who} does worse here than the paper says: {fact}."
    return f"{who} is where the paper says: {fact}."
