"""From shapes to plans: layouts, layers, recompute policies and batches of the stages of a shape."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Ends, Pipeline, Plan, SequenceLayout, Sharding, Stage, TensorParallel
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.space import default_schedule
from hexiopt.schedules.in_flight import holding, most_in_flight
from hexiopt.schedules.schedule import StagePosition
from solvers.completion.allocation import proportional
from solvers.completion.batches import split_batch
from solvers.core.zero import LOCKSTEP
from solvers.sequence.layout_evaluator import Need
from solvers.sequence.layouts import LayoutSearch
from solvers.sequence.shapes import Line, Seat, Shape, zero_stages
from solvers.sequence.stage_tables import RecomputeTable, Way, dealt_layers, fastest
from solvers.sequence.token_allocation import RateTable

_ROUNDS = 2  # layouts are found again for the layers that those of the round before led to


@dataclass(frozen=True, slots=True)
class _Blueprint:
    """A plan to be built: `policies` to choose from, how many stages use the interfaces of each seat's machines, and
    the sum over pipelines of the devices of their mean stage."""

    shape: Shape
    effort: int
    policies: Sequence[str]
    sharers: Mapping[Seat, int]
    stage_devices: float


@dataclass(frozen=True, slots=True)
class _Built:
    """A pipeline's stages; m micro-batches take about fill + m · beat seconds."""

    stages: tuple[Stage, ...]
    fill_s: float
    period_s: float


class PlanBuilder:
    """Builds plans of one problem. With `tensor`, a stage that may have tensor parallelism has it where that is
    faster."""

    def __init__(self, model: PlanPricer, layouts: LayoutSearch, *, tensor: bool = False) -> None:
        self.model, self.problem, self.layouts, self._tensor = model, model.problem, layouts, tensor
        self.schedule = default_schedule(self.problem.workload)
        rates = RateTable(model).of(range(self.problem.cluster.num_devices), "none")
        spec, workload = self.problem.model, self.problem.workload
        self._speed = 1.0 / rates.of_sequence_s(workload.seq_len, spec.num_heads)

    def build(self, shape: Shape, effort: int = 1) -> Plan | None:
        """The plan of a shape, not yet priced; None where there is none. `effort` as in `LayoutSearch.best`."""
        if self.problem.space.recompute_per_stage:
            return self._build(shape, effort, self.model.policies())
        plans = (self._build(shape, effort, (policy,)) for policy in self.model.policies())
        return next((plan for plan in plans if plan is not None), None)

    def _build(self, shape: Shape, effort: int, policies: Sequence[str]) -> Plan | None:
        batch, size = self.problem.workload.global_batch, shape.size
        work = [size / float(self._speed[[d for seat in line for d in seat]].sum()) for line in shape.lines]
        even = shape.zero >= LOCKSTEP or not self.problem.space.uneven_batch
        counts = split_batch([0.0] * len(work), work, [size] * len(work), batch, even=even)
        if counts is None or shape.zero not in zero_stages(self.problem, shape):
            return None
        machine_of = self.problem.cluster.machine_of
        crossed = {seat: set(machine_of[list(seat)].tolist()) for line in shape.lines for seat in line}
        users = Counter(m for machines in crossed.values() if len(machines) > 1 for m in machines)
        sharers = {seat: max(users[m] for m in machines) or 1 for seat, machines in crossed.items()}
        blueprint = _Blueprint(shape, effort, policies, sharers, sum(map(_mean_devices, shape.lines)))
        everyone = range(len(counts))
        built: list[_Built] = []
        for places in [everyone] if shape.zero >= LOCKSTEP else [[p] for p in everyone]:
            some = self._lines(blueprint, places, counts[places[0]])
            if some is None:
                return None
            built += some
        again = split_batch(
            [one.fill_s for one in built], [one.period_s for one in built], [size] * len(work), batch, even=even
        )
        # More micro-batches may mean more of them in flight.
        if again is not None and all(
            self._held(0, len(line), a) <= self._held(0, len(line), b)
            for line, a, b in zip(shape.lines, again, counts, strict=True)
        ):
            counts = again
        pipelines = tuple(Pipeline(one.stages, m, size) for one, m in zip(built, counts, strict=True))
        return Plan(pipelines, self.schedule, Sharding(shape.zero, shape.groups if shape.zero else "all"))

    def _lines(self, blueprint: _Blueprint, places: Sequence[int], count: int) -> list[_Built] | None:
        """The pipelines at `places`, of equally many stages, with the same layers in the stages of the same number."""
        lines = [blueprint.shape.lines[p] for p in places]
        layers, stages = self.problem.model.num_layers, len(lines[0])
        if stages > layers:
            return None
        speeds = np.array([[self._speed[list(seat)].sum() for seat in line] for line in lines])
        share = proportional(speeds.min(axis=0), layers).tolist()
        best: list[_Built] | None = None
        best_s = float("inf")
        for _ in range(_ROUNDS if stages > 1 else 1):
            ways = [[list(self._ways(blueprint, line, k, share[k], count)) for k in range(stages)] for line in lines]
            dealt = dealt_layers(ways, layers, even=not self.problem.space.uneven_layers)
            if dealt is None:
                break
            built = [_built([(n, fastest(own, n)) for n, own in zip(dealt, line, strict=True)]) for line in ways]
            seconds = max(one.fill_s + count * one.period_s for one in built)
            if seconds < best_s:
                best, best_s = built, seconds
            if dealt == share:
                break
            share = dealt
        return best

    def _shards(self, blueprint: _Blueprint, line: Line, seat: Seat) -> StateSharding:
        """Over about how many devices the states of a seat with a layout are spread."""
        shape = blueprint.shape
        if not shape.zero:
            return StateSharding()
        if shape.groups == "machine":
            here = self.problem.cluster.machine_of[list(seat)].tolist()
            return StateSharding(shape.zero, float(min(here.count(m) for m in set(here))))
        if self._tensor:  # of other pipelines' stages, which may be whole TP groups
            return StateSharding(shape.zero, float(len(seat) + len(shape.lines) - 1))
        return StateSharding(shape.zero, len(seat) + blueprint.stage_devices - _mean_devices(line))

    def _held(self, stage: int, num_stages: int, count: int) -> int:
        """Micro-batches, of so many, that a stage has in flight at most."""
        return most_in_flight(self.schedule, StagePosition(stage, num_stages, count))

    def _ways(self, blueprint: _Blueprint, line: Line, stage: int, layers: int, count: int) -> Iterator[Way]:
        """All that a stage may be."""
        seat, size, policies = line[stage], blueprint.shape.size, blueprint.policies
        held = self._held(stage, len(line), count)
        shards = self._shards(blueprint, line, seat)
        need = Need(layers, stage == 0, stage == len(line) - 1, held, shards, blueprint.sharers[seat])
        if self._tensor and self._may_be_tensor(seat):
            yield self._tensor_way(seat, size, need, policies)
            if len(seat) == 1:
                return
        fitted = self.layouts.best(seat, size, need, blueprint.effort)
        if fitted is not None:
            most = self.problem.model.num_layers
            yield Way(fitted.layout, self.layouts.judge.mixtures(fitted.stage, need, policies, most))

    def _may_be_tensor(self, seat: Seat) -> bool:
        cluster = self.problem.cluster
        machines = set(cluster.machine_of[list(seat)].tolist())
        return len(machines) == 1 and len(seat) in self.problem.space.allowed_tp(
            cluster.machines[machines.pop()].num_gpus
        )

    def _tensor_way(self, seat: Seat, size: int, need: Need, policies: Sequence[str]) -> Way:
        model, tp_group, shards = self.model, self.model.tp_group(seat), need.shards
        memory = model.stages.memory_model(tp_group, size)
        if shards.stage:  # only the other pipelines' stages share the states of this one
            shards = StateSharding(shards.stage, max(1.0, shards.num_devices - len(seat) + 1))

        def bytes_of(layers: tuple[str, ...]) -> Floats:
            return np.array([memory.layered(layers, need.first, need.last, holding(need.held), shards).total])

        return Way(
            seat,
            RecomputeTable(
                policies,
                lambda policy: sum(model.stages.layer_s(tp_group, size, policy)),
                bytes_of,
                np.array([tp_group.gpu.usable_memory_bytes]),
                sum(model.stage_s(tp_group, 0, need.first, need.last, size, policies[0])),
                self.problem.model.num_layers,
                mixed=self.problem.space.recompute_per_stage,
            ),
        )


def _mean_devices(line: Line) -> float:
    return sum(map(len, line)) / len(line)


def _built(dealt: Sequence[tuple[int, Way]]) -> _Built:
    stages, seconds, at = [], [], 0
    for n, way in dealt:
        stages.append(_stage(way.ends, at, at + n, way.mixtures.policies(n)))
        seconds.append(float(way.mixtures.seconds[n - 1]))
        at += n
    return _Built(tuple(stages), sum(seconds) - max(seconds), max(seconds))


def _stage(ends: Ends, first: int, end: int, policies: tuple[str, ...]) -> Stage:
    if isinstance(ends, SequenceLayout):
        return Stage(ends, ((first, end),), policies)
    return Stage(TensorParallel(ends), ((first, end),), policies)
