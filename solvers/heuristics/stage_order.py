"""The order of stages along fat links: a shortest Hamiltonian path over message times.

Exact by dynamic programming over subsets (Held and Karp, 1962) up to `EXACT` stages; beyond, HexiScale's top-τ greedy
method: from every start follow the τ fastest next messages, and keep the τ best paths of each length.
"""

from collections.abc import Sequence

import numpy as np

EXACT = 9
TAU = 4
MOST_TAU = 64
MOST_PATHS = 128  # kept of each length, in all


def best_order(routes: Sequence[Sequence[float]], tau: int | None = None) -> list[int]:
    """The order of all stages with the least sum of message times; `routes[a][b]` is the time from stage a to stage
    b. With `tau`, by the greedy method for any number of stages.
    """
    count = len(routes)
    if count <= 2:
        return list(range(count)) if count < 2 or routes[0][1] <= routes[1][0] else [1, 0]
    return _exact(routes) if count <= EXACT and tau is None else _greedy(routes, tau or TAU)


def _exact(routes: Sequence[Sequence[float]]) -> list[int]:
    count = len(routes)
    full = (1 << count) - 1
    # best[visited][last] = (length, stage before last)
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(full + 1)]
    for stage in range(count):
        best[1 << stage][stage] = (0.0, -1)
    for visited in range(1, full + 1):
        for last, (length, _) in best[visited].items():
            row = routes[last]
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


def _greedy(routes: Sequence[Sequence[float]], tau: int) -> list[int]:
    """Ties between equally long paths are broken by the order of their stages."""
    table = np.array(routes)
    count = len(table)
    nearest = np.argsort(table, axis=1, kind="stable")
    paths, lengths = np.arange(count)[:, None], np.zeros(count)
    visited, rank = np.eye(count, dtype=bool), np.arange(count)  # rank of a path, by its stages
    for _ in range(count - 1):
        last = paths[:, -1]
        free = ~np.take_along_axis(visited, nearest[last], axis=1)
        parent, at = np.nonzero(free & (free.cumsum(axis=1) <= tau))
        stage = nearest[last[parent], at]
        grown = lengths[parent] + table[last[parent], stage]
        best = np.lexsort((stage, rank[parent], grown))[: min(tau * count, MOST_PATHS)]
        parent, stage, lengths = parent[best], stage[best], grown[best]
        paths, visited = np.column_stack([paths[parent], stage]), visited[parent]
        visited[np.arange(len(parent)), stage] = True
        rank = np.argsort(np.lexsort((stage, rank[parent])))
    found: list[int] = paths[0].tolist()
    return found
