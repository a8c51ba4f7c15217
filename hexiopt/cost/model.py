"""The cost model: prices a plan exactly, from what its stages take at their sites (`tp_groups.py`).

Everything that repeats is kept: stages by length and position, gradient groups by the plan's structure. Pricing a plan
that differs from a priced one in two pipelines costs those two and the sharing between pipelines.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from hexiopt.calibration.frameworks import Framework
from hexiopt.cost.boundary import Way, executor_load, pipeline_messages, total_load, ways_load
from hexiopt.cost.cost import Cost, PipelineCost, StageCost
from hexiopt.cost.executors.compute import optimizer_compute_s
from hexiopt.cost.executors.memory import UNSHARDED, StateSharding
from hexiopt.cost.executors.routes import NetworkLoad, Route
from hexiopt.cost.executors.stage_model import Contention
from hexiopt.cost.gradient_sync import Floats, Ints, RingTimes, after_all_reduce, parameter_holders
from hexiopt.cost.replicated import replicated_cost
from hexiopt.cost.sharding import Rings, Times, lockstep_s, rings, sharding_groups, state_spreads
from hexiopt.cost.stage_costs import AnySpread, StageCosts
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage, irregular, misaligned, unpriced
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import stages_in_flight
from hexiopt.schedules.recurrence import chain_ends_s
from hexiopt.schedules.schedule import Schedule, StagePosition

_KEPT = 50_000  # pipelines and times of pipelines
_Row = tuple[float, ...]  # seconds of each stage, or of each boundary


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a pipeline costs apart from others."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    stages: tuple[StageCost, ...]
    routes: tuple[tuple[Route, Route], ...]  # forward and backward, per boundary
    message_bytes: float
    load: tuple[tuple[int, float], ...]  # shared resource, seconds: what its messages need
    ways: tuple[Way, ...] = ()  # instead of `routes` where stages have replicas or several layer ranges
    is_chain: bool = True


class PlanPricer(StageCosts):
    """Prices plans of one problem. Implements what solvers ask of a pricer (`solvers/core/search.py`)."""

    sends_occupy_stages = False

    def __init__(self, problem: Problem, framework: Framework | None = None) -> None:
        super().__init__(problem, framework)
        self._parts = Memo(self._new_parts, _KEPT)
        self._times = Memo(_chain_ends_s, _KEPT)
        self._replicated: dict[tuple[object, ...], PipelineCost] = {}
        self._sync: tuple[tuple[tuple[Stage, ...], ...], RingTimes] | None = None
        self._rings: tuple[RingTimes, list[int], Rings] | None = None

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The exact cost of `plan`; `pipelines` are its pipelines where already priced.

        Raises InputError for what the format allows but is not priced yet, and for what no schedule can run.
        """
        return self._finish(plan, tuple(pipelines or self.pipelines(plan)))

    def pipelines(self, plan: Plan) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline of `plan`, sharing the network with the others. Raises as `price`."""
        feature = unpriced(plan)
        if feature is not None:
            raise InputError(f"{feature} is part of the plan format but not priced yet")
        if len(self._replicated) > _KEPT:
            self._replicated.clear()
        wrong = misaligned(plan)
        if wrong is not None:
            raise InputError(wrong)
        contentions = self.contentions(plan)
        parts = [
            self._parts[pipeline, plan.schedule, spread, contention]
            for pipeline, spread, contention in zip(plan.pipelines, self._spreads(plan), contentions, strict=True)
        ]
        if plan.sharding.stage >= 2:
            parts = self._in_lockstep(plan, parts, contentions)
        load = total_load(item for part in parts for item in part.load)
        return tuple(
            self._pipeline_cost(pipeline, part, load, plan.schedule)
            for pipeline, part in zip(plan.pipelines, parts, strict=True)
        )

    def forget_plans(self) -> None:
        """Give back what is remembered of pipelines and plans; layers, hops and memory models stay."""
        self._parts.clear()
        self._times.clear()
        self.forget_stages()
        self._replicated.clear()
        self._sync = self._rings = None

    def _spreads(self, plan: Plan) -> Sequence[AnySpread]:
        """Over how many devices the states of each pipeline are spread."""
        count, sharding = len(plan.pipelines), plan.sharding
        if not sharding.stage:
            return [UNSHARDED] * count
        unreplicated = all(len(stage.copies) == 1 for pipeline in plan.pipelines for stage in pipeline.stages)
        if unreplicated and sharding.groups == "all":
            return [StateSharding(sharding.stage, count)] * count
        return state_spreads(plan, sharding_groups(plan, self.problem.cluster), self.problem.model.num_layers)

    def contentions(self, plan: Plan) -> list[Contention]:
        """Of each pipeline, the resources of the network that several sequence stages of the plan use, and how many."""
        each = [
            [
                self.sequence_stage(stage.parallelism, pipeline.micro_batch_size).crossed
                for stage in pipeline.stages
                if isinstance(stage.parallelism, SequenceParallel)
            ]
            for pipeline in plan.pipelines
        ]
        users = Counter(resource for own in each for crossed in own for resource in crossed)
        return [
            tuple(sorted((r, users[r]) for r in frozenset().union(*own) if users[r] > 1)) if own else () for own in each
        ]

    def _in_lockstep(self, plan: Plan, parts: Sequence[_Parts], contentions: Sequence[Contention]) -> list[_Parts]:
        """Pipelines that gather and scatter layer by layer with each other, in the times that this takes."""
        groups = sharding_groups(plan, self.problem.cluster)
        assert groups is not None
        seconds = lockstep_s(plan, self, self.rings(plan).within, groups, contentions)
        return [_with_times(part, own) for part, own in zip(parts, seconds, strict=True)]

    def _new_parts(self, key: tuple[Pipeline, Schedule, AnySpread, Contention]) -> _Parts:
        pipeline, schedule, spread, contention = key
        size, count, batches = pipeline.micro_batch_size, len(pipeline.stages), pipeline.num_micro_batches
        plain = all(stage.is_plain for stage in pipeline.stages)
        # Plain stages keep all rules but those of the schedule.
        chunks = pipeline.num_chunks
        wrong = schedule.broken_rule(count, chunks, batches) if plain else irregular(pipeline, schedule)
        if wrong is not None:
            raise InputError(wrong[1])
        held = stages_in_flight(schedule, count, batches, chunks)
        if plain and isinstance(spread, StateSharding):
            costs = tuple(
                self.plain_cost(stage, k == 0, k == count - 1, size, own, spread)
                for k, (stage, own) in enumerate(zip(pipeline.stages, held, strict=True))
            )
        else:
            costs = tuple(
                self.stage_cost(stage, size, StagePosition(k, count, batches, chunks), own, spread, contention)
                for k, (stage, own) in enumerate(zip(pipeline.stages, held, strict=True))
            )
        times = tuple(cost.forward_s for cost in costs), tuple(cost.backward_s for cost in costs)
        message = self.message_bytes(size)
        if plain or pipeline.is_chain:
            groups = [stage.ends[0] for stage in pipeline.stages]
            routes = tuple((self.route(a, b), self.route(b, a)) for a, b in pairwise(groups))
            load: list[tuple[int, float]] = []
            for k in range(count):
                ahead = [(routes[k][0], message)] if k < count - 1 else []
                back = [(routes[k - 1][1], message)] if k else []
                load += executor_load(ahead, back).items()
            return _Parts(*times, costs, routes, message, tuple(load))
        each = pipeline_messages(pipeline, self.route, self.message_bytes(1))
        return _Parts(*times, costs, (), message, tuple(ways_load(each)), tuple(each), False)

    def _pipeline_cost(self, pipeline: Pipeline, parts: _Parts, load: NetworkLoad, schedule: Schedule) -> PipelineCost:
        if not parts.is_chain:
            return self._replicated_cost(pipeline, parts, load, schedule)
        message = parts.message_bytes
        ahead = tuple(way.seconds(message, load) for way, _ in parts.routes)
        back = tuple(way.seconds(message, load) for _, way in parts.routes)
        ends = self._times[schedule, parts.forward_s, parts.backward_s, ahead, back, pipeline.num_micro_batches]
        return PipelineCost(parts.stages, ahead, back, ends, max(ends))

    def _replicated_cost(
        self, pipeline: Pipeline, parts: _Parts, load: NetworkLoad, schedule: Schedule
    ) -> PipelineCost:
        loads = tuple(load[resource] for way in parts.ways for resource, _ in way.route.shared)
        key = (pipeline, parts.stages, schedule, loads)
        found = self._replicated.get(key)
        if found is None:
            found = self._replicated[key] = replicated_cost(
                schedule, pipeline.num_micro_batches, parts.stages, parts.ways, load
            )
        return found

    def sync_times(self, plan: Plan) -> RingTimes:
        """The gradient groups of `plan` and what a pass over each takes."""
        structure = tuple(pipeline.stages for pipeline in plan.pipelines)
        if self._sync is None or self._sync[0] != structure:
            groups = parameter_holders(plan.pipelines, self.problem.model)
            self._sync = (structure, RingTimes(groups, self.problem.cluster))
        return self._sync[1]

    def rings(self, plan: Plan) -> Rings:
        """The gradient rings of `plan`, inside its sharding groups and between them."""
        holders, groups = self.sync_times(plan), sharding_groups(plan, self.problem.cluster)
        if groups is None:
            return rings(holders, groups, self.problem.cluster)
        if self._rings is None or self._rings[:2] != (holders, groups):
            self._rings = (holders, groups, rings(holders, groups, self.problem.cluster))
        return self._rings[2]

    def _finish(self, plan: Plan, pipelines: tuple[PipelineCost, ...]) -> Cost:
        workload = self.problem.workload
        pipeline_s = max(pipeline.end_s for pipeline in pipelines)
        stages = [
            (stage, cost, ends)
            for p, q in zip(plan.pipelines, pipelines, strict=True)
            for stage, cost, ends in zip(p.stages, q.stages, q.each_replica_end_s, strict=True)
        ]
        copies = [
            (devices, one) for stage, cost, _ in stages for devices, one in zip(stage.copies, cost.copies, strict=True)
        ]
        # Devices of a sequence layout end together.
        ready = np.array(
            [end for _, cost, ends in stages for end in (ends * len(cost.devices) if cost.devices else ends)]
        )
        optimizer = np.array(
            [
                optimizer_compute_s(
                    workload, self.tp_group(devices).gpu, cost.memory.optimizer / workload.optimizer_bytes
                )
                for devices, cost in copies
            ]
        )
        around, zero, gradient_bytes = self.rings(plan), plan.sharding.stage, workload.stored_gradient_bytes
        copy_of = self._copy_of([devices for devices, _ in copies])
        # All-reduced whole, or scattered now, or long since; then shards are all-reduced between groups.
        passes = (2, 1, 0, 0)[zero]
        overlap = self._beside(pipelines) if self.framework.overlaps_gradients else None
        ended, overlap = after_all_reduce(around.within, copy_of, ready, gradient_bytes, passes, overlap)
        ended, _ = after_all_reduce(around.between, copy_of, ended, gradient_bytes, 2, overlap)
        synced_s = max(pipeline_s, float(ended.max()))
        finished = ended + optimizer
        if zero in (1, 2):
            overlap = self._beside(pipelines, backward=False) if self.framework.overlaps_weights else None
            finished, _ = after_all_reduce(around.within, copy_of, finished, workload.element_bytes, 1, overlap)
        step_s = max(synced_s, float(finished.max()))
        if zero == 1:
            sizes = [holders.shape[1] for holders in around.within.groups.holders]
            step_s += self.framework.holder_s * max(sizes, default=0)
        tokens = workload.tokens
        return Cost(
            step_time_s=step_s,
            pipeline_s=pipeline_s,
            gradient_sync_s=synced_s - pipeline_s,
            optimizer_s=step_s - synced_s,
            tokens_per_s=tokens / step_s,
            mfu=tokens * self._flops_per_token / (step_s * self._peak_flops),
            excess_bytes=max(cost.excess_bytes for _, cost in copies),
            pipelines=pipelines,
        )

    def _beside(self, pipelines: tuple[PipelineCost, ...], backward: bool = True) -> Floats:
        """Seconds of each copy's last backward, or of its first forward, beside which rings may run."""
        costs = [cost for q in pipelines for stage in q.stages for cost in stage.copies]
        return np.array([cost.backward_s if backward else cost.forward_s for cost in costs])

    def _copy_of(self, copies: list[tuple[int, ...]]) -> Ints:
        """Per device, the number of the copy that it holds."""
        copy_of = np.zeros(self.problem.cluster.num_devices, np.int64)
        for k, devices in enumerate(copies):
            copy_of[list(devices)] = k
        return copy_of

    @cached_property
    def _flops_per_token(self) -> float:
        return self.problem.model.model_flops_per_token(self.problem.workload.seq_len)

    @cached_property
    def _peak_flops(self) -> float:
        return self.problem.cluster.total_peak_flops(self.problem.workload.precision)


def _with_times(parts: _Parts, seconds: Sequence[Sequence[Times]]) -> _Parts:
    """The same pipeline with other forward and backward seconds per stage and replica."""
    stages = []
    for stage, own in zip(parts.stages, seconds, strict=True):
        each = tuple(
            cost.with_times(forward_s, backward_s)
            for cost, (forward_s, backward_s) in zip(stage.each, own, strict=True)
        )
        stages.append(each[0] if len(each) == 1 else StageCost.of_replicas(each))
    forward = tuple(stage.forward_s for stage in stages)
    backward = tuple(stage.backward_s for stage in stages)
    return replace(parts, forward_s=forward, backward_s=backward, stages=tuple(stages))


def _chain_ends_s(key: tuple[Schedule, _Row, _Row, _Row, _Row, int]) -> _Row:
    return chain_ends_s(*key)
