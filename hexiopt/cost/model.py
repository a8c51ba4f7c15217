"""The cost model: prices a plan exactly, and answers what a search asks of a single stage.

Everything that repeats is kept: layers by site, stages by length and position, hops by their ends, gradient
groups by the plan's structure. Pricing a plan that differs from a priced one in two pipelines costs those two
and the sharing between pipelines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from hexiopt.cost import coefficients as c
from hexiopt.cost.boundary import Hop, Load, hop, stage_load
from hexiopt.cost.collectives import ring_collective_s
from hexiopt.cost.compute import (
    ComputeTimes,
    embedding_compute,
    head_compute,
    layer_compute,
    optimizer_compute_s,
)
from hexiopt.cost.cost import Cost, PipelineCost, StageCost
from hexiopt.cost.gradient_sync import Floats, Ints, SyncTimes, sync_groups
from hexiopt.cost.memory import MemoryModel, in_flight
from hexiopt.cost.schedule import SCHEDULE_TIMES, PipelineTimes
from hexiopt.gpus import Gpu
from hexiopt.plan import Pipeline, Plan, Stage, unpriced
from hexiopt.problem import Problem
from hexiopt.space import recompute_policies

_KEPT = 50_000  # pipelines, times and stages remembered before memory is given back


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where a stage runs, as far as its own time and memory go: one object for all places that cost the same.

    Compared by identity, so that the tables of the cost model look it up fast.
    """

    gpu: Gpu
    tp: int
    bandwidth: float  # slowest link of the TP ring, bytes/s
    latency_s: float


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a pipeline costs apart from others."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    stages: tuple[StageCost, ...]
    hops: tuple[tuple[Hop, Hop], ...]  # forward and backward, per boundary
    message_bytes: float
    load: tuple[tuple[int, float], ...]  # shared resource, seconds: what its messages need


class CostModel:
    """Prices plans of one problem. Implements what solvers ask of a pricer (`solvers/base.py`)."""

    sends_occupy_stages = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cluster = problem.cluster
        self._machine_of: list[int] = cluster.machine_of.tolist()
        self._index_of: list[int] = cluster.index_in_machine.tolist()
        self._sites: dict[tuple[int, ...], Site] = {}
        self._site_by_place: dict[tuple[object, tuple[int, ...]], Site] = {}
        self._site_by_value: dict[tuple[str, int, float, float], Site] = {}
        self._layers: dict[tuple[Site, int, str], tuple[float, float]] = {}
        self._ends: dict[tuple[Site, int], tuple[ComputeTimes, ComputeTimes]] = {}
        self._memory_models: dict[tuple[str, int, int], MemoryModel] = {}
        self._rooms: dict[tuple[Site, bool, bool, int, str, int, int], int] = {}
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._hops: dict[tuple[tuple[int, ...], tuple[int, ...]], Hop] = {}
        self._parts: dict[tuple[Pipeline, str, int], _Parts] = {}
        self._times: dict[tuple[object, ...], PipelineTimes] = {}
        self._sync: tuple[tuple[tuple[Stage, ...], ...], SyncTimes] | None = None

    # What a search asks of one stage.

    def site(self, devices: tuple[int, ...]) -> Site:
        """The site of a TP group: devices of one machine."""
        found = self._sites.get(devices)
        if found is None:
            machine = self.problem.cluster.machines[self._machine_of[devices[0]]]
            place = (machine.kind, tuple(self._index_of[d] for d in devices))
            found = self._site_by_place.get(place)
            if found is None:
                bandwidth, latency_s = machine.ring(place[1]) if len(devices) > 1 else (float("inf"), 0.0)
                found = self._site_by_place[place] = self._site_of(machine.gpu, len(devices), bandwidth, latency_s)
            self._sites[devices] = found
        return found

    def _site_of(self, gpu: Gpu, tp: int, bandwidth: float, latency_s: float) -> Site:
        key = (gpu.name, tp, bandwidth, latency_s)
        found = self._site_by_value.get(key)
        if found is None:
            found = self._site_by_value[key] = Site(gpu, tp, bandwidth, latency_s)
        return found

    def best_sites(self, machine: int) -> list[Site]:
        """Per TP degree allowed in a machine, a site at least as fast as any group of that many of its devices."""
        spec = self.problem.cluster.machines[machine]
        pairs = [(i, j) for i in range(spec.num_gpus) for j in range(i)]
        bandwidth = max((spec.pair_bandwidth(i, j) for i, j in pairs), default=float("inf"))
        latency_s = min((spec.pair_latency(i, j) for i, j in pairs), default=0.0)
        return [
            self._site_of(spec.gpu, tp, bandwidth if tp > 1 else float("inf"), latency_s if tp > 1 else 0.0)
            for tp in self.problem.space.allowed_tp(spec.num_gpus)
        ]

    def policies(self) -> tuple[str, ...]:
        """The recompute policies that the workload allows."""
        return recompute_policies(self.problem.workload)

    def layer_s(self, site: Site, micro_batch_size: int, policy: str) -> tuple[float, float]:
        """Forward and backward seconds of one layer for one micro-batch, recompute and TP collectives included."""
        key = (site, micro_batch_size, policy)
        found = self._layers.get(key)
        if found is None:
            problem = self.problem
            compute = layer_compute(problem.model, problem.workload, site.gpu, site.tp, micro_batch_size)
            collective_s = self._collective_s(site, micro_batch_size)
            forward_s = compute.forward_s + c.TP_FORWARD_COLLECTIVES * collective_s
            backward_s = compute.backward_s + c.TP_BACKWARD_COLLECTIVES * collective_s
            repeated_s = {"none": 0.0, "selective": compute.attention_s, "full": forward_s}[policy]
            found = self._layers[key] = (forward_s, backward_s + repeated_s)
        return found

    def ends_s(self, site: Site, micro_batch_size: int) -> tuple[ComputeTimes, ComputeTimes]:
        """What the embedding adds to a first stage, and final norm, LM head and loss to a last one."""
        key = (site, micro_batch_size)
        found = self._ends.get(key)
        if found is None:
            model, workload = self.problem.model, self.problem.workload
            # One collective each way: the embedding's sums are scattered, the head's input is gathered.
            extra_s = self._collective_s(site, micro_batch_size)
            embedding = embedding_compute(model, workload, site.gpu, site.tp, micro_batch_size)
            head = head_compute(model, workload, site.gpu, site.tp, micro_batch_size)
            found = self._ends[key] = (embedding.beside(extra_s), head.beside(extra_s))
        return found

    def memory_model(self, site: Site, micro_batch_size: int) -> MemoryModel:
        """Bytes of stages of any length at a site."""
        key = (site.gpu.name, site.tp, micro_batch_size)
        found = self._memory_models.get(key)
        if found is None:
            found = self._memory_models[key] = MemoryModel(
                self.problem.model, self.problem.workload, site.gpu, site.tp, micro_batch_size
            )
        return found

    def stage_s(
        self, site: Site, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage for one micro-batch."""
        forward_s, backward_s = self.layer_s(site, micro_batch_size, policy)
        forward_s, backward_s = num_layers * forward_s, num_layers * backward_s
        if first or last:
            embedding, head = self.ends_s(site, micro_batch_size)
            if first:
                forward_s, backward_s = forward_s + embedding.forward_s, backward_s + embedding.backward_s
            if last:
                forward_s, backward_s = forward_s + head.forward_s, backward_s + head.backward_s
        return forward_s, backward_s

    def max_layers(
        self, site: Site, first: bool, last: bool, micro_batch_size: int, policy: str, held: int, shards: int
    ) -> int:
        """The most layers whose memory fits a device of `site`; `held` micro-batches in flight."""
        key = (site, first, last, micro_batch_size, policy, held, shards)
        found = self._rooms.get(key)
        if found is None:
            model = self.memory_model(site, micro_batch_size)
            limit = site.gpu.usable_memory_bytes
            found = self._rooms[key] = model.max_layers(limit, first, last, policy, held, shards)
        return found

    def hop(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Hop:
        """The way of a message between two stages."""
        key = (senders, receivers)
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = hop(self.problem.cluster, senders, receivers)
        return found

    def hop_s(self, senders: tuple[int, ...], receivers: tuple[int, ...], micro_batch_size: int) -> float:
        """Seconds of one message between two stages, the network otherwise idle."""
        return self.hop(senders, receivers).alone_s(self.message_bytes(micro_batch_size))

    def message_bytes(self, micro_batch_size: int) -> float:
        """Bytes of a boundary's message: one micro-batch's hidden states."""
        workload = self.problem.workload
        return float(micro_batch_size * workload.seq_len * self.problem.model.hidden_size * workload.element_bytes)

    def _collective_s(self, site: Site, micro_batch_size: int) -> float:
        return ring_collective_s(self.message_bytes(micro_batch_size), site.tp, site.bandwidth, site.latency_s)

    # The price of a plan.

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The exact cost of `plan`; `pipelines` are its pipelines where already priced.

        Raises ValueError for what the format allows but is not priced yet.
        """
        return self._finish(plan, tuple(pipelines or self.pipelines(plan)))

    def pipelines(self, plan: Plan) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline of `plan`, sharing the network with the others. Raises as `price`."""
        feature = unpriced(plan)
        if feature is not None:
            raise ValueError(f"{feature} is part of the plan format but not priced yet")
        if len(self._parts) > _KEPT or len(self._times) > _KEPT or len(self._stages) > _KEPT:
            self.forget_plans()
        shards = len(plan.pipelines) if plan.sharding.stage else 1
        parts = [self._pipeline_parts(pipeline, plan.schedule, shards) for pipeline in plan.pipelines]
        load: Load = {}
        for part in parts:
            for resource, seconds in part.load:
                load[resource] = load.get(resource, 0.0) + seconds
        return tuple(
            self._pipeline_cost(pipeline, part, load, plan.schedule)
            for pipeline, part in zip(plan.pipelines, parts, strict=True)
        )

    def forget_plans(self) -> None:
        """Give back what is remembered of pipelines and plans; layers, hops and memory models stay."""
        self._parts.clear()
        self._times.clear()
        self._stages.clear()
        self._sync = None

    def _pipeline_parts(self, pipeline: Pipeline, schedule: str, shards: int) -> _Parts:
        key = (pipeline, schedule, shards)
        found = self._parts.get(key)
        if found is None:
            size, count = pipeline.micro_batch_size, len(pipeline.stages)
            costs = tuple(
                self._stage_cost(
                    stage,
                    k == 0,
                    k == count - 1,
                    size,
                    in_flight(schedule, k, count, pipeline.num_micro_batches),
                    shards,
                )
                for k, stage in enumerate(pipeline.stages)
            )
            groups = [stage.devices for stage in pipeline.stages]
            hops = tuple((self.hop(a, b), self.hop(b, a)) for a, b in pairwise(groups))
            message = self.message_bytes(size)
            loads = []
            for k in range(count):
                sends = []
                if k < count - 1:
                    sends.append((hops[k][0], message))
                if k:
                    sends.append((hops[k - 1][1], message))
                loads.append(stage_load(sends))
            found = self._parts[key] = _Parts(
                tuple(cost.forward_s for cost in costs),
                tuple(cost.backward_s for cost in costs),
                costs,
                hops,
                message,
                tuple(item for stage in loads for item in stage.items()),
            )
        return found

    def _stage_cost(self, stage: Stage, first: bool, last: bool, size: int, held: int, shards: int) -> StageCost:
        site, layers, policy = self.site(stage.devices), stage.num_layers, stage.policy
        key = (site, layers, policy, first, last, size, held, shards)
        found = self._stages.get(key)
        if found is None:
            forward_s, backward_s = self.stage_s(site, layers, first, last, size, policy)
            model = self.memory_model(site, size)
            found = self._stages[key] = StageCost(
                forward_s,
                backward_s,
                model.stage(layers, first, last, policy, held, shards),
                site.gpu.usable_memory_bytes,
                model.num_params(layers, first, last),
            )
        return found

    def _pipeline_cost(self, pipeline: Pipeline, parts: _Parts, load: Load, schedule: str) -> PipelineCost:
        message = parts.message_bytes
        ahead = tuple(way.seconds(message, load) for way, _ in parts.hops)
        back = tuple(way.seconds(message, load) for _, way in parts.hops)
        key = (schedule, parts.forward_s, parts.backward_s, ahead, back, pipeline.num_micro_batches)
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = SCHEDULE_TIMES[schedule](
                parts.forward_s, parts.backward_s, ahead, back, pipeline.num_micro_batches
            )
        return PipelineCost(parts.stages, ahead, back, times.stage_end_s, times.end_s)

    def sync_times(self, plan: Plan) -> SyncTimes:
        """The gradient groups of `plan` and what a pass over each takes."""
        structure = tuple(pipeline.stages for pipeline in plan.pipelines)
        if self._sync is None or self._sync[0] != structure:
            groups = sync_groups(plan.pipelines, self.problem.model)
            self._sync = (structure, SyncTimes(groups, self.problem.cluster))
        return self._sync[1]

    def _finish(self, plan: Plan, pipelines: tuple[PipelineCost, ...]) -> Cost:
        workload = self.problem.workload
        pipeline_s = max(pipeline.end_s for pipeline in pipelines)
        ready = np.array([end for pipeline in pipelines for end in pipeline.stage_end_s])
        stages = [
            (stage, cost)
            for p, q in zip(plan.pipelines, pipelines, strict=True)
            for stage, cost in zip(p.stages, q.stages, strict=True)
        ]
        sharded = plan.sharding.stage >= 1
        shards = len(plan.pipelines) if sharded else 1
        optimizer = np.array(
            [
                optimizer_compute_s(workload, self.site(stage.devices).gpu, cost.num_params / shards)
                for stage, cost in stages
            ]
        )
        sync = self.sync_times(plan)
        ended = ready.copy()
        if sync.groups.count:
            stage_of = self._stage_of([stage for stage, _ in stages])
            gradient_pass = sync.pass_s(workload.stored_gradient_bytes)
            ended = _after_groups(sync, stage_of, ready, [t * (1 if sharded else 2) for t in gradient_pass])
        synced_s = max(pipeline_s, float(ended.max()))
        finished = ended + optimizer
        if sharded and sync.groups.count:
            finished = _after_groups(sync, stage_of, finished, sync.pass_s(workload.element_bytes))
        step_s = max(synced_s, float(finished.max()))
        tokens = workload.tokens
        return Cost(
            step_time_s=step_s,
            pipeline_s=pipeline_s,
            gradient_sync_s=synced_s - pipeline_s,
            optimizer_s=step_s - synced_s,
            tokens_per_s=tokens / step_s,
            mfu=tokens * self._flops_per_token / (step_s * self._peak_flops),
            excess_bytes=max(cost.excess_bytes for _, cost in stages),
            pipelines=pipelines,
        )

    def _stage_of(self, stages: list[Stage]) -> Ints:
        stage_of = np.zeros(self.problem.cluster.num_devices, np.int64)
        for k, stage in enumerate(stages):
            stage_of[list(stage.devices)] = k
        return stage_of

    @cached_property
    def _flops_per_token(self) -> float:
        return self.problem.model.model_flops_per_token(self.problem.workload.seq_len)

    @cached_property
    def _peak_flops(self) -> float:
        return self.problem.cluster.total_peak_flops(self.problem.workload.precision)


def _after_groups(sync: SyncTimes, stage_of: Ints, start: Floats, seconds: list[Floats]) -> Floats:
    """When each stage has ended all its groups, every group starting when all its holders' stages have."""
    ended = start.copy()
    for holders, duration in zip(sync.groups.holders, seconds, strict=True):
        at = stage_of[holders]
        done = start[at].max(axis=1) + duration
        np.maximum.at(ended, at, done[:, None])
    return ended
