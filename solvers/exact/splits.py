"""All ways to divide a model's layers among the stages of a pipeline, and the best split of the batch over
pipelines.
"""

from collections.abc import Sequence
from functools import cache, reduce
from itertools import combinations, pairwise

import numpy as np

from hexiopt.plan.token_layout import Floats
from hexiopt.problem.space import layer_ranges

Layers = tuple[tuple[tuple[int, int], ...], ...]  # per stage, its ranges


@cache
def layer_cuts(num_layers: int, num_stages: int, num_chunks: int, even: bool) -> tuple[Layers, ...]:
    """All cuts into `num_chunks` ranges per stage; `even`: stages differ by at most one layer."""
    found = []
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        held = [end - first for first, end in pairwise((0, *cuts, num_layers))]
        if min(held) >= num_chunks and (not even or max(held) - min(held) <= 1):
            found.append(tuple(layer_ranges(held, num_chunks)))
    return tuple(found)


def all_layer_cuts(num_layers: int, num_stages: int, most_chunks: int, even: bool) -> tuple[Layers, ...]:
    """All cuts into one range per stage, and into several."""
    most = min(most_chunks, num_layers // num_stages) if num_stages > 1 else 1
    return tuple(cut for chunks in range(1, most + 1) for cut in layer_cuts(num_layers, num_stages, chunks, even))


def least_longest(seconds: Sequence[Floats], total: int) -> Floats:
    """The least possible maximum of one time per pipeline, with sequences that sum to `total`; infinite where
    impossible.

    `seconds[p][c, n]` is the time of pipeline p under choice c for n sequences (infinite where impossible), of shape
    [choices of p, total + 1]. The result covers all combinations of choices, the last pipeline's varying fastest.
    """
    last = seconds[-1]
    before = reduce(_with_one_more, seconds[:-1], np.array([[0.0] + [np.inf] * total]))
    found: Floats = np.min(np.maximum(before[:, None, :], last[None, :, ::-1]), axis=2).ravel()
    return found


def _with_one_more(before: Floats, own: Floats) -> Floats:
    """For each combination and sum of sequences, the least possible maximum over pipelines `before` and one more."""
    found = np.full((len(before), len(own), before.shape[1]), np.inf)
    for n in np.flatnonzero(np.isfinite(own).any(axis=0)).tolist():
        longer = np.maximum(before[:, None, : before.shape[1] - n], own[None, :, n, None])
        np.minimum(found[:, :, n:], longer, out=found[:, :, n:])
    return found.reshape(-1, before.shape[1])
