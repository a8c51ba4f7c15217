"""Members of the portfolio: how each spends its budget, and what all of them need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search

MACHINES = 100  # GPUs beyond which counts of chains matter more than parts of machines and replicas
MOST_ANNEALED = 300  # GPUs beyond which annealing partitions that are no chains finds little that columns do not
FEW_DEVICES = 16  # GPUs up to which all members search replicas, and single TP groups are moved soon enough
SEEDS = 2  # factor of the seed, to which a member's number is added


@dataclass(frozen=True, slots=True)
class Member:
    """How a member spends its budget."""

    number: int  # members with different numbers draw different random numbers
    partition: float  # share for HexiScale's partition
    until_first_plan: bool  # keep partitioning beyond that share until a feasible plan is found
    # First temperature of an annealing round, relative to that of the round before. Reheating fully undoes what large
    # plans gained, but frees small ones from local optima.
    cooling: float
    recreate_share: float  # of annealing's moves that rebuild groups as chains: expensive, usually worth it
    before_layouts: float  # share of the budget before it turns to sequence layouts, where the plan space has them
    arranged: float  # share for arrangements of chains of whole machines, which give starts


FIRST = Member(0, 0.25, until_first_plan=True, cooling=0.6, recreate_share=0.05, before_layouts=0.15, arranged=0.0)
SECOND = Member(1, 0.0, until_first_plan=False, cooling=1.0, recreate_share=0.05, before_layouts=1.0, arranged=0.2)
ALONE = Member(0, 0.25, until_first_plan=False, cooling=1.0, recreate_share=0.03, before_layouts=0.3, arranged=0.1)


def completer_of(run: Search, member: Member) -> PlanCompleter:
    """Every second member tries replicas beyond a few devices, where they rarely pay and take longer to price."""
    few = len(run.problem.usable_devices) <= FEW_DEVICES
    return PlanCompleter(run.pricer, replicates=few or member.number % 2 == 1)


def within(budget: Budget, work: Callable[[Search], Any]) -> Callable[[Search], Any]:
    """`work` with a budget of its own."""

    def limited(own: Search) -> Any:
        own.budget = budget
        return work(own)

    return limited
