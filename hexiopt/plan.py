"""A plan: pipelines of stages of replicas over devices. It holds choices, no costs.

Devices are the cluster's integers; names appear in files only (`plan_file.py`).
"""

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on the devices of one replica or several.

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
    def tp(self) -> int:
        """Tensor-parallel degree of the first replica."""
        return len(self.replicas[0].devices)

    @property
    def num_layers(self) -> int:
        """Layers that the stage holds."""
        return sum(end - first for first, end in self.layers)

    @property
    def policy(self) -> str:
        """The recompute policy of a plain stage."""
        return self.recompute[0]

    def all_devices(self) -> tuple[int, ...]:
        """Every device of the stage."""
        if self.sequence is not None:
            return tuple(d for group in self.sequence.groups for d in group.devices)
        return tuple(d for replica in self.replicas for d in replica.devices)


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


@dataclass(frozen=True, slots=True)
class Sharding:
    """ZeRO stage 0 to 3, over all holders, those of a machine, or stated groups of devices."""

    stage: int = 0
    groups: str | tuple[tuple[int, ...], ...] = "all"


@dataclass(frozen=True, slots=True)
class Plan:
    """Pipelines, and what is chosen once for all of them."""

    pipelines: tuple[Pipeline, ...]
    schedule: str = "1f1b"
    sharding: Sharding = field(default_factory=Sharding)

    def devices(self) -> tuple[int, ...]:
        """All devices used, in the order of the plan."""
        return tuple(d for p in self.pipelines for s in p.stages for d in s.all_devices())


def unpriced(plan: Plan) -> str | None:
    """What in `plan` the format allows but the cost model does not price yet, in words; None if nothing."""
    if plan.schedule == "interleaved":
        return "the interleaved schedule"
    if plan.sharding.stage > 1:
        return f"sharding stage {plan.sharding.stage}"
    if plan.sharding.groups != "all":
        return "sharding groups other than 'all'"
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if stage.sequence is not None:
                return "a sequence layout"
            if len(stage.replicas) > 1 or stage.replicas[0].samples is not None:
                return "a replicated stage"
            if stage.replicas[0].heads is not None:
                return "stated heads"
            if len(stage.layers) > 1:
                return "a stage of several layer ranges"
            if len(set(stage.recompute)) > 1:
                return "a recompute policy per layer"
    return None
