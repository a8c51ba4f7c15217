"""`exact`: proves plans of small clusters optimal, or bounds their distance to the optimum (`solvers/proof/`)."""

import random
from dataclasses import dataclass

from hexiopt.solving import Capabilities
from solvers.core.search import Search
from solvers.exact.cp_sat import warm_start
from solvers.frame.solver import SearchSolver
from solvers.proof.gaps import checked_gap, is_provable, prove

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
            prove(run)
        elif run.plan is not None and run.budget.max_steps is None:  # the clock determines the bound
            run.relax(run.left_s())
