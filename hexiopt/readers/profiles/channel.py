"""A link as measured messages show it: least squares of relative errors in which outliers count less."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]
_OUTLIER = 0.1  # relative error from which on a point counts less than its square
_ROUNDS = 30
_SEEN = 2.0  # times the fastest message: a bandwidth beyond it no point has shown


@dataclass(frozen=True)
class Channel:
    """Seconds of a message: `latency_s` and its bytes over `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


def channel_of(per_latency: Floats, per_byte: Floats, seconds: Floats) -> Channel:
    """The channel in which points take `per_latency` latencies and the time of `per_byte` bytes, all of shape [points].

    Its bandwidth is at most twice that of the fastest point, latency included. One point at least has bytes.
    """
    latency_s, s_per_byte = nonnegative([per_latency, per_byte], seconds)
    most_bytes_per_s = _SEEN * float((per_byte / seconds).max())
    return Channel(latency_s, 1.0 / max(s_per_byte, 1.0 / most_bytes_per_s))


def nonnegative(columns: Sequence[Floats], seconds: Floats) -> list[float]:
    """Coefficients of columns [points], none negative, whose sum is nearest to `seconds` [points] in relative terms.

    Nearest by the loss "soft L1": weighted least squares again and again, weights from the errors before.
    """
    relative = np.column_stack(columns) / seconds[:, None]
    scale = 1.0 / relative.max(axis=0)
    weights = np.ones_like(seconds)
    found = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        found, _norm = nnls(relative * scale * weights[:, None], weights)
        errors = relative @ (found * scale) - 1.0
        weights = (1.0 + (errors / _OUTLIER) ** 2) ** -0.25
    return [float(value) for value in found * scale]
