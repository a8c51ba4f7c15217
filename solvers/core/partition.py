"""What a search moves: which devices form which stages; the rest of a plan follows from it
(`completion/completer.py`).

A *bundle* is a set of pipelines with the same stages: `stages[s][k]` is the TP group of its pipeline k in stage s.
Bundles of one pipeline say anything a plan can say; wider ones keep pipelines aligned, so that their layers meet
the same machines, and move as one. In a *replicated* bundle the TP groups are not pipelines beside each other but
the replicas of the stages of one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hexiopt.schedules.schedule import Schedule

DeviceGroup = tuple[int, ...]  # devices of a TP group


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """Pipelines of equal stages, and their micro-batch size in sequences; or one pipeline of replicated stages.

    `replicated`: each `stages[s]` has the replicas of one stage, as many as it likes, several somewhere.
    """

    stages: tuple[tuple[DeviceGroup, ...], ...]
    micro_batch_size: int = 1
    replicated: bool = False

    @classmethod
    def pipeline(cls, stages: Sequence[tuple[DeviceGroup, ...]], micro_batch_size: int) -> "PipelineGroup":
        """One pipeline, of replicated stages where they have several groups."""
        return cls(tuple(stages), micro_batch_size, any(len(stage_groups) > 1 for stage_groups in stages))

    @property
    def width(self) -> int:
        """Pipelines of the bundle."""
        return 1 if self.replicated else len(self.stages[0])

    @property
    def most_replicas(self) -> int:
        """The most replicas of a stage; a micro-batch has a sample for each."""
        return max(map(len, self.stages)) if self.replicated else 1

    def with_stages(self, stages: Iterable[tuple[DeviceGroup, ...]]) -> "PipelineGroup":
        """The bundle with other stages."""
        kept = tuple(stages)
        return (
            PipelineGroup.pipeline(kept, self.micro_batch_size)
            if self.replicated
            else PipelineGroup(kept, self.micro_batch_size)
        )


@dataclass(frozen=True, slots=True)
class Partition:
    """Bundles, and what is chosen once for the plan."""

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
        """The structure with other bundles."""
        return replace(self, pipeline_groups=tuple(pipeline_groups))

    def devices(self) -> set[int]:
        """All devices used."""
        return {d for b in self.pipeline_groups for stage_groups in b.stages for group in stage_groups for d in group}


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """A structure that no plan follows: so many layers (or sequences) found no place. False, where a plan is true."""

    missing: int

    def __bool__(self) -> Literal[False]:
        return False
