"""One run of a search: its clock, its steps, the best plan so far, and who hears of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from hexiopt.bounds import bound_under_s, lower_bound_s, our_model
from hexiopt.cost.cells import with_degrees
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import coarse_violations
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, OnProgress, Pricer, Progress
from hexiopt.solving.clock import search_clock_s
from hexiopt.solving.result import OPTIMALITY_TOLERANCE, OperatorCounts, Point, RestrictedBound, Result, Status
from solvers.core.operators import OperatorStatistics, OperatorTally
from solvers.core.zero import without_idle_sharding

_TELL_EVERY_S = 0.1


class Search:
    """Bookkeeping of one run of a solver.

    Where steps are limited, shares of the budget are shares of the steps; the clock then ends the run at its time
    limit, and steers nothing else: the same seed and steps give the same plan on a busy machine too.
    """

    clock: ClassVar[Callable[[], float]] = search_clock_s  # tests set another

    def __init__(
        self,
        name: str,
        problem: Problem,
        budget: Budget,
        seed: int,
        pricer: Pricer | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.name, self.problem, self.budget, self.seed = name, problem, budget, seed
        self._started = Search.clock()
        self.pricer: Pricer = pricer or PlanPricer(problem)
        self.our_model = our_model(self.pricer, problem)  # our pricer, where searches may prove by it; else None
        self.bound_s = bound_under_s(self.pricer, problem)
        self.start: Plan | None = None  # a plan to begin from
        self.plan: Plan | None = None
        self.cost: Cost | None = None
        self.closest_to_fitting: tuple[Plan, Cost] | None = None  # the plan that exceeds memory least
        self.steps = 0
        self._begun_steps = self._others_steps = 0  # taken before this search began, and by others merged into it
        # What only the solver knows, for the one who says how the run ended (`frame/infeasible.py`):
        self.exhausted = False  # the whole space was searched: the plan is optimal, or there is none
        self.restricted_bound: RestrictedBound | None = None
        self.reason = ""  # why it found no plan, where it knows better
        self.remedy: str | None = None  # what to try then, where it does not search the whole plan space
        self.enough_gap = 0.0  # the search ends at a plan proved to be within it of the best
        self.operators = OperatorStatistics()
        self._trajectory: list[Point] = []
        self.on_progress = on_progress
        self._stopped = False
        self._told_s, self._told_limit_s = 0.0, budget.time_limit_s

    # ------------------------------------------------------------------------ searches inside

    @property
    def exact_pricer(self) -> PlanPricer:
        """Our pricer, for solvers that take no other (`Capabilities.pricers`)."""
        assert self.our_model is not None, "`refuse` lets no other through"
        return self.our_model

    def child(self) -> "Search":
        """A separate search for the same run: same clock, budget, seed, pricer and listener, starting from the best
        plan so far and the steps already taken.
        """
        other = copy(self)
        other._begun_steps, other._others_steps = self.steps, 0
        other.closest_to_fitting, other._trajectory, other.operators = None, [], OperatorStatistics()
        return other

    def outcome(self) -> "SearchOutcome":
        """What another search for the same run needs to know of this one; picklable."""
        points = tuple(replace(point, steps=point.steps - self._begun_steps) for point in self._trajectory)
        steps = self.total_steps - self._begun_steps
        operators = self.operators.counts()
        return SearchOutcome(self.plan, self.cost, steps, self.closest_to_fitting, points, operators)

    def absorb(self, outcome: "SearchOutcome") -> None:
        """Merge the outcome of another search for the same run; of plans that do not fit, keep the one closest to
        fitting.
        """
        self._others_steps += outcome.steps
        self.operators.add(outcome.operators)
        if outcome.plan is not None:
            self.offer(outcome.plan, outcome.cost)
            self._merge_trajectory(outcome.trajectory)
        if outcome.closest_to_fitting is not None:
            self._keep_closest(*outcome.closest_to_fitting)

    # ----------------------------------------------------------------------------- the budget

    @property
    def total_steps(self) -> int:
        """The steps of this search and of those whose outcomes it has merged."""
        return self.steps + self._others_steps

    @property
    def runtime_s(self) -> float:
        """Seconds since the start."""
        return Search.clock() - self._started

    def left_s(self) -> float:
        """Seconds left of the time limit."""
        return self.budget.time_limit_s - self.runtime_s

    @property
    def spent(self) -> float:
        """The fraction of the budget that is spent: of the steps where these are limited, else of the time."""
        if self.budget.max_steps is not None:
            return self.steps / self.budget.max_steps
        return self.runtime_s / self.budget.time_limit_s

    @property
    def stopped(self) -> bool:
        """Whether the listener has asked to stop."""
        return self._stopped

    def should_continue(self, until: float = 1.0) -> bool:
        """True while less than the fraction `until` of the budget is spent and no listener has asked to stop.

        The budget is counted in steps where these are limited, else in time; the time limit always ends the search.
        """
        now_s, most = self.runtime_s, self.budget.max_steps
        if self.on_progress is not None and not self._stopped and now_s - self._told_s > _TELL_EVERY_S:
            self._told_s = now_s
            found_s = self.best_s, self.bound_s
            self._stopped = not self.on_progress(Progress(self.name, now_s, self._told_limit_s, self.steps, *found_s))
        if self._stopped or (most is not None and self.steps >= most * until):
            return False
        if self.enough_gap and self.best_s * (1.0 - self.enough_gap) <= self.bound_s:
            return False
        return now_s < self.budget.time_limit_s * (until if most is None else 1.0)

    def until(self, fraction: float = 1.0) -> "Allowance":
        """What is left until `fraction` of the whole budget is spent."""
        return Allowance(self, self.spent, fraction)

    def allowance(self, share: float = 1.0) -> "Allowance":
        """A share of what is left of the budget."""
        return self.until().part(share)

    def step(self) -> bool:
        """Count one step; False, and none is counted, once the budget is spent."""
        if not self.should_continue():
            return False
        self.steps += 1
        return True

    @contextmanager
    def tallied(self, operator: str) -> Iterator[OperatorTally]:
        """A context whose duration, and whether the best plan became better in it, are counted for `operator`. A better
        plan counts as accepted."""
        tally, best_s, began_s = self.operators.of(operator), self.best_s, self.runtime_s
        accepted = tally.accepted
        yield tally
        improved = self.best_s < best_s
        tally.improved += improved
        tally.accepted = max(tally.accepted, accepted + improved)
        tally.seconds += self.runtime_s - began_s

    # ----------------------------------------------------------------------------- what is found

    @property
    def best_s(self) -> float:
        """Best step time so far."""
        return self.cost.step_time_s if self.cost else float("inf")

    def relax(self, seconds: float) -> None:
        """Raise the bound to that of the relaxations (`hexiopt/bounds/`) after so many seconds of the clock."""
        self.bound_s = max(self.bound_s, lower_bound_s(self.exact_pricer, seconds, Search.clock))

    def begin_at(self, start: Plan | None) -> None:
        """Price `start`, a plan known before, if there is one; searches that move from plan to plan begin there."""
        self.start = start
        if start is not None:
            self.offer(start)

    def offer(self, plan: Plan, cost: Cost | None = None) -> Cost:
        """Price `plan`, and keep it if it is the best so far or, where it does not fit, the closest to fitting.

        A plan that breaks one of the switches by which searches do not steer is priced and not kept.
        """
        cost = cost or self.pricer.price(plan)
        if self.pricer.features.stages is not None:
            plan = with_degrees(plan, self.pricer.features.stages)
        if coarse_violations(self.problem.space, plan):
            return cost
        if cost.fits and cost.step_time_s < self.best_s:
            self.plan, self.cost = plan, cost
            self._trajectory.append(Point(self.runtime_s, self.steps, cost.step_time_s))
        elif not cost.fits:
            self._keep_closest(plan, cost)
        return cost

    def _keep_closest(self, plan: Plan, cost: Cost) -> None:
        if self.closest_to_fitting is None or cost.excess_bytes < self.closest_to_fitting[1].excess_bytes:
            self.closest_to_fitting = (plan, cost)

    @property
    def trajectory(self) -> tuple[Point, ...]:
        """The improvements so far."""
        return tuple(self._trajectory)

    def _merge_trajectory(self, points: Sequence[Point]) -> None:
        """Merge the improvements of a parallel search into the trajectory, ordered by the time at which they were
        made.
        """
        reached, merged = [0, 0], list[Point]()
        members = [(point, member) for member, own in enumerate((self._trajectory, points)) for point in own]
        for point, member in sorted(members, key=lambda item: item[0].runtime_s):
            reached[member] = point.steps
            if not merged or point.step_time_s < merged[-1].step_time_s:
                merged.append(replace(point, steps=sum(reached)))
        self._trajectory = merged

    def result(self) -> Result:
        """The outcome, without a reason."""
        plan, cost = self.plan, self.cost
        found = plan is not None and cost is not None
        if plan is not None:
            plain = without_idle_sharding(plan, self.problem)
            if plain is not plan and (price := self.pricer.price(plain)).fits and price.step_time_s <= self.best_s:
                plan, cost = plain, price
        best_s = cost.step_time_s if cost is not None else self.best_s
        if self.exhausted and found:
            self.bound_s = best_s
        gap = (best_s - self.bound_s) / best_s if found and best_s > 0.0 else 1.0  # a stranger's price may be 0
        status = Status.OPTIMAL if gap <= OPTIMALITY_TOLERANCE else Status.FEASIBLE
        return Result(
            solver=self.name,
            status=status if found else Status.INFEASIBLE if self.exhausted else Status.NOT_FOUND,
            seed=self.seed,
            runtime_s=self.runtime_s,
            steps=self.total_steps,
            plan=plan,
            cost=cost,
            bound_s=self.bound_s,
            trajectory=self.trajectory,
            restricted_bound=self.restricted_bound if found else None,
            operators=self.operators.counts(),
            closest_to_fitting=None if found else self.closest_to_fitting,
        )


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What one search reports to another: its best plan, steps, the plan closest to fitting, trajectory and
    operator counts.
    """

    plan: Plan | None
    cost: Cost | None
    steps: int
    closest_to_fitting: tuple[Plan, Cost] | None
    trajectory: tuple[Point, ...]
    operators: tuple[OperatorCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class Allowance:
    """A part of a search's budget, between two fractions of it; true while it is not spent."""

    search: Search
    begin: float
    end: float

    def __bool__(self) -> bool:
        return self.search.should_continue(self.end)

    @property
    def spent(self) -> float:
        """The fraction of this part that is spent, at most 1."""
        width = self.end - self.begin
        return min(1.0, (self.search.spent - self.begin) / width) if width > 0.0 else 1.0

    def rest(self) -> "Allowance":
        """What is left of this part."""
        return self.part(1.0)

    def part(self, share: float) -> "Allowance":
        """A share of what is left of this part."""
        begin = self.search.spent
        return Allowance(self.search, begin, begin + share * max(0.0, self.end - begin))

    def up_to(self, share: float) -> "Allowance":
        """From now until `share` of this part, counted from its beginning, is spent."""
        return Allowance(self.search, self.search.spent, self.begin + share * (self.end - self.begin))
