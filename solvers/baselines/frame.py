"""The frame of a rival planner: its published search, with its own estimate, behind the contract of a solver.

A rival enumerates the plans of its own space and ranks them by its own estimate of the step time, as published.
It is not beaten for a poor estimate, though: beyond the plan that it would pick, the next best by its estimate are
priced by our cost model too, and the best that fits is its answer. What it cannot express stays its own limit.
"""

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Capabilities
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver

_PATIENCE = 500  # plans that fit are priced without a better one before the rest, worse by the estimate, is left
_ENUMERATION = 0.6  # share of the time limit for the rival's own search; the rest is for pricing


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of a rival's space, made only when it is wanted, and the rival's own estimate of its step time.

    `make` gives None where it comes to nothing, or to nothing new. Candidates of an earlier `turn` are priced first,
    where a rival compares its estimates only among some of its plans. `near` has plans of the space that differ in one
    choice: the best plan priced is changed one by one while that helps.
    """

    estimate_s: float
    make: Callable[[], Plan | None]
    turn: int = 0
    near: "Callable[[], Iterator[Candidate]] | None" = None


class Rival(SearchSolver):
    """A rival planner as a `Solver`: a subclass says what its space is and how it ranks it.

    Options of a rival are fields of a frozen dataclass, so that the registry and the command line know them.
    """

    capabilities = Capabilities(kind="baseline")

    @abstractmethod
    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """The rival's own search. Estimates are in seconds; infinite ones are left out.

        What takes longer than some ms between two candidates asks `search.go_on()` itself.
        """

    @abstractmethod
    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """The first rule of the rival's space that `plan`, valid for `problem`, breaks, in words; None if none."""

    @abstractmethod
    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """A random plan of the rival's space, for the test of fairness; it may exceed memory. None: a dead end."""

    def search(self, run: Search, rng: random.Random) -> None:
        """Price the candidates, best estimate first; steps are plans priced. May raise InputError."""
        refused = _price(run, ranked(self, run))
        if run.plan is None and run.nearest is None and refused:
            run.reason = (
                f"no plan of {self.name}'s space obeys the plan space asked for: {refused}; choose solver=portfolio"
            )


def ranked(rival: Rival, search: Search) -> list[Candidate]:
    """All candidates found in time, by turn, best estimate first; equal estimates in the order found."""
    found = []
    for candidate in rival.candidates(search, random.Random(search.seed)):
        if candidate.estimate_s < float("inf"):
            found.append(candidate)
        if not search.go_on(_ENUMERATION):
            break
    return sorted(found, key=lambda candidate: (candidate.turn, candidate.estimate_s))


def _price(search: Search, order: list[Candidate]) -> str:
    """Price candidates in order while patience and budget last. Returns why the first invalid one is not allowed."""
    pricing = _Pricing(search)
    for candidate in order:
        if pricing.waited >= _PATIENCE or not search.go_on():
            break
        pricing.price(candidate)
    improved = True
    while improved and pricing.best is not None and pricing.best.near is not None:
        improved = any(search.go_on() and pricing.price(changed) for changed in pricing.best.near())
    return pricing.refused


class _Pricing:
    """Candidates priced so far: which was best, why the first refused one was, how many have come since the best."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.best: Candidate | None = None
        self.refused, self.waited = "", 0
        self._seen: set[Plan] = set()

    def price(self, candidate: Candidate) -> bool:
        """Price one, if it makes a new plan; whether it is the best so far."""
        search, plan = self.search, candidate.make()
        if plan is None or plan in self._seen:
            return False
        self._seen.add(plan)
        broken = check(search.problem, plan)
        if broken:
            self.refused = self.refused or str(broken[0])
            return False
        search.step()
        before_s = search.best_s
        pipelines = search.pricer.pipelines(plan)
        if max(pipeline.end_s for pipeline in pipelines) < before_s:
            search.offer(plan, search.pricer.price(plan, pipelines))
        if search.best_s < before_s:
            self.best, self.waited = candidate, 0
            return True
        if all(stage.excess_bytes <= 0 for pipeline in pipelines for stage in pipeline.stages):
            self.waited += 1
        return False
