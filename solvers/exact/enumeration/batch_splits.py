"""The best split of the global batch over pipelines, for many ways to choose the layers of each at once."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def least_longest(seconds: Sequence[Floats], total: int) -> Floats:
    """The least longest of one time for each pipeline whose sequences sum to `total`; infinite where none do.

    `seconds[p][c, n]` is the time of pipeline p, choice c, for n sequences (infinite where it cannot); shape
    [choices of p, total + 1]. The result has all combinations of choices, the last pipeline's varying fastest.
    """
    last = seconds[-1]
    before = reduce(_beside, seconds[:-1], np.array([[0.0] + [np.inf] * total]))
    found: Floats = np.min(np.maximum(before[:, None, :], last[None, :, ::-1]), axis=2).ravel()
    return found


def _beside(before: Floats, own: Floats) -> Floats:
    """Per combination and sum of sequences, the least longest time of pipelines `before` and one more."""
    found = np.full((len(before), len(own), before.shape[1]), np.inf)
    for n in np.flatnonzero(np.isfinite(own).any(axis=0)).tolist():
        longer = np.maximum(before[:, None, : before.shape[1] - n], own[None, :, n, None])
        np.minimum(found[:, :, n:], longer, out=found[:, :, n:])
    return found.reshape(-1, before.shape[1])
