"""The frame of a solver that searches structures: bookkeeping around one method."""

import random
from abc import ABC, abstractmethod

from hexiopt.problem.problem import Problem
from hexiopt.result import Result
from solvers.completion.completer import Builder
from solvers.core.search import Budget, Listener, Pricer, Search
from solvers.frame.infeasible import explain, proven_infeasible


class SearchingSolver(ABC):
    """A `Solver` whose subclass only says how to search; plan, cost, trajectory and reason are kept here."""

    name: str

    @abstractmethod
    def run(self, search: Search, builder: Builder, rng: random.Random) -> None:
        """Offer plans to `search` until it says that the budget is spent."""

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """The best plan found within `budget`; without one, the reason. Raises InputError if a package is missing."""
        search = Search(self.name, problem, budget, seed, pricer, listen)
        builder = Builder(search)
        if not proven_infeasible(search):
            self.run(search, builder, random.Random(seed))
        return explain(search)
