"""Plans, costs and results that know their problem, and so can print, draw and save themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from hexiopt.bounds import our_model
from hexiopt.cost.breakdown import breakdown
from hexiopt.cost.cells import with_degrees
from hexiopt.cost.cost import Cost
from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_file_to_dict, solver_to_dict, write_plan
from hexiopt.frame import Frame
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts, margin, memory_of_limit
from hexiopt.report.notes import notes, plan_notes
from hexiopt.report.rows import PipelineRow, identical_pipelines, plan_rows
from hexiopt.report.style import count, gpu_names, seconds
from hexiopt.solving import Pricer, foreign_name
from hexiopt.solving.naming import name_in_order
from hexiopt.solving.registry import make_pricer
from hexiopt.solving.result import Result
from hexiopt.units import GIB
from hexiopt.value import Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = 2  # kinds of pipelines that a printed result lists
_STAGES = 6
_NOTE_WIDTH = 107  # with the name before it 120


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class PlanCost(Cost, Value):
    """The price of a plan, with the plan itself, so that it can break the step time down.

    It equals any `Cost` with the same figures.
    """

    plan: "PlacedPlan"

    @property
    def pricer(self) -> Pricer:
        """The cost model that computed it."""
        return self.plan.pricer

    def breakdown(self) -> Frame:
        """The parts of the step in seconds, which add up to `step_time_s`, and as shares of it.

        The parts are of the executor that ends last; the title names it. Raises InputError where another cost model
        computed the price.
        """
        pricer = our_model(self.pricer, self.plan.problem)
        if pricer is None:
            raise InputError("cost: only our own cost model has a breakdown; use hexiopt.price(problem, plan)")
        step = breakdown(pricer, self.plan, self)
        least_s = 1e-12 * self.step_time_s  # less is rounding
        rows = [
            (name, part_s, part_s / self.step_time_s) for name, part_s in step.parts.items() if abs(part_s) > least_s
        ]
        where = f"stage {step.stage} of pipeline {step.pipeline}, which ends last"
        title = f"Where the {seconds(self.step_time_s)} of a step go: {where}"
        return Frame(("part", "seconds", "share"), tuple(rows), title=title)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cost) and _fields(self, Cost) == _fields(other, Cost)

    def __hash__(self) -> int:
        return hash(tuple(_fields(self, Cost).values()))

    def __repr__(self) -> str:
        memory = f"{margin(self.excess_bytes)} on the fullest GPU"
        return f"PlanCost({seconds(self.step_time_s)} a step, {self.tokens_per_s:,.0f} tokens/s, {memory})"


@dataclass(frozen=True, repr=False, eq=False)
class PlacedPlan(Plan, Value):
    """A plan together with its problem, so that it can price, draw and save itself.

    `solver` is the plan file's record of the solver that found it, empty for a plan made by hand. `pricer` is the only
    cost model that prices it. It equals any `Plan` with the same choices.
    """

    problem: Problem = field(kw_only=True)
    pricer: Pricer = field(kw_only=True)
    solver: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        object.__setattr__(self, "solver", MappingProxyType(dict(self.solver)))
        if self.pricer.problem != self.problem:  # of a copy for another problem
            object.__setattr__(self, "pricer", make_pricer(None, self.problem))

    def __reduce__(self) -> Any:
        pricer = None if our_model(self.pricer, self.problem) else self.pricer  # ours is made again
        return PlacedPlan.of, (self.problem, Plan(**_fields(self, Plan)), dict(self.solver), pricer)

    @classmethod
    def of(
        cls,
        problem: Problem,
        plan: Plan,
        solver: Mapping[str, Any] = MappingProxyType({}),
        pricer: Pricer | None = None,
        cost: Cost | None = None,
    ) -> "PlacedPlan":
        """Place `plan` on `problem`, priced by `pricer` (None: our cost model), and state what it leaves to the price.

        The record `solver` then names a pricer that is not ours. `cost` is the price, if it is known.
        """
        foreign, judge = foreign_name(pricer, problem), make_pricer(pricer, problem)
        record = {**solver, "pricer": foreign} if foreign else solver
        if judge.features.stages is not None:
            plan = with_degrees(plan, judge.features.stages)
        placed = cls(**_fields(plan, Plan), problem=problem, solver=record, pricer=judge)
        if cost is not None:
            vars(placed)["cost"] = PlanCost(**_fields(cost, Cost), plan=placed)
        return placed

    @cached_property
    def cost(self) -> PlanCost:
        """The price by `pricer`. Raises InputError for a plan that it cannot price."""
        return PlanCost(**_fields(self.pricer.price(self), Cost), plan=self)

    @cached_property
    def facts(self) -> PlanFacts:
        """The facts that reports tell of the plan."""
        return PlanFacts(self.problem, self, self.cost, self.solver, self.pricer)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a line each: what may be overlooked in the problem and the plan, and what the plan file records."""
        return tuple(plan_notes(self.facts))

    def to_dict(self) -> dict[str, Any]:
        """The content of the plan's `plan.json`."""
        return plan_file_to_dict(self.problem, self, self.cost, self.solver)

    def save(self, path: str | Path) -> None:
        """Write a `plan.json` for `hexiopt.load_plan` and the command line, atomically.

        Raises InputError where it cannot be written.
        """
        try:
            write_plan(Path(path), self.problem, self, self.cost, self.solver)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another path") from None

    def stages(self) -> Frame:
        """One row per stage: devices, choices, seconds per micro-batch, busy share of the step, and memory in GiB."""
        whole = len(self.pipelines)
        rows = plan_rows(self.facts, group_above=whole, max_pipelines=whole, max_stages=len(self.devices()))
        return Frame.of([_stage_row(row, k) for row in rows.pipelines for k in range(len(row.stages))])

    def plot(self) -> "Figure":
        """A matplotlib figure of cluster, layers, timeline and memory.

        Raises InputError for a plan priced by another cost model, since only that model knows its timeline.
        """
        from hexiopt.report.figure import plan_figure

        if "pricer" in self.solver:
            name = self.solver["pricer"]
            raise InputError(f"plan: is priced by {name}, and figures are of our own cost model; save it, and load it")
        return plan_figure(self.facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and _fields(self, Plan) == _fields(other, Plan)

    def __hash__(self) -> int:
        return hash(tuple(_fields(self, Plan).values()))

    def __repr__(self) -> str:
        stages = sum(len(pipeline.stages) for pipeline in self.pipelines)
        sizes = (
            f"{count(len(self.pipelines), 'pipeline')}, {count(stages, 'stage')}, {count(len(self.devices()), 'GPU')}"
        )
        return f"PlacedPlan({self.problem.model.name} on {self.problem.cluster.name}: {sizes})"


@dataclass(frozen=True, repr=False, kw_only=True)
class Solution(Result, Value):
    """A solver's result for `problem`; `print` shows it in ten lines. Without a plan, `reason` says why."""

    problem: Problem
    plan: PlacedPlan | None = None
    cost: PlanCost | None = None

    @classmethod
    def of(cls, problem: Problem, result: Result, pricer: Pricer | None = None) -> Self:
        """`result` for `problem`, its plan priced by `pricer` (None: our cost model).

        Interchangeable GPUs are numbered in the order of the plan.
        """
        solution = cls(**_fields(result, Result), problem=problem)
        if result.plan is None or result.cost is None:
            return solution
        judge = make_pricer(pricer, problem)
        return solution._with(*name_in_order(result.plan, result.cost, judge), judge)

    def _with(self, plan: Plan, cost: Cost, pricer: Pricer) -> Self:
        placed = PlacedPlan.of(self.problem, plan, solver_to_dict(self), pricer, cost)
        return replace(self, plan=placed, cost=placed.cost)

    def above(self, bound_s: float) -> Self:
        """The result with a valid lower bound of at least `bound_s` seconds; optimal if that closes the gap."""
        raised = super().above(bound_s)
        return raised if self.plan is None else raised._with(self.plan, self.plan.cost, self.plan.pricer)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a line each, as the command line prints them: what may be overlooked in the problem and the plan."""
        return tuple(notes(self.problem)) if self.plan is None else self.plan.notes

    def plot(self) -> "Figure":
        """A matplotlib figure of the plan: cluster, layers, timeline and memory. Raises InputError without a plan."""
        return self.found().plot()

    def found(self) -> PlacedPlan:
        """The plan. Raises InputError with the reason where there is none."""
        if self.plan is None:
            raise InputError(f"plan: {self.solver} found none ({self.status}): {self.reason}")
        return self.plan

    def __str__(self) -> str:
        problem, rows = self.problem, list[tuple[str, str]]()
        searched = f"{self.solver} with seed {self.seed}, {seconds(self.runtime_s)}, {count(self.steps, 'step')}"
        rows.append(("status", f"{self.status}: {searched}"))
        plan, cost = self.plan, self.cost
        if plan is not None and "pricer" in plan.solver:
            rows.append(("cost model", str(plan.solver["pricer"])))
        if plan is None or cost is None:
            rows.append(("reason", self.reason))
        else:
            rows += [
                ("step time", seconds(cost.step_time_s)),
                ("throughput", f"{cost.tokens_per_s:,.0f} tokens/s"),
                ("MFU", f"{cost.mfu:.1%} of all {count(problem.cluster.num_devices, 'GPU')}"),
            ]
        if self.bound_s > 0:
            gap = f" (gap {max(0.0, self.gap):.1%})" if cost else ""
            plans = problem.plans_in_words
            rows.append(("lower bound", f"{seconds(self.bound_s)}{gap} of {plans}"))
        if plan is not None and cost is not None:
            zero = f", ZeRO-{plan.sharding.stage}" if plan.sharding.stage else ""
            used = f"{plan.facts.used_devices} GPUs used"
            rows.append(("plan", f"{count(len(plan.pipelines), 'pipeline')}, {plan.schedule.name}{zero}, {used}"))
            rows += [("", line) for line in _pipelines(problem, plan)]
            tight = plan.facts.tightest
            memory = f"{margin(tight.cost.excess_bytes)} on the fullest GPUs"
            rows.append(("memory", f"{memory}: {memory_of_limit(tight.cost)} on {tight.where(2)}"))
            rows += plan.facts.money
        for note in self.notes:
            rows += zip(chain(("note",), repeat("")), wrap(note, _NOTE_WIDTH), strict=False)
        title = f"{problem.model.name} on {problem.cluster.name}"
        return "\n".join([title, *(f"{name:12} {text}" for name, text in rows)])

    def __repr__(self) -> str:
        step = f"{seconds(self.cost.step_time_s)} a step" if self.cost else self.reason
        return f"Solution({self.solver}: {self.status}, {step})"


def _fields(value: Any, kind: type) -> dict[str, Any]:
    """The fields of the data class `kind` in `value`."""
    return {entry.name: getattr(value, entry.name) for entry in fields(kind)}


def _stage_row(row: PipelineRow, k: int) -> dict[str, Any]:
    stage = row.stages[k]
    return {
        "pipeline": row.number,
        "stage": stage.number,
        "devices": stage.place,
        "parallelism": stage.parallelism,
        "layers": stage.layers,
        "num_layers": stage.num_layers,
        "recompute": stage.recompute,
        "micro_batches": row.num_micro_batches,
        "micro_batch_size": row.micro_batch_size,
        "compute_s": stage.compute_s,
        "send_s": stage.send_s,
        "busy": stage.busy,
        "memory_gib": stage.cost.memory.total / GIB,
        "limit_gib": stage.cost.limit_bytes / GIB,
    }


def _pipelines(problem: Problem, plan: Plan) -> list[str]:
    """One line for each of the most frequent kinds of pipelines; the last line counts the rest."""
    kinds = sorted(identical_pipelines(problem, plan), key=lambda kind: -len(kind))
    lines = []
    for kind in kinds[:_KINDS]:
        pipeline = plan.pipelines[kind[0]]
        layers = [f"{pipeline.stages[0].num_layers} layers", *(f"{stage.num_layers}" for stage in pipeline.stages[1:])]
        stages = [f"{share} on {_gpus(problem, stage)}" for share, stage in zip(layers, pipeline.stages, strict=True)]
        more = [f"{len(stages) - _STAGES:,} stages more"] if len(stages) > _STAGES else []
        lines.append(f"{len(kind):,} × {' → '.join([*stages[:_STAGES], *more])}")
    rest = sum(map(len, kinds[_KINDS:]))
    if rest:
        lines[-1] += f"; and {rest:,} of {count(len(kinds) - _KINDS, 'other kind')}"
    return lines


def _gpus(problem: Problem, stage: Stage) -> str:
    number = len(stage.devices)
    return (f"{number} " if number > 1 else "") + gpu_names(problem.cluster, stage.devices)
