"""Lower bounds on gradient sync for all layer cuts of an assignment at once, and on what follows each replica's end.

The rings of a layer depend only on which stage of each pipeline holds it. Their loads on a network resource add up over
layers, and the rings on the most loaded resource take at least as long as its load: as in `hexiopt/cost/rings.py`,
without latencies and without links inside machines.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from hexiopt.cost.executors.compute import optimizer_compute_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.rings import RingTimes, ring_edges
from hexiopt.memo import Memo
from hexiopt.plan.holders import ParameterHolders
from hexiopt.plan.parallelism import Replica, Replicated
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.space import Space
from solvers.exact.assignments import ClassGroup, DeviceAssignment, DeviceClasses
from solvers.exact.splits import Layers

_Holders = tuple[tuple[ClassGroup, ...], ...]  # the stages that hold a layer, one of each pipeline


class SyncBound:
    """Lower bounds on the seconds of gradient sync; caches what it computes."""

    def __init__(self, device_classes: DeviceClasses) -> None:
        self._device_classes, self._problem = device_classes, device_classes.problem
        model = self._problem.model
        # Rings of one layer, by the cost model's own rules; their bytes are scaled to a layer, embedding or head.
        # The attention window does not affect them; gpt_neo has none in its first layer.
        one_layer = replace(model, num_layers=1, attention_window=None)
        self._one_layer = PlanPricer(replace(self._problem, model=one_layer, space=Space()))
        self._layer = float(model.layer_params)
        # A tied matrix has rings of its own, between first and last stages; they are left out.
        self._embedding = float(model.embedding_params - (model.vocabulary_params if model.tied_embeddings else 0))
        self._head = float(model.head_params)
        self._whole = float(model.layer_params + model.embedding_params + model.head_params)
        self._loads: Memo[tuple[_Holders, str], Floats] = Memo(lambda key: self._load(*key))

    def seconds(self, assignment: DeviceAssignment, groups: str, cuts: Sequence[Sequence[Layers]]) -> Floats:
        """A bound for every combination of `cuts`, those of the last pipeline varying fastest; sharding `groups`: all
        or machine.

        Rings within groups pass gradients and weights, or gradients twice; rings between groups pass gradients twice.
        """
        stages = [np.array([_stage_of_layer(layers) for layers in own]) for own in cuts]
        chosen = np.indices([len(own) for own in cuts]).reshape(len(cuts), -1)
        held = np.stack([own[at] for own, at in zip(stages, chosen, strict=True)])  # [pipeline, combination, layer]
        sizes = [len(placement) for placement in assignment]
        states = np.ravel_multi_index(tuple(held), tuple(sizes))
        met, where = np.unique(states, return_inverse=True)
        where = where.reshape(states.shape)
        every = np.arange(len(states))
        amounts = np.zeros((len(states), len(met)))
        for layer in range(states.shape[1]):
            amounts[every, where[:, layer]] += self._layer
        amounts[every, where[:, 0]] += self._embedding
        amounts[every, where[:, -1]] += self._head
        loads = []
        for state in met.tolist():
            at = np.unravel_index(state, sizes)
            loads.append(
                self._loads[tuple(sorted(placement[s] for placement, s in zip(assignment, at, strict=True))), groups]
            )
        found: Floats = (amounts @ np.stack(loads)).max(axis=1, initial=0.0)
        return found

    def _load(self, holders: _Holders, groups: str) -> Floats:
        """Seconds that the rings of a parameter, in all slices, occupy each resource within and between groups."""
        labeled = self._device_classes.labeled(tuple((stage,) for stage in holders))
        pipelines = tuple(
            Pipeline((Stage(Replicated(tuple(Replica(group, 1) for group in replicas)), ((0, 1),)),), 1, len(replicas))
            for (replicas,) in labeled
        )
        workload = self._problem.workload
        gradient, weight = workload.stored_gradient_bytes, workload.element_bytes
        rings = self._one_layer.rings(Plan(pipelines, sharding=Sharding(1, groups)))
        within = min(2 * gradient, gradient + weight) * self._passed(rings.within_group.groups)
        between = 2 * gradient * self._passed(rings.between_groups.groups)
        load: Floats = np.concatenate([within, between]) / self._whole
        return load

    def _passed(self, groups: ParameterHolders) -> Floats:
        """Seconds that one byte per parameter, passed once around its ring, occupies each network resource."""
        cluster, network = self._problem.cluster, self._problem.cluster.network
        load = np.zeros(network.num_resources)
        for holders, params in zip(groups.holders, groups.params, strict=True):
            for ring, amount in zip(holders.tolist(), params.tolist(), strict=True):
                moved = amount * (len(ring) - 1) / len(ring)
                for a, b, share in ring_edges(cluster, ring):
                    if cluster.machine_of[a] != cluster.machine_of[b]:
                        for resource in network.route(a, b):
                            load[resource] += share * moved / network.capacity[resource]
        return load


def _stage_of_layer(layers: Layers) -> list[int]:
    """The stage that holds each layer."""
    held = [(first, end, s) for s, ranges in enumerate(layers) for first, end in ranges]
    return [s for first, end, s in sorted(held) for _ in range(first, end)]


class ReplicaTail(NamedTuple):
    """Seconds of gradient sync and optimiser that follow the end of a replica, and those from the beginning of its last
    backward on, beside which sums run (none: −∞)."""

    after_end_s: float
    from_last_s: float

    def step_s(self, end_s: float, last_s: float) -> float:
        """The least step of a replica that ends with a backward of `last_s`."""
        return max(end_s + self.after_end_s, end_s - last_s + self.from_last_s)


def tails_s(model: PlanPricer, plan: Plan, holders: int) -> list[list[ReplicaTail]]:
    """What follows each replica, by pipeline and replica, stage by stage.

    The step time is the largest of all replicas' `step_s`: the rings of `PlanPricer.price`, traversed backwards.
    `holders`: the most over which an optimiser is sharded.
    """
    problem, workload, zero = model.problem, model.problem.workload, plan.sharding.stage
    sizes: list[int] = []
    optimizer_s: list[float] = []
    executor_of = [0] * problem.cluster.num_devices
    for pipeline in plan.pipelines:
        before = len(optimizer_s)
        for s, stage in enumerate(pipeline.stages):
            for replica in stage.replicas:
                for device in replica.devices:
                    executor_of[device] = len(optimizer_s)
                tp_group = model.tp_group(replica.devices)
                params = model.stages.memory_model(tp_group, 1).num_params(
                    stage.num_layers, s == 0, s == len(pipeline.stages) - 1
                )
                optimizer_s.append(optimizer_compute_s(workload, tp_group.gpu, params / holders))
        sizes.append(len(optimizer_s) - before)
    around, tails = model.rings(plan), [0.0] * len(optimizer_s)
    if zero in (1, 2):
        tails = _before_rings(around.within_group, executor_of, tails, workload.element_bytes, 1)
    tails = [tail + own for tail, own in zip(tails, optimizer_s, strict=True)]
    tails = _before_rings(around.between_groups, executor_of, tails, workload.stored_gradient_bytes, 2)
    sums = around.within_group, executor_of, tails, workload.stored_gradient_bytes, (2, 1, 0, 0)[zero]
    if model.framework.gradient_sums == "after":
        both = [ReplicaTail(own, -inf) for own in _before_rings(*sums)]
    else:
        last = _before_rings(*sums, shares=around.within_group.groups.last_shares)
        whole = _before_rings(*sums, alone=[-inf] * len(tails))
        both = list(map(ReplicaTail, last, whole))
    ends = np.cumsum(sizes).tolist()
    return [both[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _before_rings(
    sync: RingTimes,
    executor_of: Sequence[int],
    tails: list[float],
    num_bytes: float,
    passes: int,
    *,
    shares: Sequence[Floats] | None = None,
    alone: Sequence[float] | None = None,
) -> list[float]:
    """The seconds that follow each replica before rings of `passes`, or `shares` of these, given those that follow
    after them; `alone` where there is no ring."""
    longer = list(tails if alone is None else alone)
    if passes and sync.groups.count:
        every = sync.ring_pass_s(num_bytes)
        every = every if shares is None else [own * share for own, share in zip(every, shares, strict=True)]
        for holders, seconds in zip(sync.groups.holders, every, strict=True):
            for ring, ring_pass_s in zip(holders.tolist(), seconds.tolist(), strict=True):
                members = [executor_of[device] for device in ring]
                tail = passes * ring_pass_s + max(tails[k] for k in members)
                for k in members:
                    longer[k] = max(longer[k], tail)
    return longer
