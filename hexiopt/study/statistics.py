"""Means with intervals, and paired tests, of step times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.95
"""Of all intervals."""


@dataclass(frozen=True)
class Mean:
    """A mean with the ends of its interval (Student's t); None where a single value has none."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """The mean of at least one value."""
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean, None, None)
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)

    @classmethod
    def geometric(cls, values: Sequence[float]) -> "Mean":
        """The geometric mean of at least one positive value; its interval is that of the logarithms."""
        logs = cls.of([math.log(value) for value in values])
        return cls(*(None if log is None else math.exp(log) for log in (logs.mean, logs.low, logs.high)))  # type: ignore[arg-type]


def signed_rank_p(ratios: Sequence[float]) -> float | None:
    """The two-sided p-value of Wilcoxon's signed-rank test (Biometrics Bulletin 1945, doi 10.2307/3001968) on the
    logarithms of paired ratios, whose median it takes to be 0; None where all pairs are equal."""
    logs = [math.log(ratio) for ratio in ratios]
    if not any(logs):
        return None
    from scipy.stats import wilcoxon

    return float(wilcoxon(logs).pvalue)
