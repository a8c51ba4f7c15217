"""The loop: starts, walks at rungs of temperatures, exact prices of the best candidates between their rounds."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from solvers.compiled.plans import partition_of, plan_of
from solvers.compiled.state import SearchState, copy_state, new_state, new_work
from solvers.compiled.step import FAR, refresh
from solvers.compiled.support import has_tables, unsupported
from solvers.compiled.tables import tables_of
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import price_plan
from solvers.core.partition import Partition
from solvers.core.search import Allowance, Search
from solvers.frame.solver import offer_partition
from solvers.loop.grids import Grids
from solvers.loop.orders import MOST_DEVICES, every_candidate
from solvers.loop.settings import LoopSettings
from solvers.loop.starts import Catalogue, StartPool, deal_out, known_start
from solvers.loop.tempering import Tempering, new_kit

_FIRST_GRIDS = 64  # grids that are tried whatever the clock says
_FIRST_TRIES, _TRIES = 32, 8  # chains that the master tries for the first candidate, and for others
_SKIPPED = 0.6  # chance of a chain to be left out of those
_STARTING = 0.08  # most of the budget for starts
_PROGRAMMED, _GRIDDED = 0.4, 0.6  # parts of that after which linear programmes, and then grids, end
_MADE, _DEALT = 12, 16  # candidates that the master makes, and that are dealt out after each of them
_IN_VAIN = 600  # candidates that are dealt out before none is taken to fit
_TOUCHED = 2  # pipelines that a move changes
_PRICE = 7  # candidates that are evaluated while one of a stage is priced: measured on 8 to 960 GPUs
_PRICING = 8  # times as much work between two prices, less down to a share `_SOONEST` where they gain over `_WORTH`
_SOONEST, _WORTH, _LEAST_GAIN = 0.15, 0.005, 1e-4
_FINISHED = 32  # GPUs up to which the finish has its whole share
_FOR_STARTS = 0.2  # of the budget, where the walks only give starts
_KNOWN = 0.1  # factor of the hottest temperature where a plan is known


class Loop:
    """One search over the candidates of a problem, by the arrays of `pricer`; the search's own prices them exactly."""

    def __init__(self, run: Search, settings: LoopSettings, pricer: PlanPricer) -> None:
        self.run, self.settings = run, settings
        self.tables = tables_of(pricer)
        self._policies = pricer.policies()
        self.completer = PlanCompleter(run.pricer, replicates=False)
        self._work = new_work(self.tables)
        self._trial = new_state(self.tables)
        self._evaluated, self._owed, self._priced_s = 0, 0, math.inf

    def search(self, allowance: Allowance) -> list[Partition]:
        """Search until `allowance` is spent, and past it until there is a first plan; the best candidates, best
        first."""
        run, settings = self.run, self.settings
        threads = min(usable_cores(), settings.walks)
        catalogue = Catalogue(self.tables, self._work)
        known = known_start(self.tables, self._work, run.start, run.problem.cluster) if run.start is not None else None
        if known is None and run.start is not None and len(run.start.pipelines) > len(self._trial.pipelines):
            return []  # candidates of fewer pipelines than are known to be good
        warmth = _KNOWN if known is not None else 1.0
        tempering = Tempering(self.tables, catalogue.chains, settings, run.seed, threads, warmth)
        starts = [] if known is None else [known]
        if known is None:
            starts = self._starts(catalogue, allowance.part(_STARTING))
        for number, each in enumerate(tempering.walks if starts else ()):
            state, objective = starts[min(number, len(starts) - 1)]
            each.begin_at(state, objective)
        if not starts:
            return []
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(threads)) if threads > 1 else None
            while allowance:
                began_s = run.runtime_s
                count = sum(run.step() for _ in tempering.walks)
                tempering.advance(allowance.spent, count, pool)
                tempering.tell(run.operators, run.runtime_s - began_s)
                self._evaluated += count * settings.candidates
                self._price_if_due(tempering)
        ranked = sorted(tempering.walks, key=lambda each: each.objectives[1])
        unlike = {float(each.objectives[1]): each for each in reversed(ranked)}
        partitions = []
        for number, each in enumerate(sorted(unlike.values(), key=lambda each: each.objectives[1])):
            if number and run.left_s() <= 0.0:
                break
            self.price(each.states[2])
            partitions.append(partition_of(self.tables, self._trial))
        return [partition for partition in partitions if partition.pipeline_groups]

    def _starts(self, catalogue: Catalogue, allowance: Allowance) -> list[tuple[SearchState, float]]:
        """Candidates of unlike objectives, best first, as many as there are walks; the first is priced at once."""
        run, size = self.run, self.settings.walks
        kit, pool = new_kit(self.tables, self._trial, catalogue.chains, run.seed, size), StartPool(self.tables, size)
        pool.keep(catalogue.make(kit, self._trial, _FIRST_TRIES, 0.0), self._trial)
        self._count(_FIRST_TRIES)
        if pool.states:
            self.price(pool.states[0])
        grids = Grids(self.tables, self._work, run.seed)
        for _ in range(_FIRST_GRIDS):
            self._try_grid(grids, pool)
        if len(run.problem.usable_devices) <= MOST_DEVICES:
            self._try_every(pool, run.until())
        dealt = 0
        for left_out in catalogue.selections():
            if not allowance.up_to(_PROGRAMMED):
                break
            pool.keep(catalogue.fill(kit, self._trial, left_out), self._trial)
            self._count(_TRIES)
        while allowance.up_to(_GRIDDED):
            self._try_grid(grids, pool)
        for made in range(_MADE):
            if not allowance:
                break
            if made:
                pool.keep(catalogue.make(kit, self._trial, _TRIES, _SKIPPED), self._trial)
                self._count(_TRIES)
            for _ in range(_DEALT):
                pool.keep(deal_out(self.tables, self._work, self._trial, kit), self._trial)
                self._count(1)
        while not pool.states and dealt < _IN_VAIN:
            pool.keep(deal_out(self.tables, self._work, self._trial, kit), self._trial)
            dealt += 1
        if pool.states and pool.objectives[0] < self._priced_s:
            self.price(pool.states[0])
        return list(zip(pool.states, pool.objectives, strict=True))

    def _try_grid(self, grids: Grids, pool: StartPool) -> None:
        """Show the next grid to the pool; price it if it is the first candidate that is a plan."""
        if grids.make(self._trial) < pool.limit(self._trial):
            pool.keep(float(refresh(self.tables, self._work, self._trial)), self._trial)
        self._count(1)
        if pool.states and math.isinf(self._priced_s):
            self.price(pool.states[0])

    def _try_every(self, pool: StartPool, allowance: Allowance) -> None:
        """Show every candidate of a few devices to the pool, until `allowance` is spent."""
        for state in every_candidate(self.tables):
            if not allowance:
                return
            copy_state(state, self._trial)
            pool.keep(refresh(self.tables, self._work, self._trial), self._trial)
            self._count(1)

    def _count(self, evaluations: int) -> None:
        """Count the work of evaluating `_trial` from nothing so many times as steps."""
        self._owed += evaluations * max(1, int(self._trial.plan[0]["num_pipelines"]))
        while self._owed > _TOUCHED * self.settings.candidates and self.run.step():
            self._owed -= _TOUCHED * self.settings.candidates

    def _price_if_due(self, tempering: Tempering) -> None:
        best = tempering.best
        stages = int(best.states[2].pipelines["num_stages"][: int(best.states[2].plan[0]["num_pipelines"])].sum())
        gain = 1.0 - float(best.objectives[1]) / self._priced_s
        patience = _PRICING * min(1.0, max(_SOONEST, _WORTH / max(gain, 1e-9)))
        if gain > _LEAST_GAIN and self._evaluated >= patience * _PRICE * stages:
            self._evaluated = 0
            self.price(best.states[2])

    def price(self, state: SearchState) -> None:
        """Offer the plan of a candidate, with its own layers and as the completer has it; `_trial` is then the
        candidate, evaluated from nothing."""
        run = self.run
        copy_state(state, self._trial)
        objective = refresh(self.tables, self._work, self._trial)
        self._priced_s = min(self._priced_s, objective)
        if objective >= FAR:
            return
        with run.tallied("price") as tally:
            tally.proposed += 1
            tally.valid += 1
            tally.priced += 1
            plan = plan_of(self.tables, self._work, self._trial, self._policies)
            # Split backwards are hardly ever behind whole ones, but may be.
            for schedule in dict.fromkeys((plan.schedule, plan.schedule.whole())):
                if schedule not in run.problem.schedules:
                    continue
                priced = price_plan(run.pricer, replace(plan, schedule=schedule), run.best_s)
                if priced is not None:
                    run.offer(priced.plan, priced.cost)
            offer_partition(run, self.completer, partition_of(self.tables, self._trial), run.best_s)


def share_for_walks(run: Search, settings: LoopSettings) -> float:
    """The share of the budget for the walks. The rest is for replicas, interleaving and deeper sharding (`finish.py`),
    which these do not know: less on more GPUs, where they rarely pay and each price takes longer. Under another pricer
    than that of the arrays, they only give starts."""
    if not has_tables(run.pricer):
        return _FOR_STARTS
    return 1.0 - settings.finish * min(1.0, _FINISHED / len(run.problem.usable_devices))


def walk_candidates(run: Search, settings: LoopSettings, allowance: Allowance) -> list[Partition]:
    """The best candidates of the walks within `allowance`, best first; none where the arrays of our cost model do not
    speak for the problem, or no candidate fits."""
    try:
        pricer = run.pricer if has_tables(run.pricer) else PlanPricer(run.problem)
    except InputError:  # another pricer may take what ours refuses
        return []
    return [] if unsupported(run.problem, pricer) else Loop(run, settings, pricer).search(allowance)
