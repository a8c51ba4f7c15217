"""The contract of every solver: a problem and a budget in, a `Result` out, never an exception for a hard problem."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.result import OPTIMALITY_TOLERANCE, Point, Result, Status
from hexiopt.schedules.in_flight import InFlight
from solvers.core.zero import without_idle_sharding


@dataclass(frozen=True)
class Budget:
    """When to stop: wall-clock seconds and, for determinism, steps of the solver's own unit (None: no limit)."""

    time_limit_s: float = 10.0
    max_steps: int | None = None


class Pricer(Protocol):
    """What a search asks of a cost model; `hexiopt.cost.model.CostModel` is ours, `experiments` has others.

    A *site* is whatever makes two TP groups cost the same (hashable). All times in seconds for one micro-batch.
    """

    problem: Problem
    sends_occupy_stages: bool  # whether a stage's messages to the next take its own time, rather than overlap

    def site(self, devices: tuple[int, ...]) -> Any:
        """The site of a TP group."""

    def stage_s(
        self, site: Any, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage."""

    def max_layers(
        self, site: Any, first: bool, last: bool, micro_batch_size: int, policy: str, held: InFlight, shards: Shards
    ) -> int:
        """The most layers that fit, `held` in flight, states spread as `shards`; may be negative."""

    def hop_s(self, senders: tuple[int, ...], receivers: tuple[int, ...], micro_batch_size: int) -> float:
        """One message between two stages, the network otherwise idle."""

    def policies(self) -> tuple[str, ...]:
        """The recompute policies worth considering."""

    def pipelines(self, plan: Plan) -> Sequence[PipelineCost]:
        """The cost of each pipeline; none ends after the step does."""

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The cost of a whole plan; `pipelines` where they are already priced."""


@dataclass(frozen=True)
class Progress:
    """What a solver tells while it works."""

    solver: str
    runtime_s: float
    time_limit_s: float
    steps: int
    best_s: float  # best step time so far, infinite before the first plan
    bound_s: float


Listener = Callable[[Progress], bool]  # returns False to stop the search


class Solver(Protocol):
    """Finds a plan. `pricer` replaces our cost model; `listen` hears progress and may stop."""

    name: str

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """The best plan found within `budget`."""


class Search:
    """Bookkeeping of one run: the clock, the steps, the incumbent, its trajectory, and who listens.

    Solvers that run inside another share its `Search`, so that budgets and incumbents are one.
    """

    def __init__(
        self,
        name: str,
        problem: Problem,
        budget: Budget,
        seed: int,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> None:
        self.name, self.problem, self.budget, self.seed = name, problem, budget, seed
        self._started = time.perf_counter()
        self.pricer: Pricer = pricer or CostModel(problem)
        self.bound_s = lower_bound_s(self.pricer) if isinstance(self.pricer, CostModel) else 0.0
        self.plan: Plan | None = None
        self.cost: Cost | None = None
        self.nearest: tuple[Plan, Cost] | None = None  # the plan with the smallest excess of memory
        self.steps = 0
        self._trajectory: list[Point] = []
        self._listen = listen
        self._stopped = False
        self._told_s = 0.0

    def beside(self, listen: Listener | None = None) -> "Search":
        """A search of its own for the same run: same clock, budget, seed and pricer, nothing found yet."""
        other = Search(self.name, self.problem, self.budget, self.seed, self.pricer, listen or self._listen)
        other._started = self._started
        return other

    @property
    def runtime_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def best_s(self) -> float:
        """Best step time so far."""
        return self.cost.step_time_s if self.cost else float("inf")

    def left_s(self, until: float = 1.0) -> float:
        """Seconds left of the fraction `until` of the time limit."""
        return self.budget.time_limit_s * until - self.runtime_s

    @property
    def spent(self) -> float:
        """The fraction of the budget that is spent: of the steps, where these are limited, or else of the time."""
        if self.budget.max_steps is not None:
            return self.steps / self.budget.max_steps
        return self.runtime_s / self.budget.time_limit_s

    @property
    def stopped(self) -> bool:
        """Whether the listener has asked to stop."""
        return self._stopped

    def go_on(self, until: float = 1.0) -> bool:
        """Whether budget is left (time up to a fraction `until`), and nobody has stopped the search."""
        if self._stopped or (self.budget.max_steps is not None and self.steps >= self.budget.max_steps):
            return False
        now = self.runtime_s
        if self._listen is not None and now - self._told_s > 0.1:
            self._told_s = now
            progress = Progress(self.name, now, self.budget.time_limit_s, self.steps, self.best_s, self.bound_s)
            self._stopped = not self._listen(progress)
        return now < self.budget.time_limit_s * until

    def step(self) -> None:
        """Count one step."""
        self.steps += 1

    def offer(self, plan: Plan, cost: Cost | None = None) -> Cost:
        """Price `plan` and keep it if it is the best so far, or the nearest to fitting."""
        cost = cost or self.pricer.price(plan)
        if cost.fits and cost.step_time_s < self.best_s:
            self.plan, self.cost = plan, cost
            self._trajectory.append(Point(self.runtime_s, self.steps, cost.step_time_s))
        elif not cost.fits and (self.nearest is None or cost.excess_bytes < self.nearest[1].excess_bytes):
            self.nearest = (plan, cost)
        return cost

    @property
    def trajectory(self) -> tuple[Point, ...]:
        """The improvements so far."""
        return tuple(self._trajectory)

    def weave(self, points: Sequence[Point]) -> None:
        """Take the improvements of a search beside this one into its trajectory, at the times when they were made."""
        reached, woven = [0, 0], list[Point]()
        lanes = [(point, lane) for lane, own in enumerate((self._trajectory, points)) for point in own]
        for point, lane in sorted(lanes, key=lambda item: item[0].runtime_s):
            reached[lane] = point.steps
            if not woven or point.step_time_s < woven[-1].step_time_s:
                woven.append(replace(point, steps=sum(reached)))
        self._trajectory = woven

    def result(self) -> Result:
        """The outcome."""
        plan, cost = self.plan, self.cost
        if plan is not None:
            plain = without_idle_sharding(plan, self.problem)
            if plain is not plan:
                plan, cost = plain, self.pricer.price(plain)
        gap = (cost.step_time_s - self.bound_s) / cost.step_time_s if cost else 1.0
        status = Status.OPTIMAL if gap <= OPTIMALITY_TOLERANCE else Status.FEASIBLE
        return Result(
            solver=self.name,
            status=status if plan is not None else Status.NOT_FOUND,
            seed=self.seed,
            runtime_s=self.runtime_s,
            steps=self.steps,
            plan=plan,
            cost=cost,
            bound_s=self.bound_s,
            trajectory=self.trajectory,
        )
