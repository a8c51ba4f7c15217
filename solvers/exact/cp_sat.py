"""`cp_sat`: an exact CP-SAT model of the whole plan space; small clusters are solved with proof.

The model (`exact/packing.py`) asks which *placements* of TP groups make up a plan that takes less than T seconds. A
placement says which devices form which stage of one pipeline. The most sequences that it can process in T seconds are
tabulated (`exact/placements.py`) over micro-batch sizes, layers, layer ranges, samples of replicas and recompute
policies, with memory and messages. Nonlinear conditions are treated lazily: placements are tightened when they are
first chosen, and a choice of placements is completed to plans that share the network and synchronise gradients, priced
by the cost model (`Enumeration`). If all choices are refuted, no plan takes less than T.

T is first the incumbent's step time less one percent, to prove that gap, and then the incumbent's step time. All
numbers of the model are integers, and T is compared in floating point, with a resolution of 1e-9 of a step time. Beyond
a few devices or layers, the portfolio's plan gets the lower bound of `hexiopt.bounds` instead of a proof of optimality.

CP-SAT has one worker and counts its work rather than time. A second core takes half of the choices, except where steps
are counted: the same seed and steps give the same plan.
"""

import random
from dataclasses import replace

from hexiopt.solving import Budget, Capabilities
from solvers.core.search import Search
from solvers.core.workers import in_parallel, num_processes
from solvers.exact.exhaustive import Enumeration
from solvers.exact.packing import ColumnChoice, Packing, PipelineColumn
from solvers.exact.placement_bounds import PlacementBound
from solvers.exact.placements import PlacementColumns, PlanFamily
from solvers.frame.solver import SearchSolver
from solvers.portfolio.portfolio import Portfolio
from solvers.proof.stage_times import StageTable

MOST_DEVICES = 6
MOST_LAYERS = 8
_WARM_SHARE = 0.1  # of the time limit, and half of the steps, for the portfolio's plan,
_WARM_S = 5.0  # but no more than that;
_WARM_SHARE_LARGE = 0.5  # of the time limit where no proof can be expected
_GAPS = (0.01, 0.0)  # proven one after the other
_FAR = 0.9  # share of the step time asked about; a plan that takes less restarts the proof, which is then shorter
_WORTH_A_PROCESS = 8  # choices
_CHOICES = 20_000  # of one model, examined before its columns are tightened again
_FOREVER_S = 1e9  # upper limit on the step time of any plan of interest
_EFFORT_S = 20.0  # most deterministic seconds of one program


class CpSat(SearchSolver):
    """The portfolio's plan and a lower bound by constraint programming (OR-Tools).

    Steps: the portfolio's, plans priced, and CP-SAT models solved.
    """

    name = "cp_sat"
    capabilities = Capabilities(kind="oracle", cores=2)

    def search(self, run: Search, rng: random.Random) -> None:
        """The best plan found and its lower bound, or the proof that no plan fits.

        A pricer other than our cost model gets the portfolio's plan without a bound.
        """
        problem, budget = run.problem, run.budget
        ours = run.our_model is not None
        small = len(problem.usable_devices) <= MOST_DEVICES and problem.model.num_layers <= MOST_LAYERS
        share = min(_WARM_SHARE, _WARM_S / budget.time_limit_s) if small else _WARM_SHARE_LARGE
        if not ours:
            share = 1.0
        if not warm_start(run, share) or not ours:
            return
        if run.plan is None and not small and budget.max_steps is None and not warm_start(run, 1.0):
            return
        if small and PackingProof(run).run():
            run.exhausted = run.plan is None
        elif not small and run.plan is not None and budget.max_steps is None:  # the clock determines the bound
            run.relax(run.left_s())


def warm_start(run: Search, share: float) -> bool:
    """Run the portfolio with a share of the budget; False if it was asked to stop."""
    whole = run.budget
    other = run.child()
    if whole.max_steps is None:
        other.budget = Budget(whole.time_limit_s * share)
    elif share < 1.0:  # where steps are counted, the clock has no influence
        other.budget = replace(whole, max_steps=max(1, whole.max_steps // 2))
    Portfolio().find(other)
    run.absorb(other.outcome())
    run.count_others()
    return not other.stopped


class PackingProof:
    """Examines all choices of placements of one problem, for one step time after another."""

    def __init__(self, search: Search) -> None:
        pricer = search.exact_pricer
        self._search, self._enumeration = search, Enumeration(search)
        lower_bound = PlacementBound(pricer, StageTable(pricer))
        self._placements = PlacementColumns(
            pricer, self._enumeration.device_classes, self._enumeration.candidates, lower_bound
        )
        self._examined: set[ColumnChoice] = set()

    def run(self) -> bool:
        """Raise the search's bound as far as the budget allows; True if the proof is complete."""
        search = self._search
        for gap in _GAPS:
            limit_s = min(search.best_s, _FOREVER_S) * (1 - gap)
            while search.bound_s < limit_s:
                self._examined.clear()
                if all(self._refuted(family, limit_s) for family in self._placements.families()):
                    # Better plans, if there were any, have been found.
                    search.bound_s = max(search.bound_s, min(limit_s, search.best_s))
                    break
                if not search.should_continue():
                    return False
                limit_s = search.best_s * (1 - gap)  # start over, far below
        return True

    def _refuted(self, family: PlanFamily, limit_s: float) -> bool:
        """Whether all plans of a family that take less than `limit_s` were examined."""
        columns = self._placements.columns(family, limit_s, self._search.should_continue)
        if columns is None:
            return False
        return all(self._examined_all(own, family, limit_s) for own in self._placements.programs(family, columns))

    def _examined_all(self, columns: list[PipelineColumn], family: PlanFamily, limit_s: float) -> bool:
        limits = self._placements.limits(family)
        while self._search.should_continue():
            self._search.step()
            packing = Packing(columns, limits, self._examined)
            choices, all_of_them = packing.choices(_CHOICES, _EFFORT_S)
            if not choices:
                return all_of_them
            if not self._examine_in_parallel(choices, packing, limit_s):
                return False
            if all_of_them:
                return True
        return False

    def _examine_in_parallel(self, choices: list[ColumnChoice], packing: Packing, limit_s: float) -> bool:
        """Examine `choices`, on two cores where available; False if some are left."""
        counted = self._search.budget.max_steps is not None  # then the result must not depend on the cores
        if counted or len(choices) < _WORTH_A_PROCESS or num_processes() < 2:
            return self._examine_in_turn(choices, packing, limit_s)

        def theirs(search: Search) -> tuple[bool, set[ColumnChoice]]:
            self._search = self._enumeration.search = search
            return self._examine_in_turn(choices[1::2], packing, limit_s), self._examined

        with in_parallel(self._search, theirs) as answer:
            done = self._examine_in_turn(choices[::2], packing, limit_s)
            [found] = answer() if done else [None]
        if found is None:
            return False
        self._examined |= found[1]
        return bool(found[0])

    def _examine_in_turn(self, choices: list[ColumnChoice], packing: Packing, limit_s: float) -> bool:
        """Examine `choices` in turn; also ends where a plan is so much better that starting over pays."""
        return all(
            self._examine(choice, packing, limit_s) and self._search.best_s >= limit_s * _FAR for choice in choices
        )

    def _examine(self, choice: ColumnChoice, packing: Packing, limit_s: float) -> bool:
        """Complete a choice unless its placements turn out to process too few sequences; False once the budget is
        spent.
        """
        if choice in self._examined:
            return True
        for placement, _ in choice:
            if not self._search.should_continue():
                return False
            column, count = packing.columns[placement], packing.sequences(choice)
            if count < packing.limits.global_batch:
                return True
            spare = count - packing.limits.global_batch
            column.most_sequences = self._placements.tighten(
                placement, column.most_sequences - spare, column.most_sequences, limit_s
            )
        if packing.sequences(choice) >= packing.limits.global_batch:
            if not self._enumeration.examine(self._placements.assignments(choice), limit_s):
                return False
            self._examined.add(choice)
        return True
