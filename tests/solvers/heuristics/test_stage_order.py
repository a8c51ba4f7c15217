"""Orders of stages, against all orders where they are few, and against random ones where they are many."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers.heuristics.stage_order import EXACT, MOST_PATHS, TAU, best_order

Hops = list[list[float]]


@st.composite
def hop_tables(draw: st.DrawFn) -> Hops:
    count = draw(st.integers(1, 6))
    # Few values, so that ties happen; directions differ.
    value = st.one_of(st.sampled_from((0.0, 1.0, 2.0)), st.floats(0.0, 100.0))
    return [[0.0 if a == b else draw(value) for b in range(count)] for a in range(count)]


def path_length(routes: Hops, order: Sequence[int]) -> float:
    return sum(routes[a][b] for a, b in itertools.pairwise(order))


def shortest(routes: Hops) -> float:
    return min(path_length(routes, order) for order in itertools.permutations(range(len(routes))))


@given(hop_tables())
def test_exact_where_few(routes: Hops) -> None:
    order = best_order(routes)
    assert sorted(order) == list(range(len(routes)))
    assert path_length(routes, order) == pytest.approx(shortest(routes), rel=1e-12, abs=1e-12)


def test_exact_for_seven() -> None:
    rng = random.Random(1)
    for _ in range(3):
        routes = [[rng.random() for _ in range(7)] for _ in range(7)]
        assert path_length(routes, best_order(routes)) == pytest.approx(shortest(routes), rel=1e-12)


def test_no_stage_and_two() -> None:
    assert best_order([]) == []
    assert best_order([[0.0, 5.0], [3.0, 0.0]]) == [1, 0]


@pytest.mark.parametrize("seed", range(8))
def test_never_worse_than_random_where_many(seed: int) -> None:
    """Machines in racks: fat links inside, thin ones between."""
    rng = random.Random(seed)
    count = rng.randrange(EXACT + 1, 24)
    rack = [rng.randrange(4) for _ in range(count)]
    routes = [
        [rng.uniform(1.0, 1.5) if rack[a] == rack[b] else rng.uniform(5.0, 20.0) for b in range(count)]
        for a in range(count)
    ]
    order = best_order(routes)
    assert sorted(order) == list(range(count))
    length = path_length(routes, order)
    others = [path_length(routes, rng.sample(range(count), count)) for _ in range(2000)]
    assert length <= min(others)
    # Every rack but the first must be entered once; a good order hardly enters any twice.
    assert sum(rack[a] != rack[b] for a, b in itertools.pairwise(order)) <= len(set(rack))


def greedy_order(routes: Hops) -> list[int]:
    """The greedy's order, path by path."""
    count = len(routes)
    paths = [(0.0, [stage]) for stage in range(count)]
    for _ in range(count - 1):
        grown = []
        for length, path in paths:
            row = routes[path[-1]]
            free = sorted((stage for stage in range(count) if stage not in path), key=lambda stage: (row[stage], stage))
            grown += [(length + row[stage], [*path, stage]) for stage in free[:TAU]]
        paths = sorted(grown)[: min(TAU * count, MOST_PATHS)]
    return paths[0][1]


@pytest.mark.parametrize("values", [(0.5, 1.0, 2.0), tuple(k / 7 for k in range(1, 100))])
@pytest.mark.parametrize("count", [EXACT + 1, 17, 40])
def test_the_cheapest_next_hops_are_followed(count: int, values: tuple[float, ...]) -> None:
    """Ties between paths too."""
    rng = random.Random(count)
    routes = [[0.0 if a == b else rng.choice(values) for b in range(count)] for a in range(count)]
    assert best_order(routes) == greedy_order(routes)


@pytest.mark.parametrize("tau", [1, 2, 8])
def test_a_given_tau_is_followed_for_few_stages_too(tau: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(tau)
    routes = [[rng.random() for _ in range(6)] for _ in range(6)]
    given_tau = best_order(routes, tau)
    monkeypatch.setitem(greedy_order.__globals__, "TAU", tau)
    assert given_tau == greedy_order(routes)
    assert path_length(routes, given_tau) >= shortest(routes) - 1e-12
