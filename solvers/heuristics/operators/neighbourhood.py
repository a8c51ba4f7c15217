"""What operators on partitions know of a problem, and the two decorators that most of them use."""

import random
from collections.abc import Callable, Mapping, Sequence

from hexiopt.problem.problem import Problem
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup

StageGroups = tuple[DeviceGroup, ...]
PipelineGroups = tuple[PipelineGroup, ...]


class Neighbourhood:
    """Devices and TP degrees of the machines of a problem, and its micro-batch sizes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.machine_of: list[int] = problem.cluster.machine_of.tolist()
        self.by_machine = problem.usable_by_machine
        self.allowed = {m: set(problem.space.allowed_tp(len(own))) for m, own in self.by_machine.items()}
        self.sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
        self.uneven = {m for m, spec in enumerate(problem.cluster.machines) if not spec.is_uniform}

    def joins(self, a: DeviceGroup, b: DeviceGroup) -> bool:
        """Whether two TP groups may be joined into one."""
        machine = self.machine_of[a[0]]
        return machine == self.machine_of[b[0]] and len(a) + len(b) in self.allowed[machine]

    def join(self, one: StageGroups, two: StageGroups) -> StageGroups | None:
        """The TP groups of two stages joined pairwise to twice the degree; None where machines do not allow it."""
        if len(one) != len(two):
            return None
        if not all(len(a) == len(b) and self.joins(a, b) for a, b in zip(one, two, strict=True)):
            return None
        return tuple(tuple(sorted(a + b)) for a, b in zip(one, two, strict=True))

    def pipeline(self, stages: Sequence[StageGroups], least_size: int) -> PipelineGroup | None:
        """A pipeline of `stages` with the least allowed micro-batch size from `least_size` that gives each replica a
        sample.

        Where no allowed size is that large, the largest one; None where even that is too small for the replicas.
        """
        most = max(map(len, stages))
        sizes = [size for size in self.sizes if size >= most]
        if not sizes:
            return None
        return PipelineGroup.pipeline(stages, min((size for size in sizes if size >= least_size), default=sizes[-1]))

    def take(self, taker: PipelineGroup, giver: PipelineGroup, stages: Sequence[StageGroups]) -> PipelineGroup | None:
        """`taker` with other `stages`, some of them from `giver`."""
        if taker.replicated or giver.replicated:
            return self.pipeline(stages, taker.micro_batch_size)
        return taker.with_stages(stages)


Apply = Callable[[Neighbourhood, Partition, random.Random], Partition | None]


def halves(stage_groups: StageGroups) -> tuple[StageGroups, StageGroups] | None:
    """A stage cut into two of half its TP degree; None where a degree is odd."""
    if any(len(group) % 2 for group in stage_groups):
        return None
    return tuple(g[: len(g) // 2] for g in stage_groups), tuple(g[len(g) // 2 :] for g in stage_groups)


def replace_groups(
    partition: Partition, changed: Mapping[int, PipelineGroups], more: Sequence[PipelineGroup] = ()
) -> Partition:
    """The partition with the groups at some positions replaced, and `more` appended."""
    kept = (
        own for at, pipeline_group in enumerate(partition.pipeline_groups) for own in changed.get(at, (pipeline_group,))
    )
    return partition.with_pipeline_groups((*kept, *more))


def on_one(change: Callable[[Neighbourhood, PipelineGroup, random.Random], PipelineGroups | None]) -> Apply:
    """Makes an operator that replaces one randomly chosen pipeline group."""

    def apply(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
        at = rng.randrange(len(partition.pipeline_groups))
        found = change(near, partition.pipeline_groups[at], rng)
        return None if found is None else replace_groups(partition, {at: found})

    return apply


def on_two(
    change: Callable[
        [Neighbourhood, PipelineGroup, PipelineGroup, random.Random], tuple[PipelineGroups, PipelineGroups] | None
    ],
) -> Apply:
    """Makes an operator that replaces two randomly chosen pipeline groups."""

    def apply(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
        if len(partition.pipeline_groups) < 2:
            return None
        a, b = rng.sample(range(len(partition.pipeline_groups)), 2)
        found = change(near, partition.pipeline_groups[a], partition.pipeline_groups[b], rng)
        return None if found is None else replace_groups(partition, {a: found[0], b: found[1]})

    return apply
