"""Orders of the machines, along which pipelines and stages are cut."""

from collections.abc import Iterator
from itertools import zip_longest

from hexiopt.problem import Problem
from solvers.sequence.clustering import by_machine, by_type

Machines = tuple[tuple[int, ...], ...]  # devices machine by machine


def machine_orders(problem: Problem) -> list[Machines]:
    """All machines, those of all types but one, of the fastest types, of every type alone: the fast ones first, last,
    or the types mixed."""
    rows = by_type(problem, by_machine(problem, problem.usable_devices))
    return list(dict.fromkeys(order for some in _subsets(rows) for order in _arranged(some)))


def _subsets(rows: list[Machines]) -> Iterator[list[Machines]]:
    yield rows
    for k in range(len(rows) - 1, -1, -1):
        if len(rows) > 1:
            yield rows[:k] + rows[k + 1 :]
    for k in range(len(rows) - 1, 0, -1):
        yield rows[:k]
    for row in rows:
        yield [row]


def _arranged(rows: list[Machines]) -> Iterator[Machines]:
    yield tuple(own for row in rows for own in row)
    yield tuple(own for row in reversed(rows) for own in row)
    # Of each type as large a part as of any other so far.
    places = [((k + 0.5) / len(row), at, own) for at, row in enumerate(rows) for k, own in enumerate(row)]
    yield tuple(own for _, _, own in sorted(places))
    yield tuple(own for turn in zip_longest(*rows) for own in turn if own is not None)
