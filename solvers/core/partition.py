"""A search's decision variable: which devices form which stages of which pipelines.

Layers, micro-batches and recomputation follow from it (`completion/completer.py`). A *pipeline group* is a set of
pipelines with the same stages: `stages[s][k]` is the TP group of pipeline k in stage s. Groups of one pipeline can
express every plan; wider groups keep pipelines aligned, so that the same machines hold the same layers in all of them,
and are changed as one. In a *replicated* pipeline group the TP groups of a stage are not separate pipelines but
replicas of that stage of a single pipeline.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.schedules.schedule import Schedule

DeviceGroup = tuple[int, ...]  # devices of a TP group


def devices_by_machine(cluster: Cluster, devices: Iterable[int]) -> dict[int, list[int]]:
    """`devices` by machine, both in their order."""
    by_machine: dict[int, list[int]] = {}
    for device in devices:
        by_machine.setdefault(int(cluster.machine_of[device]), []).append(device)
    return by_machine


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """Pipelines with the same stages and one micro-batch size in sequences; or one pipeline of replicated stages.

    If `replicated`, `stages[s]` lists the replicas of stage s; at least one stage has several.
    """

    stages: tuple[tuple[DeviceGroup, ...], ...]
    micro_batch_size: int = 1
    replicated: bool = False

    @classmethod
    def pipeline(cls, stages: Sequence[tuple[DeviceGroup, ...]], micro_batch_size: int) -> "PipelineGroup":
        """One pipeline; its stages are replicated where one of them has several TP groups."""
        return cls(tuple(stages), micro_batch_size, any(len(stage_groups) > 1 for stage_groups in stages))

    @property
    def width(self) -> int:
        """Pipelines of the pipeline group."""
        return 1 if self.replicated else len(self.stages[0])

    @property
    def most_replicas(self) -> int:
        """The most replicas of a stage; a micro-batch has a sample for each."""
        return max(map(len, self.stages)) if self.replicated else 1

    def devices(self) -> set[int]:
        """All devices used."""
        return {device for stage_groups in self.stages for group in stage_groups for device in group}

    def pipelines(self) -> "list[PipelineGroup]":
        """Each of its pipelines as a group of its own."""
        if self.width == 1:
            return [self]
        return [self.with_stages((groups[k],) for groups in self.stages) for k in range(self.width)]

    def with_stages(self, stages: Iterable[tuple[DeviceGroup, ...]]) -> "PipelineGroup":
        """The pipeline group with other stages."""
        kept = tuple(stages)
        return (
            PipelineGroup.pipeline(kept, self.micro_batch_size)
            if self.replicated
            else PipelineGroup(kept, self.micro_batch_size)
        )


@dataclass(frozen=True, slots=True)
class Partition:
    """Pipeline groups, and the choices common to the whole plan."""

    pipeline_groups: tuple[PipelineGroup, ...]
    schedule: Schedule
    sharding: int
    chunks: int = 1  # layer ranges a stage where interleaved; fewer in pipelines that cannot have as many
    groups: str = "all"  # sharding groups

    @property
    def num_pipelines(self) -> int:
        """Pipelines of the plan."""
        return sum(pipeline_group.width for pipeline_group in self.pipeline_groups)

    def with_pipeline_groups(self, pipeline_groups: Iterable[PipelineGroup]) -> "Partition":
        """The partition with other pipeline groups."""
        return replace(self, pipeline_groups=tuple(pipeline_groups))

    def devices(self) -> set[int]:
        """All devices used."""
        return set[int]().union(*(group.devices() for group in self.pipeline_groups))


def partition_of(plan: Plan) -> Partition | None:
    """The partition that a plan follows, its like pipelines in one group; None where stages have sequence layouts.

    Completed, it may get other layers and micro-batches than the plan has.
    """
    alike: dict[Hashable, list[Pipeline]] = defaultdict(list)
    for pipeline in plan.pipelines:
        if any(not stage.parallelism.replicas for stage in pipeline.stages):
            return None
        replicated = any(len(stage.parallelism.replicas) > 1 for stage in pipeline.stages)
        shape = tuple((stage.layers, stage.tp) for stage in pipeline.stages)
        alike[pipeline if replicated else (shape, pipeline.micro_batch_size)].append(pipeline)
    groups = []
    for first, *others in alike.values():
        columns = zip(*(one.stages for one in (first, *others)), strict=True)
        stages = [tuple(r.devices for stage in column for r in stage.parallelism.replicas) for column in columns]
        replicated = any(len(stage.parallelism.replicas) > 1 for stage in first.stages)
        groups.append(PipelineGroup(tuple(stages), first.micro_batch_size, replicated))
    sharding = plan.sharding
    chunks = max(pipeline.num_chunks for pipeline in plan.pipelines)
    named = sharding.groups if isinstance(sharding.groups, str) else "all"
    return Partition(tuple(groups), plan.schedule, sharding.stage, chunks, named)


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """A partition that cannot be completed: `missing` layers (or sequences) did not fit. False in a boolean context."""

    missing: int

    def __bool__(self) -> Literal[False]:
        return False
