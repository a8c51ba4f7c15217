"""Symmetric plans, one after another."""

from dataclasses import dataclass
from random import Random

from hexiopt.reading import whole_in
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import PipelineGroup
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver, offer_partition
from solvers.frame.starts import cut, first_choice


@dataclass(frozen=True)
class Symmetric(SearchSolver):
    """Every TP degree up to `max_tp` and every number of stages, over all machines in order."""

    max_tp: int = 8  # solver.max_tp=4 on the command line

    name = "mine"

    def __post_init__(self) -> None:
        whole_in(self.max_tp, "solver.max_tp", at_least=1, at_most=1024)  # solver.max_tp=-3 is refused in one line

    def search(self, run: Search, rng: Random) -> None:
        completer, problem = PlanCompleter(run.pricer), run.problem
        for tp in problem.space.allowed_tp(self.max_tp):
            groups = [group for own in problem.usable_by_machine.values() for group in cut(own, tp)]
            for stages in range(1, min(len(groups), problem.model.num_layers) + 1):
                if not run.step():  # counts a step; False once the budget is spent
                    return
                width = len(groups) // stages
                slots = tuple(tuple(groups[s * width : (s + 1) * width]) for s in range(stages))
                offer_partition(run, completer, first_choice(problem, (PipelineGroup(slots),)))
