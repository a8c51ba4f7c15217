"""All ways to give a model's layers to the stages of a pipeline."""

from functools import cache
from itertools import combinations, pairwise

from hexiopt.problem.space import layer_ranges

Layers = tuple[tuple[tuple[int, int], ...], ...]  # per stage, its ranges


@cache
def layer_cuts(num_layers: int, num_stages: int, num_chunks: int, even: bool) -> tuple[Layers, ...]:
    """`num_chunks` ranges for each stage; `even`: stages differ by one layer at most."""
    found = []
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        held = [end - first for first, end in pairwise((0, *cuts, num_layers))]
        if min(held) >= num_chunks and (not even or max(held) - min(held) <= 1):
            found.append(tuple(layer_ranges(held, num_chunks)))
    return tuple(found)


def all_layer_cuts(num_layers: int, num_stages: int, most_chunks: int, even: bool) -> tuple[Layers, ...]:
    """The cuts into one range for each stage, and into several."""
    most = min(most_chunks, num_layers // num_stages) if num_stages > 1 else 1
    return tuple(cut for chunks in range(1, most + 1) for cut in layer_cuts(num_layers, num_stages, chunks, even))
