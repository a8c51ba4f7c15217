"""What a solver returns."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan

OPTIMALITY_TOLERANCE = 1e-6


class Status(StrEnum):
    """How a search ended. `INFEASIBLE` is proven, `NOT_FOUND` only says that the budget was spent; `INVALID` that the
    plan broke a rule and was taken away (`referee`); in a comparison, `REFUSED` that the solver does not take the
    problem, and `CRASHED` that it raised an exception."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NOT_FOUND = "not_found"
    INVALID = "invalid"
    REFUSED = "refused"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Point:
    """One improvement: seconds and steps since the start, and the best step time then."""

    runtime_s: float
    steps: int
    step_time_s: float


@dataclass(frozen=True)
class RestrictedBound:
    """A step time in seconds that no plan of `space`, part of the plan space, can beat; `space` in words."""

    bound_s: float
    space: str


@dataclass(frozen=True, slots=True)
class OperatorCounts:
    """What became of the candidates of one operator of a search.

    Of `proposed` draws, `valid` ones gave another solution; of these some were `known` already, some `unfit` (outside
    the plan space, or beyond memory), some `priced`, the others dropped for a bad estimate. The search went on from
    `accepted` ones; `improved` ones became the run's best plan. `seconds` are of proposals and all that followed.
    """

    operator: str
    proposed: int
    valid: int
    known: int
    unfit: int
    priced: int
    accepted: int
    improved: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """A plan with its cost, or the reason why there is none.

    `bound_s` is a step time that no plan of the space can beat (0 where none is known). `steps` counts the
    solver's own unit of work, `reason` is a sentence for the user where `plan` is None. A solver that proves more about
    the part of the space that it searches states it in `restricted_bound`. `operators` counts what each operator did.
    `overrun_s` is what the search took beyond its time limit, where that is more than tolerated
    (`referee`), else 0. Without a plan, `closest_to_fitting` is the one met that exceeds memory least, and its cost.
    """

    solver: str
    status: Status
    seed: int
    runtime_s: float
    steps: int
    plan: Plan | None = None
    cost: Cost | None = None
    bound_s: float = 0.0
    trajectory: tuple[Point, ...] = ()
    reason: str = ""
    restricted_bound: RestrictedBound | None = None
    operators: tuple[OperatorCounts, ...] = ()
    overrun_s: float = 0.0
    closest_to_fitting: tuple[Plan, Cost] | None = None

    def __post_init__(self) -> None:
        has_plan = self.status in (Status.OPTIMAL, Status.FEASIBLE)
        assert (self.plan is not None) == (self.cost is not None) == has_plan, "a plan comes with its cost and status"

    @property
    def objective(self) -> float:
        """Step time in seconds, infinite without a plan."""
        return self.cost.objective if self.cost else float("inf")

    @property
    def gap(self) -> float:
        """(cost − bound) / cost; 1 without a plan."""
        return (self.cost.step_time_s - self.bound_s) / self.cost.step_time_s if self.cost else 1.0

    @property
    def restricted_gap(self) -> float:
        """(cost − bound) / cost in the part of the space that the solver searches; `gap` where it states none."""
        if self.restricted_bound is None or self.cost is None:
            return self.gap
        return max(0.0, (self.cost.step_time_s - self.restricted_bound.bound_s) / self.cost.step_time_s)

    def above(self, bound_s: float) -> Self:
        """The result with a valid lower bound of at least `bound_s` seconds; optimal if that closes the gap."""
        raised = replace(self, bound_s=max(self.bound_s, bound_s))
        closed = raised.cost is not None and raised.gap <= OPTIMALITY_TOLERANCE
        return replace(raised, status=Status.OPTIMAL) if closed else raised
