"""`cp_sat`: an exact CP-SAT model of the whole plan space, for small clusters proven to the end.

The model (`exact/packing.py`) asks which *lines* of TP groups make up a plan that takes less than T seconds. A line
says which devices form which stage of one pipeline; the most sequences that it can process in T seconds are tabulated
(`exact/lines.py`): over micro-batch sizes, layers, layer ranges, samples of replicas and recompute policies, with
memory and messages. What is not linear comes lazily: lines are tightened when they are first chosen, and a choice of
lines is completed to plans that share the network and synchronise gradients, priced by the cost model (`Enumeration`).
Where all choices are refuted, no plan takes less than T.

T is the incumbent's step time less a hundredth, to prove that gap first, and then the incumbent's own. All numbers of
the model are whole, and T is compared in floating point: the resolution is 1e-9 of a step time. Beyond a few devices
or layers the portfolio's plan gets the lower bound of `hexiopt.bounds`, not the proof that it is the best.

CP-SAT has one worker and counts its work, not the time; a second core takes half of the choices, but not where steps
are counted: the same seed and steps give the same plan.
"""

import random
from dataclasses import replace

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.model import PlanPricer
from hexiopt.solving import Budget, Capabilities
from solvers.core.search import Search
from solvers.core.workers import at_once, has_second_core
from solvers.exact.exhaustive import Enumeration
from solvers.exact.line_bounds import LineFloor
from solvers.exact.lines import Kind, Lines
from solvers.exact.packing import Choice, Column, Packing
from solvers.exact.stage_times import StageTable
from solvers.frame.solver import SearchSolver
from solvers.portfolio import Portfolio

MOST_DEVICES = 6
MOST_LAYERS = 8
_WARM_SHARE = 0.1  # of the time limit, and half of the steps, for the portfolio's plan,
_WARM_S = 5.0  # but no more than that;
_WARM_SHARE_LARGE = 0.5  # of the time limit where no proof is to be expected
_GAPS = (0.01, 0.0)  # proven one after the other
_FAR = 0.9  # of the step time asked about: where a plan takes less, a proof from there is shorter
_WORTH_A_PROCESS = 8  # choices
_CHOICES = 20_000  # of one program, looked at before its columns are tightened again
_FOREVER_S = 1e9  # no plan worth finding takes longer
_EFFORT_S = 20.0  # most deterministic seconds of one program


class CpSat(SearchSolver):
    """The best plan, and how good it surely is. Steps: the portfolio's, plans priced, programs solved."""

    name = "cp_sat"
    capabilities = Capabilities(kind="oracle", cores=2)

    def search(self, run: Search, rng: random.Random) -> None:
        """The best plan found with its lower bound, or the proof that no plan fits.

        A pricer that is not our cost model gets the portfolio's plan, without a bound.
        """
        problem, budget = run.problem, run.budget
        ours = isinstance(run.pricer, PlanPricer)
        small = len(problem.usable_devices) <= MOST_DEVICES and problem.model.num_layers <= MOST_LAYERS
        share = min(_WARM_SHARE, _WARM_S / budget.time_limit_s) if small else _WARM_SHARE_LARGE
        if not ours:
            share = 1.0
        if not warm_start(run, share) or not ours:
            return
        if run.plan is None and not small and budget.max_steps is None and not warm_start(run, 1.0):
            return
        if small and Proof(run).run():
            run.exhausted = run.plan is None
        elif not small and run.plan is not None and budget.max_steps is None:  # the bound rises by the clock
            assert isinstance(run.pricer, PlanPricer)
            run.bound_s = max(run.bound_s, lower_bound_s(run.pricer, run.left_s()))


def warm_start(run: Search, share: float) -> bool:
    """Run the portfolio with a share of the budget; False where it was asked to stop."""
    whole = run.budget
    other = run.child()
    if whole.max_steps is None:
        other.budget = Budget(whole.time_limit_s * share)
    elif share < 1.0:  # where steps are counted, the clock steers nothing
        other.budget = replace(whole, max_steps=max(1, whole.max_steps // 2))
    Portfolio().search(other, random.Random(run.seed))
    run.absorb(other.outcome())
    return not other.stopped


class Proof:
    """Looks through all choices of lines of one problem, for one step time after another."""

    def __init__(self, search: Search) -> None:
        assert isinstance(search.pricer, PlanPricer)
        self._search, self._enumeration = search, Enumeration(search)
        floor = LineFloor(search.pricer, StageTable(search.pricer))
        self._lines = Lines(search.pricer, self._enumeration.seats, self._enumeration.candidates, floor)
        self._looked: set[Choice] = set()

    def run(self) -> bool:
        """Raise the search's bound as far as the budget lasts; True where nothing is left open."""
        search = self._search
        for gap in _GAPS:
            limit_s = min(search.best_s, _FOREVER_S) * (1 - gap)
            while search.bound_s < limit_s:
                self._looked.clear()
                if all(self._refuted(kind, limit_s) for kind in self._lines.kinds()):
                    # Better plans, if there were any, have been found.
                    search.bound_s = max(search.bound_s, min(limit_s, search.best_s))
                    break
                if not search.go_on():
                    return False
                limit_s = search.best_s * (1 - gap)  # begin again, far below
        return True

    def _refuted(self, kind: Kind, limit_s: float) -> bool:
        """Whether every plan of a kind that takes less than `limit_s` was looked at."""
        columns = self._lines.columns(kind, limit_s, self._search.go_on)
        if columns is None:
            return False
        return all(self._looked_through(own, kind, limit_s) for own in self._lines.programs(kind, columns))

    def _looked_through(self, columns: list[Column], kind: Kind, limit_s: float) -> bool:
        limits = self._lines.limits(kind)
        while self._search.go_on():
            self._search.step()
            packing = Packing(columns, limits, self._looked)
            choices, all_of_them = packing.choices(_CHOICES, _EFFORT_S)
            if not choices:
                return all_of_them
            if not self._all_looked_at(choices, packing, limit_s):
                return False
            if all_of_them:
                return True
        return False

    def _all_looked_at(self, choices: list[Choice], packing: Packing, limit_s: float) -> bool:
        """Look at `choices`, on two cores where there are two; False where some are left."""
        counted = self._search.budget.max_steps is not None  # then the cores must not matter
        if counted or len(choices) < _WORTH_A_PROCESS or not has_second_core():
            return self._each_looked_at(choices, packing, limit_s)

        def theirs(search: Search) -> tuple[bool, set[Choice]]:
            self._search = self._enumeration.search = search
            return self._each_looked_at(choices[1::2], packing, limit_s), self._looked

        with at_once(self._search, theirs) as answer:
            done = self._each_looked_at(choices[::2], packing, limit_s)
            found = answer() if done else None
        if found is None:
            return False
        self._looked |= found[1]
        return bool(found[0])

    def _each_looked_at(self, choices: list[Choice], packing: Packing, limit_s: float) -> bool:
        """Look at `choices` in turn; also ends where a plan is so much better that it is worth beginning again."""
        return all(
            self._look_at(choice, packing, limit_s) and self._search.best_s >= limit_s * _FAR for choice in choices
        )

    def _look_at(self, choice: Choice, packing: Packing, limit_s: float) -> bool:
        """Complete a choice, unless its lines process too little after all; False where the budget is spent."""
        if choice in self._looked:
            return True
        for line, _ in choice:
            if not self._search.go_on():
                return False
            column, count = packing.columns[line], packing.sequences(choice)
            if count < packing.limits.global_batch:
                return True
            spare = count - packing.limits.global_batch
            column.most_sequences = self._lines.tighten(
                line, column.most_sequences - spare, column.most_sequences, limit_s
            )
        if packing.sequences(choice) >= packing.limits.global_batch:
            if not self._enumeration.look_at(self._lines.arrangements(choice), limit_s):
                return False
            self._looked.add(choice)
        return True
