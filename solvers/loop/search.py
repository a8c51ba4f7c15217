"""The loop: starts, walks at rungs of temperatures, exact prices of the best candidates between their rounds."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from hexiopt.cores import usable_cores
from solvers.compiled.plans import partition_of, plan_of
from solvers.compiled.state import State, copy_state, new_state, new_work
from solvers.compiled.step import FAR, refresh
from solvers.compiled.tables import tables_of
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import price_plan
from solvers.core.partition import Partition
from solvers.core.search import Allowance, Search
from solvers.frame.solver import offer_partition
from solvers.loop.settings import LoopSettings
from solvers.loop.starts import Catalogue, deal_out, known_start
from solvers.loop.tempering import Tempering, new_kit

_FIRST_TRIES, _TRIES = 16, 8  # chains that the master tries for the first candidate, and for others
_SKIPPED = 0.6  # chance of a chain to be left out of those
_MADE, _DEALT = 12, 192  # candidates that the master makes, and that are dealt out
_DEALT_A_STEP = 24
_PRICE = 7  # candidates that are evaluated while one of a stage is priced: measured on 8 to 960 GPUs
_PRICING = 8  # times as much work between two prices
_KNOWN = 0.1  # factor of the hottest temperature where a plan is known


class Loop:
    """One search over the candidates of a problem that `solvers.compiled.supports`."""

    def __init__(self, run: Search, settings: LoopSettings) -> None:
        self.run, self.settings = run, settings
        self.tables = tables_of(run.exact_pricer)
        self.completer = PlanCompleter(run.pricer, replicates=False)
        self._work = new_work(self.tables)
        self._trial = new_state(self.tables)
        self._evaluated, self._priced_s = 0, math.inf

    def search(self, allowance: Allowance) -> list[Partition]:
        """Search until `allowance` is spent, and past it until there is a first plan; the best candidates, best
        first."""
        run, settings = self.run, self.settings
        threads = min(usable_cores(), settings.walks)
        catalogue = Catalogue(self.tables, self._work)
        known = known_start(self.tables, self._work, run.start, run.problem.cluster) if run.start is not None else None
        warmth = _KNOWN if known is not None else 1.0
        tempering = Tempering(self.tables, catalogue.chains, settings, run.seed, threads, warmth)
        starts = [] if known is None else [known]
        if known is None:
            starts = self._starts(catalogue, allowance)
        for number, own in enumerate(tempering.walks if starts else ()):
            state, objective = starts[min(number, len(starts) - 1)]
            own.begin_at(state, objective)
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
        ranked = sorted(tempering.walks, key=lambda own: own.objectives[1])
        unlike = {float(own.objectives[1]): own for own in reversed(ranked)}
        found = []
        for own in sorted(unlike.values(), key=lambda own: own.objectives[1]):
            self.price(own.states[2])
            found.append(partition_of(self.tables, self._trial))
        return [partition for partition in found if partition.pipeline_groups]

    def _starts(self, catalogue: Catalogue, allowance: Allowance) -> list[tuple[State, float]]:
        """Candidates of unlike objectives, best first, as many as there are walks; the first is priced at once."""
        run, kit = self.run, new_kit(self.tables, self._trial, catalogue.chains, self.run.seed, self.settings.walks)
        pool: list[tuple[float, State]] = []

        def keep(objective: float) -> None:
            if objective >= FAR or any(abs(objective - other) < 1e-6 * other for other, _ in pool):
                return
            if len(pool) == self.settings.walks:
                if objective >= pool[-1][0]:
                    return
                state = pool.pop()[1]
            else:
                state = new_state(self.tables)
            copy_state(self._trial, state)
            pool.append((objective, state))
            pool.sort(key=lambda item: item[0])

        run.step()
        keep(catalogue.make(kit, self._trial, _FIRST_TRIES, 0.0))
        if pool:
            self.price(pool[0][1])
        for _ in range(_MADE):
            if not (allowance and run.step()):
                break
            keep(catalogue.make(kit, self._trial, _TRIES, _SKIPPED))
        for _ in range(_DEALT // _DEALT_A_STEP):
            if not (allowance and run.step()) and pool:
                break
            for _ in range(_DEALT_A_STEP):
                keep(deal_out(self.tables, self._work, self._trial, kit))
        if pool and pool[0][0] < self._priced_s:
            self.price(pool[0][1])
        return [(state, objective) for objective, state in pool]

    def _price_if_due(self, tempering: Tempering) -> None:
        best = tempering.best
        stages = int(best.states[2].pipelines["num_stages"][: int(best.states[2].plan[0]["num_pipelines"])].sum())
        better = best.objectives[1] < self._priced_s * (1 - 1e-4)
        if better and self._evaluated >= _PRICING * _PRICE * stages:
            self._evaluated = 0
            self.price(best.states[2])

    def price(self, state: State) -> None:
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
            tally.priced += 1
            plan = plan_of(self.tables, self._work, self._trial, run.exact_pricer.policies())
            priced = price_plan(run.pricer, plan, run.best_s)
            if priced is not None:
                run.offer(priced.plan, priced.cost)
            offer_partition(run, self.completer, partition_of(self.tables, self._trial), run.best_s)
