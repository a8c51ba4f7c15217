"""Orders of the machines, along which pipelines and stages are cut."""

from collections.abc import Iterator
from itertools import combinations

from hexiopt.problem.problem import Problem
from solvers.sequence.grouping import by_machine, by_type

Machines = tuple[tuple[int, ...], ...]  # devices machine by machine
_FEW_TYPES = 4  # types of GPUs of which all sets are tried


def machine_orders(problem: Problem) -> list[Machines]:
    """Machines of all types, and of sets of types: the fast ones first, or the types mixed; of all, also the
    fast ones last."""
    rows = by_type(problem, by_machine(problem, problem.usable_devices))
    orders = (order for some in _subsets(rows) for order in _arranged(some, whole=len(some) == len(rows)))
    return list(dict.fromkeys(orders))


def _subsets(rows: list[Machines]) -> Iterator[list[Machines]]:
    """All sets of types, the largest first; of many, those without one, the fastest ones, and each alone."""
    if len(rows) <= _FEW_TYPES:
        for count in range(len(rows), 0, -1):
            yield from map(list, combinations(rows, count))
        return
    yield rows
    for k in range(len(rows) - 1, -1, -1):
        yield rows[:k] + rows[k + 1 :]
    for k in range(len(rows) - 1, 0, -1):
        yield rows[:k]
    for row in rows:
        yield [row]


def _arranged(rows: list[Machines], *, whole: bool) -> Iterator[Machines]:
    yield tuple(own for row in rows for own in row)
    if whole:
        yield tuple(own for row in reversed(rows) for own in row)
    # Of each type as large a part as of any other so far.
    places = [((k + 0.5) / len(row), at, own) for at, row in enumerate(rows) for k, own in enumerate(row)]
    yield tuple(own for _, _, own in sorted(places))
