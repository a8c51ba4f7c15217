"""`exact`: proves plans of small clusters optimal, or bounds their distance to the optimum (`solvers/proof/`)."""

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from hexiopt.solving import Budget, Capabilities
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.portfolio import Portfolio
from solvers.proof.gaps import checked_gap, is_provable, prove
from solvers.proof.partitions import Packings, PackingTable

_WARM_SHARE, _WARM_S = 0.15, 4.0  # share of the time limit for the portfolio's plan, and the most seconds


@dataclass(frozen=True)
class Exact(SearchSolver):
    """The portfolio's plan, with a proof that it is the best of all, or of how far it is from that.

    Steps are the portfolio's, and usages, cases and plans
    examined.

    `gap`: stop at a plan proved to be within this fraction of the best; 0 stops at none but a proved optimum.
    """

    name = "exact"
    capabilities = Capabilities(kind="oracle", pricers="cost_model", cores=2)
    packings: ClassVar[type[Packings]] = PackingTable  # how the first level of the proof is decided
    gap: float = 0.0

    def __post_init__(self) -> None:
        checked_gap(self.gap)

    def search(self, run: Search, rng: random.Random) -> None:
        """Start from the portfolio's plan and prove gaps from 1 % down; problems that are not provable get the
        relaxations' bound."""
        run.enough_gap = self.gap
        provable = is_provable(run.exact_pricer)
        if not warm_start(run, min(_WARM_SHARE, _WARM_S / run.budget.time_limit_s) if provable else 0.5):
            return
        if provable:
            prove(run, self.packings)
        elif run.plan is not None and run.budget.max_steps is None:  # the clock determines the bound
            run.relax(run.left_s())


def warm_start(run: Search, share: float) -> bool:
    """Run the portfolio with a share of the budget; False if it was asked to stop."""
    whole = run.budget
    if whole.max_steps is None:
        run.budget = Budget(whole.time_limit_s * share)
    else:  # where steps are counted, the clock has no influence
        run.budget = replace(whole, max_steps=max(1, whole.max_steps // 2))
    Portfolio().find(run)
    run.budget = whole
    return not run.stopped
