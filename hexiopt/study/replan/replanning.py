"""New plans for a cluster that has changed, each weighed against what it moves.

Plans are made that move least (pipelines that are still whole go on as they are and share the batch) and little (broken
ones go on without what was lost), the fastest one, and one in between, whose search minimises the step time plus the
seconds of moving spread over the steps until the next change. What another beats in step and moving time is dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import solver_to_dict
from hexiopt.frame import Frame
from hexiopt.memo import Memo
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Pricer
from hexiopt.solving.result import Result
from hexiopt.study.naming import renumbered
from hexiopt.study.replan.mending import kept, mended
from hexiopt.study.replan.moving import Moving, moving, restoring
from hexiopt.study.solution import PlacedPlan, PlanCost
from hexiopt.units import GIB
from hexiopt.value import Value

LEAST, MENDED, BETWEEN, FASTEST = "least moved", "mended", "in between", "fastest"
_FASTEST = 0.75  # of the budget, for the fastest plan; the one in between begins at it, or at one that moves less
_KEPT = 20_000  # plans whose moving is remembered
_SAME = 1e-12  # of a step time
_NEVER = -1e9  # layers, for devices that cannot take each other's place


class NoReplacementError(InputError):
    """There is no plan for the changed cluster."""


@dataclass(frozen=True, repr=False)
class Replacement(Value):
    """A plan for the changed problem: its price, what it moves and how long that takes in seconds."""

    name: str
    plan: PlacedPlan
    cost: PlanCost
    moving: Moving
    moving_s: float

    def total_s(self, steps: float) -> float:
        """Seconds of moving and of `steps` steps."""
        return self.moving_s + steps * self.cost.step_time_s


@dataclass(frozen=True, repr=False)
class Replanning(Value):
    """What can replace a plan: `replacements` from the least moved to the fastest, all on the frontier.

    `horizon_steps`: training steps until the next change, which decide between them. A change takes `restart_s` seconds
    beside moving; a machine reads a checkpoint at `checkpoint_gb_per_s`, or as fast as its network interfaces receive
    where that is less, or None.
    """

    before: PlacedPlan
    replacements: tuple[Replacement, ...]
    horizon_steps: float
    restart_s: float
    checkpoint_gb_per_s: float | None

    @cached_property
    def best(self) -> Replacement:
        """The one that trains `horizon_steps` steps first."""
        return min(self.replacements, key=lambda one: one.total_s(self.horizon_steps))

    @property
    def storage(self) -> str:
        """In words, what a change takes beside moving between devices."""
        rate, network = self.checkpoint_gb_per_s, "as fast as its network"
        read = network if rate is None else f"at {rate:g} GB/s, or {network} where that is less"
        return f"a change takes {self.restart_s:g} s more, and a machine reads a checkpoint {read}"

    def pays_back_steps(self, one: Replacement) -> float | None:
        """After how many steps `one` has made good what it moves beyond the least moved plan; None for that one."""
        least = self.replacements[0]
        if one is least:
            return None
        return (one.moving_s - least.moving_s) / (least.cost.step_time_s - one.cost.step_time_s)

    def frame(self) -> Frame:
        """One row per replacement."""
        rows = [
            {
                "plan": one.name,
                "step_time_s": one.cost.step_time_s,
                "tokens_per_s": one.cost.tokens_per_s,
                "moved_gib": one.moving.num_bytes / GIB,
                "moving_s": one.moving_s,
                "from_checkpoint": one.moving.from_checkpoint,
                "pays_back_steps": self.pays_back_steps(one),
                "chosen": one is self.best,
            }
            for one in self.replacements
        ]
        return Frame.of(rows, title=f"Plans after the change, for {self.horizon_steps:,.0f} more steps; {self.storage}")

    def __str__(self) -> str:
        return str(self.frame())

    def __repr__(self) -> str:
        return f"Replanning({len(self.replacements)} plans; best: {self.best.name}, {self.best.cost!r})"


class MovingPricer:
    """Our cost model, with the seconds of moving, spread over `horizon_steps`, added to each step."""

    def __init__(
        self, problem: Problem, moved: Callable[[Plan], float], horizon_steps: float, pricer: PlanPricer | None = None
    ) -> None:
        self._own = pricer or PlanPricer(problem)
        self._moved_s, self._horizon_steps = Memo(moved, _KEPT), horizon_steps
        self.features = self._own.features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The cost of a plan whose step also takes its share of the moving."""
        cost = self._own.price(plan, pipelines)
        step_s = cost.step_time_s + self._moved_s[plan] / self._horizon_steps
        slower = cost.step_time_s / step_s
        return replace(cost, step_time_s=step_s, tokens_per_s=cost.tokens_per_s * slower, mfu=cost.mfu * slower)


# From a plan to begin with, a cost model and a budget to a result.
Search = Callable[[Plan | None, Pricer | None, Budget], Result]


def replacements(
    before: PlacedPlan,
    problem: Problem,
    search: Search,
    budget: Budget,
    horizon_steps: float,
    restart_s: float,
    checkpoint_gb_per_s: float | None,
    *,
    restores: bool = False,
) -> Replanning:
    """The plans for `problem` that can replace `before`. `search` is run twice, with shares of `budget`.

    `restart_s` and `checkpoint_gb_per_s` are as of `Replanning`. With `restores`, training goes back to a checkpoint
    whatever the plan is, as our executor does after a fault.
    Raises NoReplacementError where no plan is found.
    """

    def weighed() -> Replanning:
        return Replanning(before, tuple(_frontier(found)), horizon_steps, restart_s, checkpoint_gb_per_s)

    def moved(plan: Plan) -> tuple[Moving, float]:
        what = restoring(problem, plan) if restores else moving(before.problem, before, problem, plan)
        goes_on = not what.transfers and len(plan.pipelines) == len(before.pipelines)
        return what, 0.0 if goes_on else restart_s + what.seconds(checkpoint_gb_per_s)

    def replacement(name: str, plan: Plan, solver: Mapping[str, Any] = MappingProxyType({})) -> Replacement:
        placed = PlacedPlan.of(problem, plan, solver)
        return Replacement(name, placed, placed.cost, *moved(plan))

    known = {LEAST: kept(before, problem), MENDED: mended(before, problem)}
    found = [replacement(name, plan) for name, plan in known.items() if plan is not None]
    start = min(found, key=lambda one: one.cost.step_time_s).plan if found else None
    fastest = search(start, None, budget.part(_FASTEST))
    if fastest.plan is None:
        if not found:
            raise NoReplacementError(f"replan: no plan for the changed cluster ({fastest.status}): {fastest.reason}")
        return weighed()
    near = staying(before, problem, fastest.plan)
    found.append(replacement(FASTEST, near, solver_to_dict(fastest)))
    pricer = MovingPricer(problem, lambda plan: moved(plan)[1], horizon_steps)
    start = min(found, key=lambda one: one.total_s(horizon_steps)).plan
    between = search(start, pricer, budget.part(1.0 - _FASTEST))
    if between.plan is not None:
        found.append(replacement(BETWEEN, staying(before, problem, between.plan), solver_to_dict(between)))
    return weighed()


def _frontier(found: Sequence[Replacement]) -> list[Replacement]:
    """Those that no other beats in step time and moving time, least moved first. Of the searched ones, the last is the
    fastest, whichever search found it."""
    left: list[Replacement] = []
    for one in sorted(found, key=lambda one: (one.moving_s, one.cost.step_time_s)):
        if not left or one.cost.step_time_s < left[-1].cost.step_time_s * (1 - 1e-9):
            left.append(one)
    names = {one.name: FASTEST if one is left[-1] else BETWEEN for one in left if one.name in (BETWEEN, FASTEST)}
    return [one.replace(name=names.get(one.name, one.name)) for one in left]


def staying(before: PlacedPlan, problem: Problem, plan: Plan) -> Plan:
    """`plan` with like machines and like GPUs exchanged so that most weights stay where they are.

    Machines are alike if they are of one kind in one group. Where the exchange would change the price, or links between
    machines are stated, it is `plan`.
    """
    from scipy.optimize import linear_sum_assignment  # here, because scipy.optimize is slow to import

    if problem.cluster.links:
        return plan
    cluster, machine_of = problem.cluster, problem.cluster.machine_of
    numbers = {problem.cluster.device_name(device): device for device in problem.usable_devices}
    held = {numbers.get(before.problem.cluster.device_name(device)): part for device, part in _weights(before).items()}
    needed = _weights(plan)
    used: dict[int, list[int]] = defaultdict(list)
    for device in plan.devices():
        used[int(machine_of[device])].append(device)
    group_of = {name: group.name for group in cluster.groups for name in group.members}
    alike: dict[object, list[int]] = defaultdict(list)
    for m, usable in problem.usable_by_machine.items():
        machine = cluster.machines[m]
        group = group_of.get(machine.name, group_of.get(machine.spec_name))
        alike[machine.kind, len(usable), group].append(m)
    found: dict[int, int] = {}
    for machines in alike.values():
        pairs = {
            (a, b): _matched(used[a], problem.usable_by_machine[b], needed, held, cluster.type_of)
            for a in machines
            for b in machines
        }
        kept_by = np.array([[pairs[a, b][0] for b in machines] for a in machines])
        rows, columns = linear_sum_assignment(kept_by, maximize=True)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            found |= pairs[machines[row], machines[column]][1]
    moved, pricer = renumbered(plan, found), PlanPricer(problem)
    old, new = pricer.price(plan), pricer.price(moved)
    same = abs(new.step_time_s - old.step_time_s) <= _SAME * old.step_time_s and new.fits == old.fits
    return moved if same else plan


_Weights = tuple[frozenset[int], float, float]  # layers, and the part [start, end) of each


def _weights(plan: Plan) -> dict[int, _Weights]:
    """What each device holds."""
    found = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            layers = frozenset(layer for first, end in stage.layers for layer in range(first, end))
            for devices in stage.parallelism.parameter_copies:
                for rank, device in enumerate(devices):
                    found[device] = (layers, rank / len(devices), (rank + 1) / len(devices))
    return found


def _matched(
    devices: Sequence[int],
    places: Sequence[int],
    needed: Mapping[int, _Weights],
    held: Mapping[int | None, _Weights],
    type_of: NDArray[np.int64],
) -> tuple[float, dict[int, int]]:
    """The layers that stay at best if `devices` take `places`, and who takes which."""

    from scipy.optimize import linear_sum_assignment

    def common(device: int, place: int) -> float:
        if type_of[device] != type_of[place]:
            return _NEVER
        if place not in held:
            return 0.0
        (layers, start, end), (others, first, last) = needed[device], held[place]
        return len(layers & others) * max(0.0, min(end, last) - max(start, first))

    shared: NDArray[np.float64] = np.array([[common(device, place) for place in places] for device in devices])
    if not devices:
        return 0.0, {}
    rows, columns = linear_sum_assignment(shared, maximize=True)
    taken = {devices[row]: places[column] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)}
    return float(shared[rows, columns].sum()), taken
