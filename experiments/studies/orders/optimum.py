"""The optimal schedule of a small pipeline: of all orders of its operations, by constraint programming (OR-Tools)."""

from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from experiments.studies.orders.pipelines import SmallPipeline, Ticks
from hexiopt.schedules.operation import OperationKind
from hexiopt.simulation.engine import Span

EFFORT = 20.0  # units of CP-SAT's deterministic time, about seconds: few pipelines take one
_KINDS = tuple(OperationKind)

Starts = dict[tuple[OperationKind, int, int], int]  # by kind, stage and micro-batch


@dataclass(frozen=True)
class Optimum:
    """The shortest schedule that has been found: its last operation ends at `ticks`, that of no schedule before
    `bound`; both are equal where it is proved."""

    ticks: int
    bound: int
    spans: tuple[Span, ...]

    @property
    def is_proved(self) -> bool:
        """Whether no schedule is shorter."""
        return self.ticks == self.bound


def operation_ticks(pipeline: SmallPipeline, split: bool) -> dict[OperationKind, Ticks]:
    """The ticks of operations by kind [stages]: backwards have those of weights too, unless they are `split`."""
    forward, backward, weights = pipeline.forward, pipeline.backward, pipeline.weights
    if split:
        return dict(zip(_KINDS, (forward, backward, weights), strict=True))
    return dict(zip(_KINDS, (forward, tuple([b + w for b, w in zip(backward, weights, strict=True)])), strict=False))


class ScheduleModel:
    """When each operation and message of a pipeline begins.

    Micro-batches are alike: in any schedule they can be renumbered, stage by stage, so that each stage runs each kind
    of operation in their order, and links pass them on in it. So that order is a constraint.
    """

    def __init__(self, pipeline: SmallPipeline, split: bool) -> None:
        self._pipeline, self._ticks = pipeline, operation_ticks(pipeline, split)
        self._model = cp_model.CpModel()
        stages, batches = range(pipeline.num_stages), range(pipeline.num_micro_batches)
        one_by_one = sum(map(sum, self._ticks.values())) + sum(pipeline.ahead) + sum(pipeline.back)
        self._latest = len(batches) * one_by_one

        # Variables: when operations begin, and when the last one ends.
        self._begins = {
            (kind, s, k): self._model.new_int_var(0, self._latest, f"{kind.letter}{k}_of_stage_{s}")
            for kind in self._ticks
            for s in stages
            for k in batches
        }
        self._end = self._model.new_int_var(0, self._latest, "end")

        # Constraints
        for s in stages:
            self._run_one_by_one(s)
            self._fit_into_memory(s)
        for s in stages[:-1]:
            self._send(OperationKind.FORWARD, s, s + 1, pipeline.ahead[s])
            self._send(OperationKind.BACKWARD, s + 1, s, pipeline.back[s])

        # Objective: the shortest step.
        self._model.minimize(self._end)

    def _end_of(self, kind: OperationKind, stage: int, batch: int) -> cp_model.LinearExpr:
        """When an operation ends."""
        return self._begins[kind, stage, batch] + self._ticks[kind][stage]

    def _run_one_by_one(self, stage: int) -> None:
        """A stage runs one operation at a time; those of a kind by micro-batch, those of a micro-batch by kind."""
        model, kinds = self._model, list(self._ticks)
        intervals = [
            model.new_fixed_size_interval_var(begin, self._ticks[kind][stage], f"{kind.letter}{k}_on_stage_{stage}")
            for (kind, s, k), begin in self._begins.items()
            if s == stage
        ]
        model.add_no_overlap(intervals)
        for k in range(self._pipeline.num_micro_batches):
            for kind, then in pairwise(kinds):
                model.add(self._begins[then, stage, k] >= self._end_of(kind, stage, k))
            for kind in kinds if k else ():
                model.add(self._begins[kind, stage, k] >= self._end_of(kind, stage, k - 1))
        model.add(self._end >= self._end_of(kinds[-1], stage, self._pipeline.num_micro_batches - 1))

    def _fit_into_memory(self, stage: int) -> None:
        """A micro-batch takes its activations from the beginning of its forward to the end of its backward, and then,
        until its gradients of weights are computed, what is kept for these."""
        model, pipeline = self._model, self._pipeline
        forward, backward, weights = _KINDS
        spans = [(forward, backward, pipeline.activations[stage])]
        if weights in self._ticks:
            spans.append((backward, weights, pipeline.late[stage]))
        intervals, demands = [], []
        for first, last, demand in spans:
            for k in range(pipeline.num_micro_batches):
                begin = self._begins[first, stage, k] + (self._ticks[first][stage] if first is backward else 0)
                name = f"memory_of_{k}_from_{first.letter}_on_stage_{stage}"
                size = model.new_int_var(0, self._latest, f"{name}_for")
                intervals.append(model.new_interval_var(begin, size, self._end_of(last, stage, k), name))
                demands.append(demand)
        model.add_cumulative(intervals, demands, pipeline.capacity[stage])
        depth = pipeline.most_depth(stage)
        for k in range(depth, pipeline.num_micro_batches):  # implied
            model.add(self._begins[forward, stage, k] >= self._end_of(backward, stage, k - depth))

    def _send(self, kind: OperationKind, sender: int, receiver: int, ticks: int) -> None:
        """A link passes one message after another, each once its operation has ended."""
        before = None
        for k in range(self._pipeline.num_micro_batches):
            begin = self._model.new_int_var(0, self._latest, f"message_{kind.letter}{k}_from_stage_{sender}")
            self._model.add(begin >= self._end_of(kind, sender, k))
            self._model.add(self._begins[kind, receiver, k] >= begin + ticks)
            if before is not None:
                self._model.add(begin >= before + ticks)
            before = begin

    def best(self, known: list[Span], effort: float) -> Optimum:
        """The shortest schedule within an `effort`, from the `known` one on."""
        for span in known:
            if not span.is_message:
                kind = next(kind for kind in self._ticks if kind.value == span.kind)
                self._model.add_hint(self._begins[kind, span.stage, span.micro_batch], round(span.start_s))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # so that the same pipeline gives the same answer
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(self._model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        spans = []
        for (kind, stage, k), variable in self._begins.items():
            start = solver.value(variable)
            spans.append(Span(kind.value, 0, stage, 0, float(start), float(start + self._ticks[kind][stage]), k))
        return Optimum(round(solver.objective_value), round(solver.best_objective_bound), tuple(spans))


def optimum(pipeline: SmallPipeline, split: bool, known: list[Span], effort: float = EFFORT) -> Optimum:
    """The optimal schedule of a pipeline, or the best in an `effort` of CP-SAT's deterministic time; it begins with the
    `known` schedule."""
    return ScheduleModel(pipeline, split).best(known, effort)
