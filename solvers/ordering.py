"""The order of stages along fat links: a shortest Hamiltonian path over hop times.

Exact by dynamic programming over subsets (Held and Karp, 1962) up to `EXACT` stages; beyond, HexiScale's top-τ
greedy: from every start follow the τ cheapest next hops, keeping the τ best paths of each length.
"""

from collections.abc import Sequence
from heapq import nsmallest
from itertools import islice

EXACT = 9
TAU = 4
_MOST_PATHS = 128  # kept of each length, in all


def best_order(hops: Sequence[Sequence[float]]) -> list[int]:
    """An order of all stages with the least sum of hops. `hops[a][b]` is the time from stage a to b."""
    count = len(hops)
    if count <= 2:
        return list(range(count)) if count < 2 or hops[0][1] <= hops[1][0] else [1, 0]
    return _exact(hops) if count <= EXACT else _greedy(hops)


def _exact(hops: Sequence[Sequence[float]]) -> list[int]:
    count = len(hops)
    full = (1 << count) - 1
    # best[visited][last] = (length, stage before last)
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(full + 1)]
    for stage in range(count):
        best[1 << stage][stage] = (0.0, -1)
    for visited in range(1, full + 1):
        for last, (length, _) in best[visited].items():
            row = hops[last]
            for stage in range(count):
                bit = 1 << stage
                if visited & bit:
                    continue
                found = best[visited | bit].get(stage)
                if found is None or length + row[stage] < found[0]:
                    best[visited | bit][stage] = (length + row[stage], last)
    last = min(best[full], key=lambda stage: best[full][stage][0])
    order, visited = [], full
    while last >= 0:
        order.append(last)
        visited, last = visited & ~(1 << last), best[visited][last][1]
    return order[::-1]


def _greedy(hops: Sequence[Sequence[float]]) -> list[int]:
    count = len(hops)
    nearest = [sorted(range(count), key=lambda stage: (row[stage], stage)) for row in hops]
    paths = [(0.0, [stage]) for stage in range(count)]
    for _ in range(count - 1):
        grown = []
        for length, path in paths:
            row, visited = hops[path[-1]], set(path)
            free = (stage for stage in nearest[path[-1]] if stage not in visited)
            grown += [(length + row[stage], [*path, stage]) for stage in islice(free, TAU)]
        paths = nsmallest(min(TAU * count, _MOST_PATHS), grown)
    return paths[0][1]
