"""The least that layers of several kinds add up to in a stage, wherever it stands in the model."""

import numpy as np
from numpy.typing import NDArray

from hexiopt.problem.model import ModelSpec

Floats = NDArray[np.float64]


class Windows:
    """All ranges of consecutive layers of a model, by the numbers of layers of each kind in them.

    Values are of layers of each of `kinds_of` the model [..., kinds], sums by the number of layers [..., layers + 1].
    """

    def __init__(self, model: ModelSpec) -> None:
        kinds, depth = np.unique(np.array(model.depth), return_inverse=True)
        self._several, self._num_layers = len(kinds) > 1, model.num_layers
        before = np.concatenate([np.zeros((1, len(kinds))), np.cumsum(np.eye(len(kinds))[depth], axis=0)])
        counts = [np.unique(before[n:] - before[:-n], axis=0) for n in range(1, model.num_layers + 1)]
        self._counts = np.concatenate(counts)
        self._starts = np.cumsum([0, *map(len, counts[:-1])])

    @staticmethod
    def kinds_of(model: ModelSpec) -> tuple[int, ...]:
        """The numbers of the kinds that the layers of `model` have, ascending."""
        return tuple(sorted(set(model.depth)))

    def least(self, values: Floats, least_ranges: int = 1, most_ranges: int = 1) -> Floats:
        """The least sums of so many layers in one range, or in `least_ranges` to `most_ranges` as equal as possible."""
        n = np.arange(self._num_layers + 1)
        if not self._several:
            return np.asarray(values * n)
        sums = np.minimum.reduceat(values @ self._counts.T, self._starts, axis=-1)
        in_one = np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)
        if most_ranges == 1:
            return in_one
        best = np.full(in_one.shape, np.inf)
        for ranges in range(least_ranges, min(most_ranges, self._num_layers) + 1):
            length, longer = np.divmod(n, ranges)
            longest = np.minimum(length + 1, self._num_layers)
            best = np.minimum(best, longer * in_one[..., longest] + (ranges - longer) * in_one[..., length])
        return best
