"""From shapes to plans: the layouts, layers, recompute policies and batches of the stages of a shape."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import Devices, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.space import default_schedule
from hexiopt.schedules.in_flight import holding, most_in_flight
from hexiopt.schedules.schedule import positions
from solvers.completion.allocation import proportional
from solvers.completion.batches import split_batch
from solvers.completion.executors import ExecutorTables
from solvers.core.zero import LOCKSTEP
from solvers.sequence.layout_evaluator import StageNeeds
from solvers.sequence.layout_search import LayoutSearch
from solvers.sequence.shapes import SequenceShape, ShapePipeline, StageDevices, zero_stages
from solvers.sequence.stage_tables import StageOption, allocate_layers, fastest
from solvers.sequence.token_allocation import RateTable

_ROUNDS = 2  # layouts are searched again with the layers that the previous round's layouts led to


@dataclass(frozen=True, slots=True)
class _Blueprint:
    """The inputs of a plan: the `policies` allowed, for each stage the number of stages that use its machines'
    interfaces, and the sum over pipelines of the mean number of devices per stage.
    """

    shape: SequenceShape
    effort: int
    policies: Sequence[str]
    sharers: Mapping[StageDevices, int]
    stage_devices: float


@dataclass(frozen=True, slots=True)
class _Built:
    """The stages of a pipeline; m micro-batches take about fill + m · period seconds."""

    stages: tuple[Stage, ...]
    fill_s: float
    period_s: float


class PlanBuilder:
    """Builds the plans of one problem; with `tensor`, a stage uses tensor parallelism where that is allowed and
    faster.
    """

    def __init__(self, model: PlanPricer, layouts: LayoutSearch, *, tensor: bool = False) -> None:
        self.model, self.problem, self.layouts, self._tensor = model, model.problem, layouts, tensor
        self.schedule = default_schedule(self.problem.workload)
        self._tensor_tables: Memo[tuple[str, ...], ExecutorTables] = Memo(
            lambda policies: ExecutorTables(model, policies, self.problem.space.recompute_per_stage)
        )
        rates = RateTable(model).of(range(self.problem.cluster.num_devices), "none")
        spec, workload = self.problem.model, self.problem.workload
        self._speed = 1.0 / rates.of_sequence_s(workload.seq_len, spec.num_heads)

    def build(self, shape: SequenceShape, effort: int = 1) -> Plan | None:
        """The plan of a shape, not yet priced; None where none fits. `effort` as in `LayoutSearch.best`."""
        if self.problem.space.recompute_per_stage:
            return self._build(shape, effort, self.model.policies())
        plans = (self._build(shape, effort, (policy,)) for policy in self.model.policies())
        return next((plan for plan in plans if plan is not None), None)

    def _build(self, shape: SequenceShape, effort: int, policies: Sequence[str]) -> Plan | None:
        batch, size = self.problem.workload.global_batch, shape.size
        work = [
            size / float(self._speed[[d for stage_devices in pipeline for d in stage_devices]].sum())
            for pipeline in shape.pipelines
        ]
        even = shape.zero >= LOCKSTEP or not self.problem.space.uneven_batch
        counts = split_batch([0.0] * len(work), work, [size] * len(work), batch, even=even)
        if counts is None or shape.zero not in zero_stages(self.problem, shape):
            return None
        machine_of = self.problem.cluster.machine_of
        crossed = {
            stage_devices: set(machine_of[list(stage_devices)].tolist())
            for pipeline in shape.pipelines
            for stage_devices in pipeline
        }
        users = Counter(m for machines in crossed.values() if len(machines) > 1 for m in machines)
        sharers = {stage_devices: max(users[m] for m in machines) or 1 for stage_devices, machines in crossed.items()}
        blueprint = _Blueprint(shape, effort, policies, sharers, sum(map(_mean_devices, shape.pipelines)))
        everyone = range(len(counts))
        built: list[_Built] = []
        for places in [everyone] if shape.zero >= LOCKSTEP else [[p] for p in everyone]:
            some = self._pipelines(blueprint, places, counts[places[0]])
            if some is None:
                return None
            built += some
        again = split_batch(
            [one.fill_s for one in built], [one.period_s for one in built], [size] * len(work), batch, even=even
        )
        # With more micro-batches, more of them may be in flight.
        if again is not None and all(
            self._held(0, len(pipeline), a) <= self._held(0, len(pipeline), b)
            for pipeline, a, b in zip(shape.pipelines, again, counts, strict=True)
        ):
            counts = again
        pipelines = tuple(Pipeline(one.stages, m, size) for one, m in zip(built, counts, strict=True))
        return Plan(pipelines, self.schedule, Sharding(shape.zero, shape.groups if shape.zero else "all"))

    def _pipelines(self, blueprint: _Blueprint, places: Sequence[int], count: int) -> list[_Built] | None:
        """The pipelines at `places`, of equally many stages, with equal layers in stages of equal index; None where
        they do not fit.
        """
        pipelines = [blueprint.shape.pipelines[p] for p in places]
        layers, stages = self.problem.model.num_layers, len(pipelines[0])
        if stages > layers:
            return None
        speeds = np.array(
            [[self._speed[list(stage_devices)].sum() for stage_devices in pipeline] for pipeline in pipelines]
        )
        share = proportional(speeds.min(axis=0), layers).tolist()
        best: list[_Built] | None = None
        best_s = float("inf")
        for _ in range(_ROUNDS if stages > 1 else 1):
            options = [
                [list(self._options(blueprint, pipeline, k, share[k], count)) for k in range(stages)]
                for pipeline in pipelines
            ]
            allocated = allocate_layers(options, layers, even=not self.problem.space.uneven_layers)
            if allocated is None:
                break
            built = [
                _built([(n, fastest(own, n)) for n, own in zip(allocated, pipeline, strict=True)])
                for pipeline in options
            ]
            seconds = max(one.fill_s + count * one.period_s for one in built)
            if seconds < best_s:
                best, best_s = built, seconds
            if allocated == share:
                break
            share = allocated
        return best

    def _shards(self, blueprint: _Blueprint, pipeline: ShapePipeline, stage_devices: StageDevices) -> StateSharding:
        """How states are sharded: about how many devices share those of a stage with a layout."""
        shape = blueprint.shape
        if not shape.zero:
            return StateSharding()
        if shape.groups == "machine":
            here = self.problem.cluster.machine_of[list(stage_devices)].tolist()
            return StateSharding(shape.zero, float(min(here.count(m) for m in set(here))))
        if self._tensor:  # the other pipelines' stages may be whole TP groups, which share as one holder
            return StateSharding(shape.zero, float(len(stage_devices) + len(shape.pipelines) - 1))
        return StateSharding(shape.zero, len(stage_devices) + blueprint.stage_devices - _mean_devices(pipeline))

    def _held(self, stage: int, num_stages: int, count: int) -> int:
        """The most micro-batches, of `count`, that a stage has in flight."""
        return most_in_flight(self.schedule, positions(num_stages, count)[stage])

    def _options(
        self, blueprint: _Blueprint, pipeline: ShapePipeline, stage: int, layers: int, count: int
    ) -> Iterator[StageOption]:
        """The options of a stage: tensor parallelism, where allowed, and the best layout."""
        stage_devices, size, policies = pipeline[stage], blueprint.shape.size, blueprint.policies
        held = self._held(stage, len(pipeline), count)
        shards = self._shards(blueprint, pipeline, stage_devices)
        need = StageNeeds(
            layers, stage == 0, stage == len(pipeline) - 1, held, shards, blueprint.sharers[stage_devices]
        )
        if self._tensor and self._may_be_tensor(stage_devices):
            yield self._tensor_option(stage_devices, size, need, policies)
            if len(stage_devices) == 1:
                return
        fitted = self.layouts.best(stage_devices, size, need, blueprint.effort)
        if fitted is not None:
            most = self.problem.model.num_layers
            table = self.layouts.evaluator.recompute_table(fitted.stage, need, policies, most)
            yield StageOption(fitted.layout, table.options())

    def _may_be_tensor(self, stage_devices: StageDevices) -> bool:
        cluster = self.problem.cluster
        machines = set(cluster.machine_of[list(stage_devices)].tolist())
        return len(machines) == 1 and len(stage_devices) in self.problem.space.allowed_tp(
            cluster.machines[machines.pop()].num_gpus
        )

    def _tensor_option(
        self, stage_devices: StageDevices, size: int, need: StageNeeds, policies: Sequence[str]
    ) -> StageOption:
        works, shards = frozenset((self.model.tp_group(stage_devices),)), need.shards
        if shards.stage:  # only the other pipelines' stages share the states of this one
            shards = StateSharding(shards.stage, max(1.0, shards.num_devices - len(stage_devices) + 1))
        tables, held = self._tensor_tables[tuple(policies)], holding(need.held)
        return StageOption(stage_devices, tables.options[works, need.first, need.last, size, held, shards])


def _mean_devices(pipeline: ShapePipeline) -> float:
    return sum(map(len, pipeline)) / len(pipeline)


def _built(allocated: Sequence[tuple[int, StageOption]]) -> _Built:
    stages, seconds, at = [], [], 0
    for n, option in allocated:
        stages.append(_stage(option.layout, at, at + n, option.options.recompute(n)))
        seconds.append(option.seconds(n))
        at += n
    return _Built(tuple(stages), sum(seconds) - max(seconds), max(seconds))


def _stage(layout: Devices | SequenceParallel, first: int, end: int, policies: tuple[str, ...]) -> Stage:
    if isinstance(layout, SequenceParallel):
        return Stage(layout, ((first, end),), policies)
    return Stage(TensorParallel(layout), ((first, end),), policies)
