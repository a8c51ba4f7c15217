"""`portfolio`, the default: one loop over the compiled cost model (`loop/`), then the exact price, then a proof.

Where the arrays do not speak for a problem (a stranger's pricer, sequence layouts, lockstep alone, like pipelines), or
the loop finds no candidate that fits, several searches share the budget instead, one for each core, and exchange what
they find. Up to `MACHINES` GPUs the first, and every second after it, runs HexiScale's partition and anneals its
results and the rule-based starts; the others try a few chains of whole machines as columns (`columns/`), anneal
arrangements of such chains (`columns/arrangement_search.py`), and price *fallbacks*: symmetric grids, and a grid for
each machine kind. On more GPUs all of them search for chains of whole machines. Where a plan is known, they anneal
arrangements of chains near it (`columns/near_known.py`). Where the plan space has sequence layouts, the first soon
turns to them (`planning.py`). With a budget in steps nothing depends on the number of cores.
"""

import random
from dataclasses import dataclass, replace

from hexiopt.solving import Capabilities
from solvers.compiled.support import unsupported
from solvers.core.search import Search
from solvers.core.workers import in_parallel, num_processes
from solvers.frame.solver import SearchSolver
from solvers.loop.search import search_by_loop
from solvers.loop.settings import LoopSettings
from solvers.portfolio.few_gpus import begins_near, works_on_few
from solvers.portfolio.many_gpus import run_columns
from solvers.portfolio.members import ALONE, FIRST, MACHINES, SECOND, within
from solvers.proof.gaps import checked_gap, prove, share_for_proof

_COUNTED = 2  # members where steps are limited


@dataclass(frozen=True)
class Portfolio(SearchSolver):
    """The default: a loop over the compiled cost model, or several searches side by side, and a proof where the problem
    is small.

    Members share the steps equally.

    `gap`: stop at a plan proved to be within this fraction of the best; 0 stops at none but a proved optimum. The other
    parameters are the loop's (`LoopSettings`).
    """

    name = "portfolio"
    capabilities = Capabilities(sequence="also", cores="all")
    gap: float = 0.0
    walks: int = LoopSettings.walks
    candidates: int = LoopSettings.candidates
    hot: float = LoopSettings.hot
    cold: float = LoopSettings.cold
    finish: float = LoopSettings.finish

    def __post_init__(self) -> None:
        checked_gap(self.gap)
        _ = self.loop_settings

    @property
    def loop_settings(self) -> LoopSettings:
        """The parameters of the loop. Raises InputError for values out of range."""
        return LoopSettings(self.walks, self.candidates, self.hot, self.cold, self.finish)

    def search(self, run: Search, rng: random.Random) -> None:
        """Run all members, and then prove how good the plan is where the problem is small enough (`solvers/proof/`)."""
        whole, proving = run.budget, share_for_proof(run)
        run.enough_gap = self.gap
        run.budget = whole.part(1 - proving)
        self.find(run)
        run.budget = whole
        if proving and run.should_continue():
            prove(run)

    def find(self, run: Search) -> None:
        """Run the loop, or all members where it does not speak for the problem or finds no plan."""
        speaks = unsupported(run.problem, run.pricer) is None
        if not (speaks and search_by_loop(run, self.loop_settings)):
            self._find_by_members(run)

    def _find_by_members(self, run: Search) -> None:
        """Run all members, at once where the machine can."""
        whole, problem, num_members = run.budget, run.problem, num_processes()
        others = whole
        if whole.max_steps is not None:
            num_members = min(_COUNTED, whole.max_steps)
            others = replace(whole, max_steps=max(1, whole.max_steps // num_members))
            run.budget = replace(whole, max_steps=-(-whole.max_steps // num_members))
        first = ALONE if num_members == 1 else FIRST
        members = [first, *(replace((FIRST, SECOND)[k % 2], number=k) for k in range(1, num_members))]
        many = len(problem.usable_devices) > MACHINES
        if many and not begins_near(run) and not (problem.space.sequence and num_members == 1):
            run_columns(run, members, others)
        else:
            own, *rest = works_on_few(run, members)
            with in_parallel(run, *(within(others, work) for work in rest)) as answers:
                own(run)
                answers()
        run.budget = whole
        run.count_others()
