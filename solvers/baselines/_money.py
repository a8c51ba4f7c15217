"""Baselines that can also minimise money: what the devices of a plan cost for the time of a step, under a deadline."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hexiopt.cost.cost import Cost
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from solvers.baselines._frame import Baseline, CandidatePricing
from solvers.core.search import Search

OBJECTIVES = ("time", "money")
_MAX_WITHOUT_CHEAPER = 300  # plans that fit and are priced without a cheaper one
_TOLERANCE = 1.25  # estimates that exceed the deadline by less are priced still


def prices_per_s(problem: Problem) -> tuple[float, ...]:
    """Price per second of every device of the cluster: its share of the price of its machine.

    Raises InputError if a usable machine has no price.
    """
    cluster = problem.cluster
    for m in problem.usable_by_machine:
        if cluster.machines[m].price_per_hour is None:
            raise InputError(
                f"solver.objective: money needs a price of every machine, and {cluster.machines[m].name} has none; "
                "state price_per_hour in the cluster file, or choose solver.objective=time"
            )
    per_machine = [(machine.price_per_hour or 0.0) / machine.num_gpus / 3600.0 for machine in cluster.machines]
    return tuple(per_machine[m] for m in cluster.machine_of.tolist())


@dataclass(frozen=True)
class Objective:
    """The objective by which candidates are ranked, to be minimised: seconds of a step, or with `prices` its money."""

    prices: tuple[float, ...] | None = None
    deadline_s: float = math.inf

    @property
    def latest_s(self) -> float:
        """The longest estimate that may still turn out to meet the deadline."""
        return _TOLERANCE * self.deadline_s

    def of(self, devices: Iterable[int], seconds: float) -> float:
        """The objective of a step of estimated `seconds`; infinite where they are well beyond the deadline."""
        if self.prices is None:
            return seconds
        if seconds > self.latest_s:
            return math.inf
        return seconds * sum(self.prices[device] for device in devices)

    def lower_bound(self, num_devices: int, seconds: float) -> float:
        """The least objective of any `num_devices` devices that take `seconds` or longer."""
        if self.prices is None:
            return seconds
        return math.inf if seconds > self.latest_s else seconds * self._cheapest[num_devices]

    @cached_property
    def _cheapest(self) -> list[float]:
        """Price per second of the cheapest 0, 1, 2, ... devices."""
        prices_per_s = [0.0]
        for price in sorted(self.prices or ()):
            prices_per_s.append(prices_per_s[-1] + price)
        return prices_per_s


@dataclass(frozen=True)
class MoneyBaseline(Baseline):
    """A baseline whose `objective` is time (seconds of a step) or money (of a step that takes at most `deadline_s`).

    Raises InputError for an unknown objective, a deadline that is not positive, and a deadline without money.
    """

    objective: str = "time"
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise InputError(f"solver.objective: {self.objective!r} is not known; choose {' or '.join(OBJECTIVES)}")
        if self.deadline_s is not None and self.objective != "money":
            raise InputError("solver.deadline_s: belongs to solver.objective=money; state both or neither")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise InputError(f"solver.deadline_s: {self.deadline_s} is out of range; state seconds of a step above 0")

    def objective_of(self, problem: Problem) -> Objective:
        """How candidates are ranked. Raises InputError if money is the objective and a price is missing."""
        if self.objective == "time":
            return Objective()
        return Objective(prices_per_s(problem), self.deadline_s or math.inf)

    def pricing(self, run: Search) -> CandidatePricing:
        """By the objective. Raises InputError as `objective_of` does."""
        if self.objective == "time":
            return super().pricing(run)
        return CheapestPricing(run, self.objective_of(run.problem))


class CheapestPricing(CandidatePricing):
    """Compares plans within the deadline by money. Only the cheapest is offered, so the trajectory has one point."""

    def __init__(self, run: Search, objective: Objective) -> None:
        super().__init__(run, _MAX_WITHOUT_CHEAPER)
        self._objective, self._deadline_s = objective, objective.deadline_s
        self._cheapest: tuple[Plan, Cost] | None = None
        self._least, self._fastest_s = math.inf, math.inf

    def _evaluate(self, plan: Plan) -> tuple[bool, bool]:
        """Price a plan; returns whether it fits, and whether it is the cheapest so far within the deadline."""
        cost = self.run.pricer.price(plan)
        if not cost.fits:
            self.run.offer(plan, cost)
            return False, False
        self._fastest_s = min(self._fastest_s, cost.step_time_s)
        spent = self._objective.of(plan.devices(), cost.step_time_s)
        if cost.step_time_s > self._deadline_s or spent >= self._least:
            return True, False
        self._cheapest, self._least = (plan, cost), spent
        return True, True

    def finish(self) -> str:
        """Offer the cheapest plan. Returns why there is none, if known."""
        if self._cheapest is not None:
            self.run.offer(*self._cheapest)
        elif self._fastest_s < math.inf:
            return (
                f"no plan found within solver.deadline_s={self._deadline_s:g}; the fastest step met takes "
                f"{self._fastest_s:.4g} s; allow more"
            )
        elif self._deadline_s < math.inf and self.run.closest_to_fitting is None and self.run.should_continue():
            return (
                f"no plan of {self.run.name}'s space is estimated to take at most "
                f"solver.deadline_s={self._deadline_s:g}; allow more, or choose solver=portfolio"
            )
        return ""
