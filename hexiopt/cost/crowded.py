"""Communicators of a plan beyond those that every device has room reserved for (`executors/communicators.py`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.communicators import RESERVED_GROUPS, Communicators
from hexiopt.cost.executors.executor import ParameterCopy
from hexiopt.cost.executors.routes import shared_tokens
from hexiopt.cost.rings import GradientRings, divided, grouped
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.holdings import vector_holders
from hexiopt.plan.messages import messages
from hexiopt.plan.parallelism import SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem


def gradient_groups(plan: Plan, rings: GradientRings) -> Counter[int]:
    """By device, the groups that sum its gradients, where there may be more than are reserved."""
    holders, groups = [rings.within_group.groups, rings.between_groups.groups], rings.sharding_group
    rows = [some for one in holders for some in one.holders]
    # There are about as many groups again, at most, for norms and biases, which every rank of a TP group holds whole.
    if not rows or 2 * int(np.bincount(np.concatenate([some.ravel() for some in rows])).max()) <= RESERVED_GROUPS:
        return Counter()
    vectors = grouped(dict.fromkeys(vector_holders(plan.pipelines), 1.0))
    holders += [vectors] if groups is None else divided(vectors, groups)
    distinct = {tuple(row) for one in holders for some in one.holders for row in some.tolist()}
    return Counter(chain.from_iterable(distinct))


def message_pairs(pipeline: Pipeline, divided: bool = True) -> Counter[int]:
    """By device, the pairs of sender and receiver that it is one of, where there may be more than are reserved;
    `divided` as of `shared_tokens`."""
    stages = pipeline.stages
    plain = all(isinstance(stage.parallelism, TensorParallel) and stage.tp == stages[0].tp for stage in stages)
    if len(stages) == 1 or (plain and pipeline.num_chunks == 1):
        return Counter()
    pairs = set[tuple[int, int]]()
    for one in messages(pipeline):
        senders = stages[one.stage].parallelism.token_layouts[one.sender]
        receivers = stages[one.target(len(stages))].parallelism.token_layouts[one.receiver]
        pairs.update([(a, b) for a, b, _ in shared_tokens(senders, receivers, divided)])
    return Counter(chain.from_iterable(pairs))


def with_crowds(
    plan: Plan, pipelines: Sequence[PipelineCost], rings: GradientRings, problem: Problem
) -> Sequence[PipelineCost]:
    """`pipelines` of `plan` with the memory of devices that have more communicators than are reserved."""
    sums, found = gradient_groups(plan, rings), []
    cluster, divided = problem.cluster, problem.workload.sequence_parallel
    for pipeline, priced in zip(plan.pipelines, pipelines, strict=True):
        pairs = message_pairs(pipeline, divided)
        crowd = {device for counts in (sums, pairs) for device, number in counts.items() if number > RESERVED_GROUPS}
        if crowd and not crowd.isdisjoint(chain.from_iterable(stage.devices for stage in pipeline.stages)):
            stages = [
                _crowded(stage, cost, sums, pairs, cluster)
                for stage, cost in zip(pipeline.stages, priced.stages, strict=True)
            ]
            priced = replace(priced, stages=tuple(stages))
        found.append(priced)
    return tuple(found)


def _crowded(stage: Stage, cost: StageCost, sums: Counter[int], pairs: Counter[int], cluster: Cluster) -> StageCost:
    communicators = Communicators(cluster)
    copies = iter(stage.parallelism.parameter_copies)

    def of(copy: ParameterCopy) -> ParameterCopy:
        devices = next(copies)
        most = max(
            communicators.held(gpu, _inside(communicators, stage, device, devices, gpu), sums[device], pairs[device])
            for device, gpu in zip(devices, map(cluster.gpu_of, devices), strict=True)
        )
        return replace(copy, memory=replace(copy.memory, communicators=max(copy.memory.communicators, most)))

    return StageCost(tuple([replace(executor, copies=tuple(map(of, executor.copies))) for executor in cost.executors]))


def _inside(communicators: Communicators, stage: Stage, device: int, devices: tuple[int, ...], gpu: Gpu) -> float:
    match stage.parallelism:
        case SequenceParallel() as layout:
            size = next(len(group.devices) for group in layout.groups if device in group.devices)
            return communicators.layout(gpu, size, len(layout.groups))
        case _:
            return communicators.tensor_parallel(gpu, len(devices))
