"""`portfolio`, the default: several search strategies within one time limit; the best plan of all is the result.

Members run side by side, one for each core, and exchange what they find. Up to `MACHINES` GPUs the first, and every
second after it, runs HexiScale's partition, as `solver=hexiscale` would, and anneals its results and the rule-based
starts, occasionally rebuilding pipeline groups as chains (`recreate.py`); the others try a few chains of whole machines
as columns (`columns/`), single pipelines through any of the machines, anneal arrangements of such chains
(`columns/arrangement_search.py`), and then the best of these, the rule-based starts and the best *fallbacks*. These are
cheap candidates that guarantee a minimum quality: symmetric grids over all machines, a separate grid for each machine
kind, and on many machines short chains. Those whose estimates promise most are priced first (`frame/ranking.py`), and
pricing continues past the time limit until there is a plan. On more GPUs all members search for chains of whole
machines, under different random numbers, and anneal the best; the second first tries chains alone, another ZeRO stage
and the fallbacks, to which grids belong that leave a kind of machines out or mix TP degrees; or, where the machines are
copies of a few (`core/like_parts.py`), it first searches one part. Up to `MOST_ANNEALED` GPUs it then searches the
machines that the best chains use, where these have few GPUs. Where a plan is known, on up to some hundred GPUs, all
members instead anneal arrangements of chains near it (`columns/near_known.py`), and then the best of these and the plan
itself. Where the plan space has sequence layouts, the first member soon turns to them and chooses between a layout and
tensor parallelism stage by stage (`planning.py`). With a budget in steps there are two members whatever the number of
cores, so that the plan does not depend on it.

With `loop`, one search over the compiled cost model (`loop/`) replaces the members where its arrays speak for the
problem (`compiled/support.py`) and it finds a candidate that fits.
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
    """The default: several searches side by side, the best plan of all, and a proof where the problem is small.

    Members share the steps equally.

    `gap`: stop at a plan proved to be within this fraction of the best; 0 stops at none but a proved optimum. `loop`:
    search by one loop over the compiled cost model instead; the other parameters are that loop's (`LoopSettings`).
    """

    name = "portfolio"
    capabilities = Capabilities(sequence="also", cores="all")
    gap: float = 0.0
    loop: bool = False
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
        """Run all members; with `loop` only where the loop does not speak for the problem or finds no plan."""
        speaks = self.loop and unsupported(run.problem, run.pricer) is None
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
