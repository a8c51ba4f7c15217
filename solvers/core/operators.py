"""Operators of a search as data: small changes of a solution, drawn by weight and counted."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Generic, TypeVar

from hexiopt.problem.problem import Problem
from hexiopt.solving.result import OperatorCounts

N = TypeVar("N")  # the neighbourhood: what an operator needs to know of the problem
T = TypeVar("T")  # the solution that it changes
C = TypeVar("C")  # the candidate that it gives


def _always(_: Problem) -> bool:
    return True


def _everywhere(_: Any, __: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Operator(Generic[N, T, C]):
    """A small change: `apply(neighbourhood, solution, rng)` gives a candidate, or None where there is none.

    `weight`: its tickets in the lottery. `needs`: of which problems it is an operator at all; `applies`: to which
    solutions it is worth applying.
    """

    name: str
    weight: int
    apply: Callable[[N, T, Random], C | None]
    needs: Callable[[Problem], bool] = _always
    applies: Callable[[N, T], bool] = _everywhere


@dataclass(slots=True)
class OperatorTally:
    """What became of the candidates of one operator; the fields are those of `OperatorCounts`."""

    proposed: int = 0
    valid: int = 0
    known: int = 0
    unfit: int = 0
    priced: int = 0
    accepted: int = 0
    improved: int = 0
    seconds: float = 0.0


class OperatorStatistics:
    """A tally for each operator of a search, by name."""

    def __init__(self) -> None:
        self._tallies: dict[str, OperatorTally] = {}

    def of(self, name: str) -> OperatorTally:
        """The tally of an operator, to be counted up."""
        return self._tallies.setdefault(name, OperatorTally())

    def counts(self) -> tuple[OperatorCounts, ...]:
        """All tallies, in the order in which operators were first drawn."""
        return tuple(OperatorCounts(name, **asdict(tally)) for name, tally in self._tallies.items())

    def add(self, counts: Sequence[OperatorCounts]) -> None:
        """Add the counts of another search for the same run."""
        for other in counts:
            tally = self.of(other.operator)
            for field in OperatorTally.__slots__:
                setattr(tally, field, getattr(tally, field) + getattr(other, field))


class Lottery(Generic[N, T, C]):
    """Draws operators of one table for one problem, as often as their weights say."""

    def __init__(
        self, table: Sequence[Operator[N, T, C]], near: N, problem: Problem, statistics: OperatorStatistics
    ) -> None:
        self.near, self._statistics = near, statistics
        self.operators = tuple(operator for operator in table if operator.needs(problem))
        self._tickets = [operator for operator in self.operators for _ in range(operator.weight)]
        self._choosy = any(operator.applies is not _everywhere for operator in self.operators)

    def draw(self, solution: T, rng: Random) -> tuple[OperatorTally, C] | None:
        """A candidate of a drawn operator and the operator's tally; None where there is none."""
        tickets = self._tickets
        if self._choosy:
            tickets = [operator for operator in tickets if operator.applies(self.near, solution)]
        if not tickets:
            return None
        operator = rng.choice(tickets)
        tally = self._statistics.of(operator.name)
        tally.proposed += 1
        candidate = operator.apply(self.near, solution, rng)
        if candidate is None or candidate == solution:
            return None
        tally.valid += 1
        return tally, candidate
