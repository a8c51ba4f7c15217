"""The quality of predictions: errors in percent, and the ranking of configurations.

The error of a row is |predicted − measured| / measured in the row's own metric. Spearman's ρ is computed over the rows
of one family (source, model and cluster); values that differ by less than 3 % count as ties.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from experiments.validation.predict import Case
from experiments.validation.rows import Row
from hexiopt.numbers.gpus import QUANTIZED_BYTES

Floats = NDArray[np.float64]
Predicted = tuple[Case, float]  # a case and its predicted metric
T = TypeVar("T")
K = TypeVar("K")
TIE = 0.03
_HALF = ("bf16", "fp16")
_RESAMPLES = 1000


@dataclass(frozen=True)
class Scored:
    """Errors of some rows, in percent; `bias` is the mean of predicted over measured step times, less one.

    `median_interval` holds the median of other rows of the kind in nine of ten cases, by the bootstrap.
    """

    num_rows: int
    mean_percent: float
    median_percent: float
    p90_percent: float
    bias_percent: float
    median_interval_percent: tuple[float, float]

    @classmethod
    def of(cls, rows: Sequence[Predicted]) -> "Scored":
        """The scores of (case, predicted metric)."""
        ratio = np.array([value / case.row.value for case, value in rows])
        is_time = np.array([case.row.metric == "iter_time_s" for case, _ in rows])
        return cls.of_ratios(ratio, np.where(is_time, ratio, 1.0 / ratio))

    @classmethod
    def of_ratios(cls, ratio: Floats, slower: Floats | None = None) -> "Scored":
        """The scores of predicted over measured values; `slower` are those of times, where the values are rates."""
        slower = ratio if slower is None else slower
        errors = 100.0 * np.abs(ratio - 1.0)
        return cls(
            len(ratio),
            float(errors.mean()),
            float(np.median(errors)),
            float(np.quantile(errors, 0.9)),
            float(100.0 * (slower.mean() - 1.0)),
            _interval(errors),
        )


def _interval(errors: Floats) -> tuple[float, float]:
    """The 5th and 95th percentile of medians of resampled errors (Efron, Annals of Statistics 7(1), 1979)."""
    drawn = np.random.default_rng(0).choice(errors, (_RESAMPLES, len(errors)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.05, 0.95))
    return float(low), float(high)


def is_fitted(row: Row) -> bool:
    """Whether constants are fitted on the row: its precision is stated and ours. Kernels for rows with scales of their
    own were no faster than BF16, the source says."""
    words = re.findall(r"[a-z0-9]+", row.precision.lower().split("(")[0])
    return "rowwise" not in words and not {"bf16", "fp16", *QUANTIZED_BYTES}.isdisjoint(words)


def is_half_precision(row: Row) -> bool:
    """Whether the row states BF16 or FP16."""
    return any(name in row.precision.lower().split("(")[0] for name in _HALF)


def group_by(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The rows of each key, in their order of appearance."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def gpu_types(case: Case) -> str:
    """The GPU types of a case without their memory: `a100 sxm`."""
    names = (gpu.name.split("_") for gpu in case.problem.cluster.types)
    return " + ".join(sorted({" ".join(word for word in words if not word.endswith("gb")) for words in names}))


def family(case: Case) -> tuple[str, str]:
    """Source and model, and the cluster."""
    row = case.row
    memory = f" {row.gpu_mem_gb:g} GB" if row.gpu_mem_gb else ""
    return f"{row.source}: {row.model_name}", f"{row.gpus} {row.gpu}{memory}"


def spearman(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Spearman's ρ, with values within 3 % of each other as ties; NaN where all values of one side are ties."""
    a, b = (_ranks(np.array(values, float)) for values in (measured, predicted))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Floats) -> Floats:
    """For each value, the number of smaller ones, ties counting half."""
    ratio = values[:, None] / values
    less = (ratio > 1.0 + TIE).sum(axis=1)
    tied = ((ratio <= 1.0 + TIE) & (ratio >= 1.0 / (1.0 + TIE))).sum(axis=1)
    ranks: Floats = less + 0.5 * tied
    return ranks
