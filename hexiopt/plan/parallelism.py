"""How the devices of a stage work together: a closed union, whose types answer the same questions.

Where they differ in kind (files, checks, costs, layouts of processes, reports), one `match` for each asks which it is.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Union

from hexiopt.errors import InputError

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """The devices that hold one copy of a replicated stage by tensor parallelism.

    `samples` of each micro-batch come to this replica (None: all, for a TP group alone); `heads` per device where
    uneven.
    """

    devices: Devices
    samples: int | None = None
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One TP group, to which all samples come; `heads` per device where uneven."""

    devices: Devices
    heads: tuple[int, ...] | None = None

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The group as a replica of all samples."""
        return (Replica(self.devices, None, self.heads),)

    @property
    def executors(self) -> tuple[Devices, ...]:
        """What works in turns of its own."""
        return (self.devices,)

    @property
    def ends(self) -> tuple["Ends", ...]:
        """Who shares the tokens of a message, per executor."""
        return (self.devices,)

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """The devices that hold each copy of the stage's parameters."""
        return (self.devices,)

    @property
    def degrees(self) -> str:
        """The TP degree, or the sizes of groups, as tables show them."""
        return str(len(self.devices))

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """Sequences of a micro-batch that come to each executor."""
        return (micro_batch_size,)


@dataclass(frozen=True, slots=True)
class Replicated:
    """Several TP groups that share the samples of each micro-batch, or one that states its samples.

    Raises InputError where there is no replica, or one states no samples.
    """

    replicas: tuple[Replica, ...]

    def __post_init__(self) -> None:
        if not self.replicas:
            raise InputError("plan: stage: replicas is empty; name at least one replica")
        for replica in self.replicas:
            if replica.samples is None:
                raise InputError("plan: stage: a replica has no samples; state them for each")

    @property
    def executors(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: the replicas."""
        return tuple([replica.devices for replica in self.replicas])

    @property
    def ends(self) -> tuple["Ends", ...]:
        """As of `TensorParallel`."""
        return self.executors

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: the replicas."""
        return self.executors

    @property
    def degrees(self) -> str:
        """As of `TensorParallel`: one a replica."""
        return "+".join([str(len(devices)) for devices in self.executors])

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """As of `TensorParallel`."""
        return tuple([replica.samples or 0 for replica in self.replicas])


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """One all-to-all group of a sequence layout: per device, its tokens of the sequence and its query heads."""

    devices: Devices
    tokens: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Context and head parallelism of a stage; `order` of the shards is `contiguous` or `zigzag`."""

    groups: tuple[SequenceGroup, ...]
    order: str = "contiguous"

    @property
    def devices(self) -> Devices:
        """The devices of all groups, in order."""
        return tuple(d for group in self.groups for d in group.devices)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """None: no tensor parallelism."""
        return ()

    @property
    def executors(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: all devices together."""
        return (self.devices,)

    @property
    def ends(self) -> tuple["Ends", ...]:
        """As of `TensorParallel`: the layout itself."""
        return (self,)

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: each device alone."""
        return tuple((d,) for d in self.devices)

    @property
    def degrees(self) -> str:
        """As of `TensorParallel`: the groups, alike ones together."""
        sizes = Counter(len(group.devices) for group in self.groups)
        return "seq " + "+".join(f"{number}×{size}" if number > 1 else f"{size}" for size, number in sizes.items())

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """As of `TensorParallel`: all."""
        return (micro_batch_size,)


SequenceLayout = SequenceParallel  # the older name
StageParallelism = TensorParallel | Replicated | SequenceParallel

# Who shares the tokens of a micro-batch at the boundary of a stage: a TP group in equal parts, or a layout as it says.
Ends = Union[Devices, SequenceParallel]  # noqa: UP007


def held_by(replicas: tuple[Replica, ...]) -> TensorParallel | Replicated:
    """The parallelism of a stage that these replicas hold. Raises InputError as `Replicated`."""
    if len(replicas) == 1 and replicas[0].samples is None:
        return TensorParallel(replicas[0].devices, replicas[0].heads)
    return Replicated(replicas)
