"""The frame of a solver of sequence layouts: bookkeeping around one method."""

import random
from abc import ABC, abstractmethod

from hexiopt.problem.problem import Problem
from hexiopt.result import Result
from solvers.core.search import Budget, Listener, Pricer, Search
from solvers.frame.infeasible import explain, proven_infeasible
from solvers.sequence.requirement import require_sequences


class SequencingSolver(ABC):
    """A `Solver` whose subclass only says how to search."""

    name: str

    @abstractmethod
    def run(self, search: Search, rng: random.Random) -> None:
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
        """The best plan found within `budget`; without one, the reason. Raises InputError where the problem has no
        sequence layouts."""
        require_sequences(problem, self.name)
        search = Search(self.name, problem, budget, seed, pricer, listen)
        if not proven_infeasible(search):
            self.run(search, random.Random(seed))
        return explain(search)
