"""A plan: pipelines of stages of replicas over devices. It holds choices, no costs.

Devices are the cluster's integers; names appear in files only (`plan_file.py`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hexiopt.errors import InputError, shown
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Replica:
    """The devices that hold one copy of a stage by tensor parallelism.

    `samples` of each micro-batch come to this replica (None: all); `heads` per device where uneven.
    """

    devices: tuple[int, ...]
    samples: int | None = None
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """One all-to-all group of a sequence layout: per device, its tokens of the sequence and its query heads."""

    devices: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Context and head parallelism of a stage; `order` of the shards is `contiguous` or `zigzag`."""

    groups: tuple[SequenceGroup, ...]
    order: str = "contiguous"

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of all groups, in order."""
        return tuple(d for group in self.groups for d in group.devices)


# What shares the tokens of a micro-batch at the boundary of a stage: a TP group in equal parts, or a layout as it says.
Ends = tuple[int, ...] | SequenceLayout


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on the devices of one replica or several, or of a sequence layout and no replica.

    `layers` are half-open ranges, one unless interleaved; `recompute` is one policy, or one per layer.
    """

    replicas: tuple[Replica, ...]
    layers: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...] = ("none",)
    sequence: SequenceLayout | None = None

    @classmethod
    def of(cls, devices: tuple[int, ...], first: int, end: int, recompute: str = "none") -> "Stage":
        """The plain stage: layers [first, end) by tensor parallelism over `devices`."""
        return cls((Replica(devices),), ((first, end),), (recompute,))

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of the first replica: all devices, in a plain stage."""
        return self.replicas[0].devices

    @property
    def ends(self) -> tuple[Ends, ...]:
        """What works in turns of its own: the devices of each replica, or the sequence layout."""
        if self.sequence is not None:
            return (self.sequence,)
        return tuple(replica.devices for replica in self.replicas)

    @property
    def executors(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each of `ends`."""
        if self.sequence is not None:
            return (self.sequence.devices,)
        return tuple(replica.devices for replica in self.replicas)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The devices that hold each copy of the stage's parameters: those of a replica, or each of a sequence layout
        alone."""
        if self.sequence is not None:
            return tuple((d,) for d in self.sequence.devices)
        return tuple(replica.devices for replica in self.replicas)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree of the first replica."""
        return len(self.replicas[0].devices)

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
        """Whether the stage is one replica that holds one range of layers, with one recompute policy or one a layer."""
        whole = len(self.replicas) == 1 == len(self.layers) and self.replicas[0].samples is None
        return whole and len(self.recompute) in (1, self.num_layers)

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """Sequences of a micro-batch that come to each replica, in order; all, to a sequence layout."""
        if self.sequence is not None:
            return (micro_batch_size,)
        return tuple(micro_batch_size if r.samples is None else r.samples for r in self.replicas)

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
                f"plan: schedule: {shown(self.schedule)} is not a schedule; give one of hexiopt.schedules.registry"
            )

    def devices(self) -> tuple[int, ...]:
        """All devices used, in the order of the plan."""
        return tuple(d for p in self.pipelines for s in p.stages for d in s.all_devices())


def irregular(pipeline: Pipeline, schedule: Schedule) -> tuple[str, str] | None:
    """The first rule on replicas, layer ranges and policies that `pipeline` breaks: a word, and what is wrong."""
    ranges = pipeline.num_chunks
    for s, stage in enumerate(pipeline.stages):
        size, stated = pipeline.micro_batch_size, [replica.samples for replica in stage.replicas]
        if stage.sequence is not None and stage.replicas:
            return "sequence", f"stage {s} has replicas and a sequence layout; give it one of them"
        if stage.sequence is not None and len(stage.layers) > 1:
            said = f"stage {s} has a sequence layout and {len(stage.layers)} layer ranges"
            return "sequence", f"{said}; give it one range, or interleave stages without"
        if None in stated and len(stated) > 1:
            return "replicas", f"stage {s} has a replica without samples; state them for each"
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
