"""The frame of our solvers: the one body of `solve`, around one abstract method."""

import math
import random
from abc import ABC, abstractmethod
from typing import ClassVar

from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Capabilities, OnProgress, Pricer, refuse
from hexiopt.solving.result import Result
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import PricedPlan
from solvers.core.partition import Partition
from solvers.core.search import Search
from solvers.frame.infeasible import conclude, proven_infeasible


class SearchSolver(ABC):
    """A `Solver` whose subclass only defines the search; budget, best plan, trajectory and reason are handled here.

    Its parameters are the fields of a frozen dataclass, so that the registry and the command line know them.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @abstractmethod
    def search(self, run: Search, rng: random.Random) -> None:
        """Offer plans to `run` until it says that the budget is spent. May raise InputError."""

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        on_progress: OnProgress | None = None,
        start: Plan | None = None,
    ) -> Result:
        """The best plan found within `budget`, none slower than `start`; without one, the reason.

        Raises InputError for what its capabilities do not cover, and where a package is missing.
        """
        refuse(self, problem, pricer)
        run = Search(self.name, problem, budget, seed, pricer, on_progress)
        run.begin_at(start)
        if self.capabilities.kind == "baseline":
            run.remedy = f"{self.name} plans within its own space, so try solver=portfolio"
        elif self.capabilities.sequence == "only":
            run.remedy = f"{self.name} plans sequence layouts only, so try solver=portfolio"
        if not proven_infeasible(run):
            self.search(run, random.Random(seed))
        return conclude(run)


def offer_partition(
    run: Search, completer: PlanCompleter, partition: Partition, limit_s: float = math.inf
) -> PricedPlan | None:
    """Complete and price a partition, and offer its plan to the search.

    None where the plan space forbids the partition, it cannot be completed, or its plan certainly exceeds `limit_s`.
    """
    completed = completer.allowed(partition) and completer.complete(partition)
    priced = completer.price(completed, limit_s) if completed else None
    if priced is not None:
        run.offer(priced.plan, priced.cost)
    return priced
