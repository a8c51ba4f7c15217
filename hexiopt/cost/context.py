"""What one pipeline must know of the others: over how many devices states are sharded, and who uses the same network.

A stage's states are spread over as many devices as hold its parameters in one sharding group; a mean where the ranks of
a TP group, or slices of a layer, differ in it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hexiopt.cost.executors.stage_model import Contention, StageModel
from hexiopt.plan.holdings import Holdings, slices
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan, Stage

Holders = tuple[float, ...]  # devices over which a copy's states are spread: one number for all layers, or one each


class PipelineSharding(NamedTuple):
    """How the states of a pipeline are sharded: by which ZeRO stage, and over how many devices.

    `num_devices` for all of them, unless `by_layer` has the number of every layer [stages][copies][layers].
    """

    zero_stage: int = 0
    num_devices: float = 1
    by_layer: tuple[tuple[Holders, ...], ...] | None = None

    def holders(self, stage: int, num_copies: int) -> tuple[Holders, ...]:
        """Over how many devices the states of each copy of a stage are spread [copies]."""
        return ((self.num_devices,),) * num_copies if self.by_layer is None else self.by_layer[stage]


class PipelineContext(NamedTuple):
    """All that the price of a pipeline's executors depends on beside the pipeline and its schedule."""

    sharding: PipelineSharding
    contention: Contention


def plan_context(plan: Plan, groups: Sequence[int] | None, stages: StageModel) -> Sequence[PipelineContext]:
    """The context of each pipeline of `plan`; `groups` from `sharding_groups`."""
    sharding, count = plan.sharding, len(plan.pipelines)
    shared = contentions(plan, stages)
    if sharding.stage and (
        sharding.groups != "all" or any(len(stage.parallelism.parameter_copies) > 1 for stage in _stages(plan))
    ):
        each: Sequence[PipelineSharding] = state_sharding(plan, groups)
    else:
        each = [PipelineSharding(sharding.stage, count) if sharding.stage else PipelineSharding()] * count
        if not any(shared):
            return [PipelineContext(each[0], ())] * count
    return list(map(PipelineContext, each, shared))


def _stages(plan: Plan) -> Iterator[Stage]:
    return (stage for pipeline in plan.pipelines for stage in pipeline.stages)


def contentions(plan: Plan, stages: StageModel) -> Sequence[Contention]:
    """The network resources that several sequence-parallel stages of the plan use and each pipeline crosses, with how
    many stages use each."""
    if not any(isinstance(stage.parallelism, SequenceParallel) for stage in _stages(plan)):
        return [()] * len(plan.pipelines)
    each = [
        [
            stages.sequence_stage(stage.parallelism, pipeline.micro_batch_size).crossed
            for stage in pipeline.stages
            if isinstance(stage.parallelism, SequenceParallel)
        ]
        for pipeline in plan.pipelines
    ]
    users = Counter(resource for own in each for crossed in own for resource in crossed)
    return [
        tuple(sorted((r, users[r]) for r in frozenset().union(*own) if users[r] > 1)) if own else () for own in each
    ]


def state_sharding(plan: Plan, groups: Sequence[int] | None) -> list[PipelineSharding]:
    """How the states of each pipeline are sharded, layer by layer; `groups` from `sharding_groups`."""
    held = Holdings.of(plan.pipelines)
    spread: list[dict[int, float]] = []  # of each layer, by the number of the copy
    for layers, members in held.layers:
        spread += [_num_holders([held.copies[m] for m in members], members, groups)] * len(layers)
    return [
        PipelineSharding(
            plan.sharding.stage,
            by_layer=tuple(
                tuple(
                    tuple(spread[n][copy] for first, end in stage.layers for n in range(first, end)) for copy in copies
                )
                for stage, copies in zip(pipeline.stages, numbers, strict=True)
            ),
        )
        for pipeline, numbers in zip(plan.pipelines, held.stages, strict=True)
    ]


def _num_holders(
    copies: Sequence[tuple[int, ...]], numbers: Sequence[int], groups: Sequence[int] | None
) -> dict[int, float]:
    """By the number of a copy, over how many devices its states of a layer are spread, at its fullest rank."""
    if groups is None:
        return dict.fromkeys(numbers, len(copies))
    widths, ranks = slices(tuple(map(len, copies)))
    found: dict[int, float] = {}
    sharers = []  # per slice and copy, devices in the group of the one that holds the slice
    for row in ranks.tolist():
        own = [groups[devices[rank]] for devices, rank in zip(copies, row, strict=True)]
        counted = Counter(own)
        sharers.append([counted[group] for group in own])
    for k, (number, devices) in enumerate(zip(numbers, copies, strict=True)):
        counts: list[list[tuple[float, int]]] = [[] for _ in devices]
        for width, row, shared in zip(widths, ranks.tolist(), sharers, strict=True):
            counts[row[k]].append((width, shared[k]))
        found[number] = min(map(_mean, counts))
    return found


def _mean(counts: Sequence[tuple[float, int]]) -> float:
    """The count that spreads as much as all (width, count) do together."""
    if len({count for _, count in counts}) == 1:
        return counts[0][1]
    return sum(width for width, _ in counts) / sum(width / count for width, count in counts)
