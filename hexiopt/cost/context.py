"""What the price of one pipeline depends on in the others: over how many devices its states are sharded, and how many
stages use the same network resources.

The states of a stage are spread over the devices that hold its parameters in one sharding group; their number is a mean
where the ranks of a TP group, or slices of a layer, differ in it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hexiopt.cost.executors.memory import Holders
from hexiopt.cost.executors.stage_model import Contention, StageModel
from hexiopt.cost.extra_communicators import CommunicatorBytes
from hexiopt.plan.holdings import Holdings, slices
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan, Stage


class PipelineSharding(NamedTuple):
    """How the states of a pipeline are sharded: by which ZeRO stage, and over how many devices.

    `num_devices` holds for all layers, unless `by_layer` has a number for each [stages][copies][layers]. A tied matrix
    is spread over `tied_devices` (None: as all else): of all copies, or of each [stages][copies].
    """

    zero_stage: int = 0
    num_devices: float = 1
    by_layer: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    tied_devices: float | tuple[tuple[float, ...], ...] | None = None

    def holders(self, stage: int, num_copies: int) -> tuple[Holders, ...]:
        """Over how many devices the states of each copy of a stage are spread [copies]."""
        layers = ((self.num_devices,),) * num_copies if self.by_layer is None else self.by_layer[stage]
        tied = self.tied_devices
        return tuple(map(Holders, layers, tied[stage] if isinstance(tied, tuple) else (tied,) * num_copies))


class PipelineContext(NamedTuple):
    """What the price of a pipeline's executors depends on besides the pipeline and its schedule: where backwards are
    split, also on `communicators`, which leave less memory for what is put off."""

    sharding: PipelineSharding
    contention: Contention
    communicators: CommunicatorBytes = ()


def plan_context(plan: Plan, groups: Sequence[int] | None, stages: StageModel) -> Sequence[PipelineContext]:
    """The context of each pipeline of `plan` [pipelines]; `groups` [devices] as of `sharding_groups`."""
    sharding, count = plan.sharding, len(plan.pipelines)
    tied = stages.spreads_over_ends(sharding.stage)
    contention = contentions(plan, stages)
    if sharding.stage and (
        sharding.groups != "all" or any(len(stage.parallelism.parameter_copies) > 1 for stage in _stages(plan))
    ):
        shardings: Sequence[PipelineSharding] = state_sharding(plan, groups, tied)
    else:
        at_ends = float(count + sum(len(pipeline.stages) > 1 for pipeline in plan.pipelines)) if tied else None
        same = PipelineSharding(sharding.stage, count, None, at_ends) if sharding.stage else PipelineSharding()
        shardings = [same] * count
        if not any(contention):
            return [PipelineContext(shardings[0], ())] * count
    return list(map(PipelineContext, shardings, contention))


def _stages(plan: Plan) -> Iterator[Stage]:
    return (stage for pipeline in plan.pipelines for stage in pipeline.stages)


def contentions(plan: Plan, stages: StageModel) -> Sequence[Contention]:
    """For each pipeline of `plan` [pipelines], the network resources that it crosses and that several sequence-parallel
    stages of the plan use, with the number of those stages."""
    if not any(isinstance(stage.parallelism, SequenceParallel) for stage in _stages(plan)):
        return [()] * len(plan.pipelines)
    resources = [  # [pipelines][sequence-parallel stages]
        [
            stages.sequence_stage(stage.parallelism, pipeline.micro_batch_size).network_resources
            for stage in pipeline.stages
            if isinstance(stage.parallelism, SequenceParallel)
        ]
        for pipeline in plan.pipelines
    ]
    users = Counter(resource for line in resources for crossed in line for resource in crossed)
    return [tuple(sorted((r, users[r]) for r in frozenset().union(*line) if users[r] > 1)) for line in resources]


def state_sharding(plan: Plan, groups: Sequence[int] | None, tied: bool = False) -> list[PipelineSharding]:
    """How the states of each pipeline are sharded, layer by layer, and with `tied` those of a matrix at both ends
    [pipelines]; `groups` as of `plan_context`."""
    held = Holdings.of(plan.pipelines)
    spread: list[dict[int, float]] = []  # [layers], by the number of the copy
    for layers, members in held.layers:
        of_layer = _num_holders([held.copies[m] for m in members], members, groups)
        spread += [defaultdict(partial(float, len(members)), of_layer)] * len(layers)  # as many, of experts alone
    at_ends = defaultdict[int, float](float)
    if tied:
        ends = sorted({*held.layers[0][1], *held.layers[-1][1]})
        at_ends = defaultdict(partial(float, len(ends)), _num_holders([held.copies[m] for m in ends], ends, groups))
    return [
        PipelineSharding(
            plan.sharding.stage,
            by_layer=tuple(
                tuple(
                    tuple(spread[n][copy] for first, end in stage.layers for n in range(first, end)) for copy in copies
                )
                for stage, copies in zip(pipeline.stages, numbers, strict=True)
            ),
            tied_devices=tuple(tuple(at_ends[copy] for copy in copies) for copies in numbers) if tied else None,
        )
        for pipeline, numbers in zip(plan.pipelines, held.stages, strict=True)
    ]


def _num_holders(
    copies: Sequence[tuple[int, ...]], numbers: Sequence[int], groups: Sequence[int] | None
) -> dict[int, float]:
    """By the number of a copy, over how many devices its states of a layer are spread on its fullest rank."""
    if groups is None:
        return dict.fromkeys(numbers, len(copies))
    widths, ranks = slices(tuple(map(len, copies)))
    num_holders: dict[int, float] = {}
    group_sizes = []  # [slices][copies]: devices that hold the slice in the sharding group of the copy's holder
    for row in ranks.tolist():
        holder_groups = [groups[devices[rank]] for devices, rank in zip(copies, row, strict=True)]
        members = Counter(holder_groups)
        group_sizes.append([members[group] for group in holder_groups])
    for k, (number, devices) in enumerate(zip(numbers, copies, strict=True)):
        counts: list[list[tuple[float, int]]] = [[] for _ in devices]
        for width, row, sizes in zip(widths, ranks.tolist(), group_sizes, strict=True):
            counts[row[k]].append((width, sizes[k]))
        num_holders[number] = min(map(_mean, counts))
    return num_holders


def _mean(counts: Sequence[tuple[float, int]]) -> float:
    """The mean of (width, count) over which states spread as much as over all: harmonic, weighted by width."""
    if len({count for _, count in counts}) == 1:
        return counts[0][1]
    return sum(width for width, _ in counts) / sum(width / count for width, count in counts)
