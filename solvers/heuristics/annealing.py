"""Simulated annealing of any solutions (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from solvers.core.operators import OperatorTally
from solvers.core.search import Allowance, Search


class Evaluated(Protocol):
    """A solution with its energy, which annealing minimises."""

    @property
    def energy(self) -> float:
        """For example the logarithm of the step time."""


T = TypeVar("T")  # a candidate
E = TypeVar("E", bound=Evaluated)
Acceptance = Callable[[float, float, Random], float]  # (energy, progress from 0 to 1, rng): the highest energy accepted


@dataclass(frozen=True, slots=True)
class Metropolis:
    """The Metropolis criterion, with a temperature that falls geometrically from `hot` to `cold`.

    Where energies are logarithms of seconds, a temperature of 0.01 accepts steps that are about 1 % longer.
    """

    hot: float
    cold: float

    def __call__(self, energy: float, progress: float, rng: Random) -> float:
        temperature: float = self.hot * (self.cold / self.hot) ** progress
        return energy - temperature * math.log(1.0 - rng.random())


def anneal(
    starts: Sequence[E],
    propose: Callable[[E, Random], tuple[OperatorTally, T] | None],
    evaluate: Callable[[T, E, float, OperatorTally], E | None],
    acceptance: Acceptance,
    allowance: Allowance,
    rng: Random,
) -> list[E]:
    """The best solution met from each of `starts`, annealed in turn until `allowance` is spent; every turn is a step.

    `propose` returns a candidate near a solution and the tally of its operator. `evaluate(candidate, now, limit,
    tally)` may return None where the energy certainly, or very probably, exceeds `limit`; it updates the tally.
    """
    search: Search = allowance.search
    nows, bests, turn = list(starts), list(starts), 0
    while nows and allowance and search.step():
        turn = (turn + 1) % len(nows)
        now, began_s = nows[turn], search.runtime_s
        proposed = propose(now, rng)
        if proposed is None:
            continue
        tally, candidate = proposed
        limit, best_s = acceptance(now.energy, allowance.spent, rng), search.best_s
        found = evaluate(candidate, now, limit, tally)
        tally.seconds += search.runtime_s - began_s
        tally.improved += search.best_s < best_s
        if found is None or found.energy > limit:
            continue
        tally.accepted += 1
        nows[turn] = found
        if found.energy < bests[turn].energy:
            bests[turn] = found
    return bests
