"""`columns`: chains of whole machines by a master program, then annealing and hill climbing of the best."""

import random

from solvers.columns.column_search import ColumnSearch, column_stages
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.frame.starts import chain_partitions
from solvers.heuristics.hill_climbing import HillClimber


class ChainColumns(SearchSolver):
    """Chains of whole machines by a master program; then annealing and hill climbing of the best."""

    name = "columns"

    def search(self, run: Search, rng: random.Random) -> None:
        """All phases, then what else people would build where none of them gave a plan."""
        completer = PlanCompleter(run.pricer)
        search = ColumnSearch(run, completer, column_stages(run)[0], rng)
        search.generate(run.until(0.3))
        search.restricted_master(run.until(0.6))
        search.variants(5, run.until(0.65))
        if run.plan is None:
            for partition in chain_partitions(run.problem):
                if run.plan is not None or not run.step():
                    break
                search.price(partition)
        search.anneal(run.until(0.93))
        HillClimber(run, completer, rng).finish(search.best(5))
