"""`rules`: rule-based partitions, each completed and the most promising priced. It compiles nothing and draws nothing.

On a few GPUs these are all single pipelines in every order of machines, chains beside each other, and symmetric grids,
at every micro-batch size: what is left to a search is to move single GPUs between pipelines.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from hexiopt.problem.problem import Problem
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver, offer_partition
from solvers.heuristics.local_search import rule_based
from solvers.heuristics.ranking import promising_first

_RANKING = 0.6  # most of the budget for estimates


class Rules(SearchSolver):
    """Rule-based partitions, the most promising priced: an answer at once, without kernels.

    A step is a price.
    """

    name = "rules"

    def search(self, run: Search, rng: random.Random) -> None:
        """Estimate all, then price the best."""
        completer = PlanCompleter(run.pricer)
        starts, ranking = sized(run.problem, completer), run.until(_RANKING)
        for start in promising_first(completer, starts, run.budget.max_steps, lambda: bool(ranking)):
            if not run.step():
                break
            offer_partition(run, completer, start, run.best_s)


def sized(problem: Problem, completer: PlanCompleter) -> Iterator[Partition]:
    """The rule-based partitions at every micro-batch size that the batch has, each once."""
    seen, sizes = set[Partition](), problem.space.micro_batch_sizes(problem.workload.global_batch)
    for start in rule_based(problem, completer):
        for size in sizes:
            groups = [replace(group, micro_batch_size=size) for group in start.pipeline_groups]
            if all(group.most_replicas <= size for group in groups):
                found = start.with_pipeline_groups(groups)
                if found not in seen:
                    seen.add(found)
                    yield found
