"""A plan: pipelines of stages of replicas over devices. It holds choices, no costs.

Devices are the cluster's integers; names appear in files only (`plan_file.py`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hexiopt.errors import InputError, quoted
from hexiopt.plan.parallelism import Ends as Ends
from hexiopt.plan.parallelism import Replica as Replica
from hexiopt.plan.parallelism import Replicated as Replicated
from hexiopt.plan.parallelism import SequenceGroup as SequenceGroup
from hexiopt.plan.parallelism import SequenceLayout as SequenceLayout
from hexiopt.plan.parallelism import SequenceParallel as SequenceParallel
from hexiopt.plan.parallelism import StageParallelism as StageParallelism
from hexiopt.plan.parallelism import TensorParallel as TensorParallel
from hexiopt.plan.parallelism import held_by as held_by
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, and how devices work on them: as one TP group, as several, or with a sequence layout.

    `layers` are half-open ranges, one unless interleaved; `recompute` is one policy, or one per layer. What a stage
    asks of how it is parallel it asks `parallelism`, whose types answer alike.
    """

    parallelism: StageParallelism
    layers: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        if not isinstance(self.parallelism, StageParallelism):
            said = f"plan: stage: {quoted(self.parallelism)} is no way to be parallel"
            raise InputError(f"{said}; give TensorParallel, Replicated or SequenceParallel of hexiopt.plan.parallelism")

    @classmethod
    def of(cls, devices: tuple[int, ...], first: int, end: int, recompute: str = "none") -> "Stage":
        """The plain stage: layers [first, end) by tensor parallelism over `devices`."""
        return cls(TensorParallel(devices), ((first, end),), (recompute,))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Its TP groups and their samples; none with a sequence layout."""
        return self.parallelism.replicas

    @property
    def sequence(self) -> SequenceParallel | None:
        """Its sequence layout, if it has one."""
        return self.parallelism if isinstance(self.parallelism, SequenceParallel) else None

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of the first executor: all devices, unless there are replicas."""
        return self.parallelism.executors[0]

    @property
    def ends(self) -> tuple[Ends, ...]:
        """What works in turns of its own: the devices of each replica, or the sequence layout."""
        return self.parallelism.ends

    @property
    def executors(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each of `ends`."""
        return self.parallelism.executors

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The devices that hold each copy of the stage's parameters: those of a replica, or each of a sequence layout
        alone."""
        return self.parallelism.parameter_copies

    @property
    def tp(self) -> int:
        """Devices of the first executor: the tensor-parallel degree, unless there is a sequence layout."""
        return len(self.devices)

    @property
    def num_layers(self) -> int:
        """Layers that the stage holds."""
        return sum(end - first for first, end in self.layers)

    @property
    def policy(self) -> str:
        """The recompute policy of a stage that has one for all layers."""
        return self.recompute[0]

    @property
    def is_plain(self) -> bool:
        """Whether the stage is one TP group with one range of layers, and one recompute policy or one a layer."""
        whole = isinstance(self.parallelism, TensorParallel) and len(self.layers) == 1
        return whole and len(self.recompute) in (1, self.num_layers)

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """Sequences of a micro-batch that come to each executor, in order."""
        return self.parallelism.samples(micro_batch_size)

    def policies(self) -> tuple[tuple[str, ...], ...]:
        """The recompute policy of every layer, range by range."""
        each = self.recompute * self.num_layers if len(self.recompute) == 1 else self.recompute
        found, at = [], 0
        for first, end in self.layers:
            found.append(each[at : at + end - first])
            at += end - first
        return tuple(found)

    def all_devices(self) -> tuple[int, ...]:
        """Every device of the stage."""
        return tuple(d for devices in self.executors for d in devices)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and the pipeline's own share of the batch."""

    stages: tuple[Stage, ...]
    num_micro_batches: int
    micro_batch_size: int = 1

    @property
    def num_sequences(self) -> int:
        """Sequences of the global batch that this pipeline processes."""
        return self.num_micro_batches * self.micro_batch_size

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage: more than one where the pipeline is interleaved."""
        return len(self.stages[0].layers)

    @property
    def is_chain(self) -> bool:
        """Whether every stage is one replica, or one sequence layout, that holds one range of layers."""
        return all(len(stage.executors) == 1 == len(stage.layers) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Sharding:
    """ZeRO stage 0 to 3, over all holders, those of a machine, or stated groups of devices.

    From ZeRO-2 on, pipelines must be aligned; see `misaligned`.
    """

    stage: int = 0
    groups: str | tuple[tuple[int, ...], ...] = "all"


@dataclass(frozen=True, slots=True)
class Plan:
    """Pipelines, and what is chosen once for all of them. Raises InputError for a schedule that is only a name."""

    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = ONE_F_ONE_B
    sharding: Sharding = field(default_factory=Sharding)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise InputError(
                f"plan: schedule: {quoted(self.schedule)} is not a schedule; give one of hexiopt.schedules.registry"
            )

    def devices(self) -> tuple[int, ...]:
        """All devices used, in the order of the plan."""
        return tuple(d for p in self.pipelines for s in p.stages for d in s.all_devices())


def irregular(pipeline: Pipeline, schedule: Schedule) -> tuple[str, str] | None:
    """The first rule on replicas, layer ranges and policies that `pipeline` breaks: a word, and what is wrong."""
    ranges = pipeline.num_chunks
    for s, stage in enumerate(pipeline.stages):
        size = pipeline.micro_batch_size
        if isinstance(stage.parallelism, SequenceParallel) and len(stage.layers) > 1:
            said = f"stage {s} has a sequence layout and {len(stage.layers)} layer ranges"
            return "sequence", f"{said}; give it one range, or interleave stages without"
        given = stage.samples(size)
        if given and (sum(given) != size or min(given) < 1):
            split = " + ".join(map(str, given))
            return "replicas", f"stage {s} splits micro-batches of {size} into {split}; give each replica at least 1"
        if len(stage.layers) != ranges:
            return "layers", f"stage {s} has {len(stage.layers)} layer ranges, stage 0 has {ranges}; give all as many"
        if len(stage.recompute) not in (1, stage.num_layers):
            said = f"{len(stage.recompute)} recompute policies for {stage.num_layers} layers"
            return "recompute", f"stage {s} has {said}; state one, or one a layer"
    return schedule.broken_rule(len(pipeline.stages), ranges, pipeline.num_micro_batches)


def misaligned(plan: Plan, name: Callable[[int], str] = str) -> str | None:
    """The first rule on sharding that `plan` breaks, in words, devices by `name`; None if none.

    Stated groups divide the devices. ZeRO-2 and 3 gather and scatter layer by layer in every micro-batch, so that
    all holders of a layer must hold the same layers and take their turns together.
    """
    zero, groups = plan.sharding.stage, plan.sharding.groups
    if not isinstance(groups, str):
        listed = Counter(device for group in groups for device in group)
        for device in plan.devices():
            if listed[device] != 1:
                return f"device {name(device)} is in {listed[device]} sharding groups; put it into exactly one"
    elif groups not in ("all", "machine"):
        return f"sharding groups are {groups!r}; choose all, machine or lists of devices"
    if zero < 2:
        return None
    if not plan.schedule.lockstep:
        return f"ZeRO-{zero} under the {plan.schedule} schedule; take 1f1b or gpipe"
    if len({len(pipeline.stages) for pipeline in plan.pipelines}) > 1:
        return f"ZeRO-{zero} over pipelines of unequally many stages; give all as many"
    if len({pipeline.num_micro_batches for pipeline in plan.pipelines}) > 1:
        return f"ZeRO-{zero} over pipelines of unequally many micro-batches; give all as many"
    for s, stages in enumerate(zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True)):
        if len({stage.layers for stage in stages}) > 1:
            return f"ZeRO-{zero} over pipelines with unequal layers in stage {s}; give all the same"
        # Each device of a sequence layout holds whole layers, as with TP 1.
        if len({len(devices) for stage in stages for devices in stage.copies}) > 1:
            return f"ZeRO-{zero} over pipelines with unequal TP degrees in stage {s}; give all the same"
    return None


def unpriced(plan: Plan) -> str | None:
    """What in `plan` the format allows but the cost model does not price yet, in words; None if nothing."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if any(replica.heads is not None for replica in stage.replicas):
                return "stated heads"
    return None
