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
from hexiopt.plan.holdings import Holdings, intervals
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import number_in
from hexiopt.solving import Budget, Pricer, Solver, valid_seed
from hexiopt.solving.naming import renumber
from hexiopt.solving.registry import make_solver
from hexiopt.solving.result import Result
from hexiopt.study.replan.changes import Added, Slow, change
from hexiopt.study.replan.moving import CHECKPOINT_GB_PER_S, RESTART_S, Moving, moving, restoring
from hexiopt.study.replan.survivors import mend, whole_pipelines
from hexiopt.study.running import listener
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
        """The replacement that trains `horizon_steps` steps first."""
        return min(self.replacements, key=lambda replacement: replacement.total_s(self.horizon_steps))

    @property
    def storage(self) -> str:
        """In words, what a change takes beside moving between devices."""
        rate, network = self.checkpoint_gb_per_s, "as fast as its network"
        read = network if rate is None else f"at {rate:g} GB/s, or {network} where that is less"
        return f"a change takes {self.restart_s:g} s more, and a machine reads a checkpoint {read}"

    def pays_back_steps(self, replacement: Replacement) -> float | None:
        """After how many steps `replacement` makes up for what it moves beyond the least moved plan; None for it."""
        least = self.replacements[0]
        if replacement is least:
            return None
        return (replacement.moving_s - least.moving_s) / (least.cost.step_time_s - replacement.cost.step_time_s)

    def frame(self) -> Frame:
        """One row per replacement."""
        rows = [
            {
                "plan": replacement.name,
                "step_time_s": replacement.cost.step_time_s,
                "tokens_per_s": replacement.cost.tokens_per_s,
                "moved_gib": replacement.moving.num_bytes / GIB,
                "moving_s": replacement.moving_s,
                "from_checkpoint": replacement.moving.from_checkpoint,
                "pays_back_steps": self.pays_back_steps(replacement),
                "chosen": replacement is self.best,
            }
            for replacement in self.replacements
        ]
        return Frame.of(rows, title=f"Plans after the change, for {self.horizon_steps:,.0f} more steps; {self.storage}")

    def __str__(self) -> str:
        return str(self.frame())

    def __repr__(self) -> str:
        return f"Replanning({len(self.replacements)} plans; best: {self.best.name}, {self.best.cost!r})"


class MovingPricer:
    """Our cost model, with the seconds of moving, spread over `horizon_steps`, added to each step."""

    def __init__(self, pricer: PlanPricer, moving_s: Callable[[Plan], float], horizon_steps: float) -> None:
        self._pricer = pricer
        self._moved_s, self._horizon_steps = Memo(moving_s, _KEPT), horizon_steps
        self.features = self._pricer.features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pricer, name)

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The cost of a plan whose step also takes its share of the moving."""
        cost = self._pricer.price(plan, pipelines)
        step_s = cost.step_time_s + self._moved_s[plan] / self._horizon_steps
        slower = cost.step_time_s / step_s
        return replace(cost, step_time_s=step_s, tokens_per_s=cost.tokens_per_s * slower, mfu=cost.mfu * slower)


# From a plan to begin with, a cost model and a budget to a result.
Search = Callable[[Plan | None, Pricer | None, Budget], Result]


def replan(
    plan: PlacedPlan,
    problem: Problem | None = None,
    *,
    lost: Sequence[str] = (),
    slow: Slow | None = None,
    added: Added | None = None,
    horizon_steps: float = 1000.0,
    restart_s: float = RESTART_S,
    checkpoint_gb_per_s: float | None = CHECKPOINT_GB_PER_S,
    restores: bool = False,
    solver: str | Solver | type = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    progress: bool | None = None,
    **options: object,
) -> Replanning:
    """Plans that can replace `plan` on a changed cluster, each with the bytes and seconds that it moves.

    `problem` is the changed problem, of the same model; by default that of `plan`. Machines and devices in `lost` are
    excluded from it. Those in `slow` run at a share of their type's speed, `{"d:3": 0.7}`, or as a run of `plan`
    measured, of which it is the folder. `added` are more machines as a cluster file states them: the list, or a file or
    mapping with `machines` and their own `gpus`. Devices with the same name hold what they held; with `restores`, all
    go back to a checkpoint whatever the plan is, as our executor does after a fault.

    Three quarters of `time_limit_s`, and of `max_steps`, go to the fastest plan, the rest to one whose moving also pays
    back within `horizon_steps` steps. `restart_s` seconds are what a change takes beside moving; a machine reads a
    checkpoint at `checkpoint_gb_per_s`, at most as fast as its network interfaces receive (None: so fast). Both are
    assumptions until yours are stated. `options` are the solver's. Raises InputError, also where there is no plan.
    """
    now = change(plan, plan.problem if problem is None else problem, lost, slow, added)
    if now.model != plan.problem.model:
        raise InputError("replan: the changed problem has another model; plan again")
    number_in(horizon_steps, "horizon_steps", above=0.0, at_most=1e12)
    number_in(restart_s, "restart_s", at_least=0.0, at_most=1e9)
    if checkpoint_gb_per_s is not None:
        number_in(checkpoint_gb_per_s, "checkpoint_gb_per_s", above=0.0, at_most=1e6)
    budget, seed = Budget(time_limit_s, max_steps), valid_seed(seed)
    searcher = make_solver(solver, options)

    def search(start: Plan | None, pricer: Pricer | None, part: Budget) -> Result:
        with listener(now.workload.tokens, part.time_limit_s, progress) as (listen, _):
            return searcher.solve(now, part, seed=seed, pricer=pricer, on_progress=listen, start=start)

    wanted = Replanning(plan, (), horizon_steps, restart_s, checkpoint_gb_per_s)
    return weigh(wanted, now, search, budget, restores=restores)


def weigh(
    wanted: Replanning, problem: Problem, search: Search, budget: Budget, *, restores: bool = False
) -> Replanning:
    """`wanted` with its replacements for `problem`. `search` is run twice, with shares of `budget`.

    Raises NoReplacementError where no plan is found.
    """
    before, horizon_steps, pricer = wanted.before, wanted.horizon_steps, PlanPricer(problem)

    def price_moving(plan: Plan) -> tuple[Moving, float]:
        what = restoring(problem, plan) if restores else moving(before.problem, before, problem, plan)
        goes_on = not what.transfers and len(plan.pipelines) == len(before.pipelines)
        return what, 0.0 if goes_on else wanted.restart_s + what.seconds(wanted.checkpoint_gb_per_s)

    def make_replacement(name: str, plan: Plan, solver: Mapping[str, Any] = MappingProxyType({})) -> Replacement:
        placed = PlacedPlan.of(problem, plan, solver, pricer)
        return Replacement(name, placed, placed.cost, *price_moving(plan))

    known = {LEAST: whole_pipelines(before, pricer), MENDED: mend(before, pricer)}
    plans = [make_replacement(name, plan) for name, plan in known.items() if plan is not None]
    start = min(plans, key=lambda replacement: replacement.cost.step_time_s).plan if plans else None
    fastest = search(start, None, budget.part(_FASTEST))
    if fastest.plan is not None:
        near = stay(before, fastest.plan, pricer)
        plans.append(make_replacement(FASTEST, near, solver_to_dict(fastest)))
        slowed = MovingPricer(pricer, lambda plan: price_moving(plan)[1], horizon_steps)
        start = min(plans, key=lambda replacement: replacement.total_s(horizon_steps)).plan
        between = search(start, slowed, budget.part(1.0 - _FASTEST))
        if between.plan is not None:
            near = stay(before, between.plan, pricer)
            plans.append(make_replacement(BETWEEN, near, solver_to_dict(between)))
    elif not plans:
        raise NoReplacementError(f"replan: no plan for the changed cluster ({fastest.status}): {fastest.reason}")
    return wanted.replace(replacements=tuple(_frontier(plans)))


def _frontier(replacements: Sequence[Replacement]) -> list[Replacement]:
    """The replacements that no other beats in both step time and moving time, least moved first. Of those that a search
    found, the last is named the fastest, whichever search it was."""
    frontier: list[Replacement] = []
    for option in sorted(replacements, key=lambda option: (option.moving_s, option.cost.step_time_s)):
        if not frontier or option.cost.step_time_s < frontier[-1].cost.step_time_s * (1 - 1e-9):
            frontier.append(option)
    searched = [option for option in frontier if option.name in (BETWEEN, FASTEST)]
    names = {option.name: FASTEST if option is frontier[-1] else BETWEEN for option in searched}
    return [option.replace(name=names.get(option.name, option.name)) for option in frontier]


def stay(before: PlacedPlan, plan: Plan, pricer: Pricer) -> Plan:
    """`plan` with like machines and like GPUs exchanged so that most weights stay where they are.

    Machines are alike if they are of one kind in one group. Where the exchange would change the price, or links between
    machines are stated, the result is `plan` itself.
    """
    from scipy.optimize import linear_sum_assignment  # here, because scipy.optimize is slow to import

    problem = pricer.problem
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
    like_machines: dict[object, list[int]] = defaultdict(list)
    for m, usable in problem.usable_by_machine.items():
        machine = cluster.machines[m]
        group = group_of.get(machine.name, group_of.get(machine.spec_name))
        like_machines[machine.kind, len(usable), group].append(m)
    places: dict[int, int] = {}
    for machines in like_machines.values():
        pairs = {
            (a, b): _match(used[a], problem.usable_by_machine[b], needed, held, cluster.type_of)
            for a in machines
            for b in machines
        }
        kept_by = np.array([[pairs[a, b][0] for b in machines] for a in machines])
        rows, columns = linear_sum_assignment(kept_by, maximize=True)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            places |= pairs[machines[row], machines[column]][1]
    moved = renumber(plan, places)
    old, new = pricer.price(plan), pricer.price(moved)
    same = abs(new.step_time_s - old.step_time_s) <= _SAME * old.step_time_s and new.fits == old.fits
    return moved if same else plan


_Weights = tuple[set[int], float, float]  # layers, and the part [start, end) of each that is held


def _weights(plan: Plan) -> dict[int, _Weights]:
    """The layers that each device holds, and the part of each."""
    held = Holdings.of(plan.pipelines)
    layers: list[set[int]] = [set() for _ in held.copies]
    for some, copies in held.layers:
        for copy in copies:
            layers[copy].update(some)
    pairs = zip(layers, held.copies, strict=True)
    return {device: (units, start, end) for units, devices in pairs for device, start, end in intervals(devices)}


def _match(
    devices: Sequence[int],
    places: Sequence[int],
    needed: Mapping[int, _Weights],
    held: Mapping[int | None, _Weights],
    type_of: NDArray[np.int64],
) -> tuple[float, dict[int, int]]:
    """The most weights, in layers, that stay if `devices` take `places`, and the place that each device then takes."""

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
    assignment = {devices[row]: places[column] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)}
    return float(shared[rows, columns].sum()), assignment
