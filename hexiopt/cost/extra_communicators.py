"""Memory of a plan's communicators beyond those reserved on every device (`executors/communicators.py`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.communicators import RESERVED_GROUPS, Communicators
from hexiopt.cost.executors.executor import ParameterCopy
from hexiopt.cost.executors.routes import token_transfers
from hexiopt.cost.rings import GradientRings, RingAmounts, rings_by_length, split_rings
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.holdings import vector_holders
from hexiopt.plan.messages import messages
from hexiopt.plan.parallelism import SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem


def gradient_groups(plan: Plan, rings: GradientRings) -> Counter[int]:
    """By device, the number of groups that sum its gradients; empty where none can have more than are reserved."""
    holders, groups = [rings.within_group.groups, rings.between_groups.groups], rings.sharding_group
    rows = [same_length for kind in holders for same_length in kind.holders]  # of rings, their devices
    # Norms and biases, which every rank of a TP group holds whole, add about as many groups again at most.
    if not rows or 2 * int(np.bincount(np.concatenate([row.ravel() for row in rows])).max()) <= RESERVED_GROUPS:
        return Counter()
    vectors = rings_by_length(dict.fromkeys(vector_holders(plan.pipelines), RingAmounts(1.0)))
    holders += [vectors] if groups is None else split_rings(vectors, groups)
    distinct = {tuple(ring) for kind in holders for same_length in kind.holders for ring in same_length.tolist()}
    return Counter(chain.from_iterable(distinct))


def message_pairs(pipeline: Pipeline, divided: bool = True) -> Counter[int]:
    """By device, the number of pairs (sender, receiver) that it belongs to; empty where none can have more than are
    reserved. `divided` as of `token_transfers`."""
    stages = pipeline.stages
    plain = all(isinstance(stage.parallelism, TensorParallel) and stage.tp == stages[0].tp for stage in stages)
    if len(stages) == 1 or (plain and pipeline.num_chunks == 1):
        return Counter()
    pairs = set[tuple[int, int]]()
    for message in messages(pipeline):
        senders = stages[message.stage].parallelism.token_layouts[message.sender]
        receivers = stages[message.target(len(stages))].parallelism.token_layouts[message.receiver]
        pairs.update([(a, b) for a, b, _ in token_transfers(senders, receivers, divided)])
    return Counter(chain.from_iterable(pairs))


def add_communicators(
    plan: Plan, pipelines: Sequence[PipelineCost], rings: GradientRings, problem: Problem
) -> Sequence[PipelineCost]:
    """`pipelines` of `plan`, with the memory of the communicators that their devices have beyond the reserved ones."""
    sums, costs = gradient_groups(plan, rings), []
    cluster, divided = problem.cluster, problem.workload.sequence_parallel
    for pipeline, priced in zip(plan.pipelines, pipelines, strict=True):
        pairs = message_pairs(pipeline, divided)
        above = {device for counts in (sums, pairs) for device, number in counts.items() if number > RESERVED_GROUPS}
        if above and not above.isdisjoint(chain.from_iterable(stage.devices for stage in pipeline.stages)):
            stages = [
                _add_to_stage(stage, cost, sums, pairs, cluster)
                for stage, cost in zip(pipeline.stages, priced.stages, strict=True)
            ]
            priced = replace(priced, stages=tuple(stages))
        costs.append(priced)
    return tuple(costs)


def _add_to_stage(
    stage: Stage, cost: StageCost, sums: Counter[int], pairs: Counter[int], cluster: Cluster
) -> StageCost:
    communicators = Communicators(cluster)
    copies = iter(stage.parallelism.parameter_copies)

    def enlarge(copy: ParameterCopy) -> ParameterCopy:
        devices = next(copies)
        most = max(
            communicators.total_bytes(
                gpu, _inside_bytes(communicators, stage, device, devices, gpu), sums[device], pairs[device]
            )
            for device, gpu in zip(devices, map(cluster.gpu_of, devices), strict=True)
        )
        return replace(copy, memory=replace(copy.memory, communicators=max(copy.memory.communicators, most)))

    return StageCost(
        tuple([replace(executor, copies=tuple(map(enlarge, executor.copies))) for executor in cost.executors])
    )


def _inside_bytes(communicators: Communicators, stage: Stage, device: int, devices: tuple[int, ...], gpu: Gpu) -> float:
    match stage.parallelism:
        case SequenceParallel() as layout:
            size = next(len(group.devices) for group in layout.groups if device in group.devices)
            return communicators.layout_bytes(gpu, size, len(layout.groups))
        case _:
            return communicators.tp_group_bytes(gpu, len(devices))
