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
from hexiopt.plan.parallelism import ExpertParallel, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem

CommunicatorBytes = tuple[tuple[float, ...], ...]  # of a pipeline [stages][copies]; empty: what is reserved


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


def communicator_bytes(plan: Plan, rings: GradientRings, problem: Problem) -> list[CommunicatorBytes]:
    """What the communicators of each stage of `plan` take [pipelines][stages][copies]; of no stage in pipelines whose
    devices have no more than are reserved."""
    sums, every = gradient_groups(plan, rings), list[CommunicatorBytes]()
    divided = problem.workload.sequence_parallel
    for pipeline in plan.pipelines:
        pairs = message_pairs(pipeline, divided)
        above = {device for counts in (sums, pairs) for device, number in counts.items() if number > RESERVED_GROUPS}
        shared = above and not above.isdisjoint(chain.from_iterable(stage.devices for stage in pipeline.stages))
        stages = pipeline.stages if shared else ()
        every.append(tuple([_stage_bytes(stage, sums, pairs, problem.cluster) for stage in stages]))
    return every


def add_communicators(pipelines: Sequence[PipelineCost], every: Sequence[CommunicatorBytes]) -> Sequence[PipelineCost]:
    """`pipelines` with the memory of the communicators that their devices have (`communicator_bytes`)."""
    return tuple(
        [
            replace(
                priced, stages=tuple([with_communicators(*pair) for pair in zip(priced.stages, of_stages, strict=True)])
            )
            if of_stages
            else priced
            for priced, of_stages in zip(pipelines, every, strict=True)
        ]
    )


def with_communicators(stage: StageCost, of_copies: Sequence[float]) -> StageCost:
    """The stage with communicators of so many bytes [copies], unless more are reserved."""
    most = iter(of_copies)

    def enlarge(copy: ParameterCopy) -> ParameterCopy:
        num_bytes = max(copy.memory.communicators, next(most))
        return replace(copy, memory=replace(copy.memory, communicators=num_bytes))

    return StageCost(
        tuple([replace(executor, copies=tuple(map(enlarge, executor.copies))) for executor in stage.executors])
    )


def _stage_bytes(stage: Stage, sums: Counter[int], pairs: Counter[int], cluster: Cluster) -> tuple[float, ...]:
    communicators = Communicators(cluster)
    return tuple(
        [
            max(
                communicators.total_bytes(
                    gpu, _inside_bytes(communicators, stage, device, devices, gpu), sums[device], pairs[device]
                )
                for device, gpu in zip(devices, map(cluster.gpu_of, devices), strict=True)
            )
            for devices in stage.parallelism.parameter_copies
        ]
    )


def _inside_bytes(communicators: Communicators, stage: Stage, device: int, devices: tuple[int, ...], gpu: Gpu) -> float:
    match stage.parallelism:
        case SequenceParallel() as layout:
            size = next(len(group.devices) for group in layout.groups if device in group.devices)
            return communicators.layout_bytes(gpu, size, len(layout.groups))
        case ExpertParallel() as group:
            return communicators.tp_group_bytes(gpu, len(group.devices))
        case _:
            return communicators.tp_group_bytes(gpu, len(devices))
