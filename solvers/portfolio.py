"""`portfolio`: the default, one search over all plans and then a proof.

The loop (`loop/`) walks over candidates of the compiled cost model on any number of threads; what its arrays do not say
follows by exact prices. Thousands of GPUs are planned by a part of them at first (`loop/parts.py`). Where the plan
space has sequence layouts, joint planning (`sequence/planning.py`) follows, which chooses between a layout and tensor
parallelism stage by stage. Plans whose replicas share experts over machines, which the arrays do not say, are tried
after (`heuristics/shared_experts.py`). Under another pricer than ours the loop only gives starts, and where its arrays
do not speak for the problem (`compiled/support.py`), or no candidate of theirs fits, rules do: these are annealed as
partitions (`heuristics/local_search.py`). On few GPUs the last part of the budget proves how good the plan is
(`proof/`). Where steps are limited the plan depends on these and the seed, not on cores.
"""

import random
from dataclasses import dataclass

from hexiopt.solving import Capabilities
from solvers.compiled.support import has_tables
from solvers.completion.experts import may_share_unevenly
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.heuristics.local_search import search_partitions
from solvers.heuristics.shared_experts import offer_shared_experts
from solvers.loop.finish import finish, offer_uneven_experts
from solvers.loop.loading import load_kernels
from solvers.loop.parts import begin_by_parts
from solvers.loop.search import share_for_walks, walk_candidates
from solvers.loop.settings import LoopSettings
from solvers.proof.gaps import checked_gap, prove, share_for_proof
from solvers.sequence.planning import plan_jointly

_SHARED = 0.15  # of the budget, at most, for experts that machines share
_BEFORE_LAYOUTS = 0.5  # of the budget, where joint planning follows


@dataclass(frozen=True)
class Portfolio(SearchSolver):
    """The default: one search over candidates of the compiled cost model, and a proof where the problem is small.

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
        load_kernels()

    @property
    def loop_settings(self) -> LoopSettings:
        """The parameters of the loop. Raises InputError for values out of range."""
        return LoopSettings(self.walks, self.candidates, self.hot, self.cold, self.finish)

    def search(self, run: Search, rng: random.Random) -> None:
        """Find a plan, and then prove how good it is where the problem is small enough (`solvers/proof/`)."""
        whole, proving = run.budget, share_for_proof(run)
        run.enough_gap = self.gap
        run.budget = whole.part(1 - proving)
        self.find(run)
        run.budget = whole
        if proving and run.should_continue():
            prove(run)

    def find(self, run: Search) -> None:
        """Search to the end of the budget; layouts and tensor parallelism jointly in its second part."""
        whole, layouts = run.budget, run.problem.space.sequence
        if layouts:
            run.budget = whole.part(_BEFORE_LAYOUTS)
        self._find_pipelines(run)
        run.budget = whole
        if layouts:
            plan_jointly(run, random.Random(run.seed))

    def _find_pipelines(self, run: Search) -> None:
        """Search plans without layouts to the end of the budget."""
        begin_by_parts(run, self._find_pipelines)
        settings = self.loop_settings
        share = share_for_walks(run, settings)
        candidates = walk_candidates(run, settings, run.until(share))
        offer_shared_experts(run, run.until(min(1.0, share + _SHARED)))
        shared = may_share_unevenly(run.problem) and offer_uneven_experts(run)
        if (candidates or shared) and run.plan is not None and has_tables(run.pricer):
            finish(run, candidates, run.until())
        else:
            search_partitions(run, random.Random(run.seed), candidates, run.until())
