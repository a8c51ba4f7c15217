"""What a solver is: a problem and a budget in, a `Result` out.

A solver needs no other package of this project than `hexiopt`; `solvers` has ours, with what they share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal, Protocol

from hexiopt.bounds import our_model
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PricerFeatures as PricerFeatures
from hexiopt.errors import InputError, quoted
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import whole_in
from hexiopt.schedules.in_flight import InFlight
from hexiopt.solving.result import Result

MAX_TIME_LIMIT_S = 30 * 86_400.0
MAX_STEPS = 10**12
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: after `time_limit_s` seconds and, for determinism, `max_steps` of the solver's own unit (None: no
    limit). Where steps are limited the clock may end a search at its time limit, but not steer it.

    Raises InputError for a time limit that is not above 0 and at most 30 days, and for steps that are not whole or
    below 1.
    """

    time_limit_s: float = 10.0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        limit_s, steps = self.time_limit_s, self.max_steps
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s <= MAX_TIME_LIMIT_S:
            raise InputError(
                f"time_limit_s: {quoted(limit_s)} is out of range; state seconds above 0, "
                f"at most {MAX_TIME_LIMIT_S:.0f}"
            )
        if steps is None:
            return
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
            raise InputError(f"max_steps: {quoted(steps)} is out of range; state a whole number from 1, or None")

    def part(self, share: float) -> "Budget":
        """A share of the steps where they are limited, with the whole time; else of the time."""
        if self.max_steps is None:
            return Budget(self.time_limit_s * share)
        return replace(self, max_steps=max(1, round(self.max_steps * share)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a solver can do, as data.

    `kind`: a `planner` searches the whole plan space, a `baseline` the published one of another system, an `oracle`
    proves what it finds. `sequence`: whether its plans have sequence layouts; `only` refuses a problem without them.
    `pricers`: which cost models its search accepts. `max_devices`, `max_layers`: the largest problem that it takes.
    `requires`: packages that it imports. `cores`: how many it keeps busy, or all that there are.
    """

    kind: Literal["planner", "baseline", "oracle"] = "planner"
    sequence: Literal["no", "only", "also"] = "no"
    pricers: Literal["any", "cost_model"] = "any"
    max_devices: int | None = None
    max_layers: int | None = None
    requires: tuple[str, ...] = ()
    cores: int | Literal["all"] = 1

    def busy(self, usable: int) -> int:
        """The number of `usable` cores that it keeps busy."""
        return usable if self.cores == "all" else min(self.cores, usable)


class Pricer(Protocol):
    """What a search asks of a cost model; `hexiopt.cost.pricer.PlanPricer` is ours, `solvers.baselines` has others.

    A TP group here is what its cost depends on (hashable), equal for all devices that cost the same. All times are in
    seconds for one micro-batch. Whether a bound or proof of ours holds for a pricer, `hexiopt.bounds.our_model` says.
    """

    problem: Problem

    @property
    def features(self) -> PricerFeatures:
        """Its further abilities; searches ask for them, never for its class."""

    def tp_group(self, devices: tuple[int, ...]) -> Any:
        """The TP group that these devices form."""

    def stage_s(
        self, tp_group: Any, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage."""

    def max_layers(
        self,
        tp_group: Any,
        first: bool,
        last: bool,
        micro_batch_size: int,
        policy: str,
        held: InFlight,
        shards: StateSharding,
    ) -> int:
        """The most layers that fit, `held` in flight, states spread as `shards`; may be negative."""

    def message_s(self, senders: tuple[int, ...], receivers: tuple[int, ...], micro_batch_size: int) -> float:
        """One message between two stages, the network otherwise idle."""

    def policies(self) -> tuple[str, ...]:
        """The recompute policies worth considering."""

    def pipelines(self, plan: Plan) -> Sequence[PipelineCost]:
        """The cost of each pipeline; none ends after the step does."""

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The cost of a whole plan; `pipelines` where they are already priced."""


PricerMaker = Callable[[Problem], Pricer]  # such as the class of a cost model


@dataclass(frozen=True)
class Progress:
    """What a solver tells while it works."""

    solver: str
    runtime_s: float
    time_limit_s: float
    steps: int
    best_s: float  # best step time so far, infinite before the first plan
    bound_s: float


OnProgress = Callable[[Progress], bool]  # returns False to stop the search


class Solver(Protocol):
    """Finds a plan. `pricer` replaces our cost model; `on_progress` hears progress and may stop the search.

    A solver whose `solve` also takes `start`, a plan to begin from, returns none that is slower.
    """

    @property
    def name(self) -> str:
        """The solver's name; for most a class variable."""

    @property
    def capabilities(self) -> Capabilities:
        """The problems and cost models that it takes; for most a class variable."""

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        on_progress: OnProgress | None = None,
    ) -> Result:
        """The best plan found within `budget`."""


def valid_seed(seed: object) -> int:
    """A seed from 0 to `MAX_SEED`. Raises InputError."""
    return whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)


def pricer_name(pricer: Pricer) -> str:
    """The name of a cost model in messages: its `name`, else that of its class."""
    return str(getattr(pricer, "name", None) or type(pricer).__name__)


def foreign_name(pricer: Pricer | None, problem: Problem) -> str:
    """The name of a cost model whose prices for `problem` are not ours; empty for ours and for None."""
    return "" if pricer is None or our_model(pricer, problem) is not None else pricer_name(pricer)


def refuse(solver: Solver, problem: Problem, pricer: Pricer | None) -> None:
    """Raise InputError where the capabilities of `solver` do not cover `problem` and `pricer`, where a package is
    missing, and where `pricer` prices another problem."""
    able, name = solver.capabilities, solver.name
    if pricer is not None and pricer.problem != problem:
        raise InputError(
            f"pricer: {pricer_name(pricer)} was made for another problem; give its name or class, which makes one"
        )
    instead = "solver=hexiseq" if able.sequence == "only" else "solver=portfolio"
    if able.sequence == "only" and not problem.space.sequence:
        raise InputError(f"solver: {name} plans stages with sequence layouts; allow them with space.sequence=true")
    if able.kind == "oracle" and able.sequence == "no" and problem.space.sequence:
        raise InputError(
            f"solver: {name} proves nothing about sequence layouts; take space.sequence=false, "
            "solver=sequence_exact or solver=portfolio"
        )
    if able.kind == "oracle" and not problem.model.equal_layers:
        raise InputError(f"solver: {name} proves nothing about layers of several kinds; take solver=portfolio")
    if able.kind == "oracle" and problem.space.uneven_chunks:
        raise InputError(
            f"solver: {name} proves nothing about chunks of uneven length; take space.uneven_chunks=false, "
            "or solver=portfolio"
        )
    if able.kind == "oracle" and problem.space.depth:
        raise InputError(
            f"solver: {name} proves nothing about stages of other depths than the schedule's; take space.depth=false, "
            "or solver=portfolio"
        )
    if able.kind == "oracle" and problem.space.uneven_experts:
        raise InputError(
            f"solver: {name} proves nothing about experts shared in any numbers; take space.uneven_experts=false, or "
            "solver=portfolio"
        )
    for schedule in problem.schedules if able.kind == "oracle" else ():
        if schedule.splits or not schedule.is_bounded:
            raise InputError(f"solver: {name} proves nothing about the {schedule} schedule; take {instead}")
    for package in able.requires:
        if find_spec(package) is None:
            raise InputError(
                f'solver: {name}: needs the package {package}; install it with "pip install {package}", '
                f"or choose {instead}"
            )
    limits = {"devices": able.max_devices, "layers": able.max_layers}
    sizes = {"devices": len(problem.usable_devices), "layers": problem.model.num_layers}
    if any(most is not None and sizes[unit] > most for unit, most in limits.items()):
        bounded = [(unit, most) for unit, most in limits.items() if most is not None]
        sizes_in_words = " and ".join(f"{sizes[unit]} {unit}" for unit, _ in bounded)
        limits_in_words = " and ".join(f"{most} {unit}" for unit, most in bounded)
        raise InputError(
            f"solver: {name}: {sizes_in_words} are more than the {limits_in_words} that it can search; use {instead}"
        )
    if able.pricers == "cost_model" and pricer is not None and our_model(pricer, problem) is None:
        raise InputError(
            f"solver: {name}: its bounds hold for our own cost model only, not for {pricer_name(pricer)}; use {instead}"
        )
