"""How the devices of a stage work together: a closed union, whose types answer the same questions.

Where they differ in kind (files, checks, costs, layouts of processes, reports), one `match` for each asks which it is.
"""

from dataclasses import dataclass
from typing import ClassVar, Union

from hexiopt.errors import InputError, quoted

Devices = tuple[int, ...]
ORDERS = ("contiguous", "zigzag")  # of the shards of a sequence layout


def make_tuple(owner: object, name: str) -> None:
    """Turn the field `name` of a frozen object into a tuple, so that equal plans are equal and hash alike.

    Raises InputError where it is no list.
    """
    value = getattr(owner, name)
    try:
        object.__setattr__(owner, name, tuple(value))
    except TypeError:
        what = type(owner).__name__
        raise InputError(f"{what}: {name}: {quoted(value)} is not a list; write a tuple of all, even of one") from None


def check_devices(owner: "TensorParallel | Replica | SequenceGroup", what: str) -> None:
    """Refuse, by InputError, what has no device, and devices that are no numbers from 0 on."""
    if type(owner.devices) is not tuple:
        make_tuple(owner, "devices")
    if not owner.devices:
        raise InputError(f"{what} has no device; name at least one")
    for device in owner.devices:
        if type(device) is not int or device < 0:
            said = f"{what} has device {quoted(device)}"
            raise InputError(f"{said}; state devices by their numbers in the cluster, from 0 on")


@dataclass(frozen=True, slots=True)
class Replica:
    """The devices that hold one copy of a replicated stage by tensor parallelism.

    `samples` of each micro-batch come to this replica (None: all, for a TP group alone); `heads` per device where
    uneven. Raises InputError without a device.
    """

    devices: Devices
    samples: int | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_devices(self, "a replica of the stage")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One TP group, to which all samples come; `heads` per device where uneven. Raises InputError without a device."""

    devices: Devices
    heads: tuple[int, ...] | None = None
    num_samples: ClassVar[int | None] = None  # sequences of a micro-batch that the stage takes; None: all

    def __post_init__(self) -> None:
        check_devices(self, "the stage")

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The group as a replica of all samples."""
        return (Replica(self.devices, None, self.heads),)

    @property
    def executors(self) -> tuple[Devices, ...]:
        """What works in turns of its own."""
        return (self.devices,)

    @property
    def token_layouts(self) -> tuple["TokenLayout", ...]:
        """Who shares the tokens of a message at the boundary of the stage, per executor."""
        return (self.devices,)

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """The devices that hold each copy of the stage's parameters."""
        return (self.devices,)

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """Sequences of a micro-batch that come to each executor."""
        return (micro_batch_size,)


@dataclass(frozen=True, slots=True)
class Replicated:
    """Several TP groups that share the samples of each micro-batch, or one that states its samples.

    Raises InputError where there is no replica, or one has no samples.
    """

    replicas: tuple[Replica, ...]

    def __post_init__(self) -> None:
        if type(self.replicas) is not tuple:
            make_tuple(self, "replicas")
        if not self.replicas:
            raise InputError("the stage has no replica; name at least one")
        for r, replica in enumerate(self.replicas):
            if replica.samples is None or replica.samples < 1:
                raise InputError(f"replica {r} of the stage has {replica.samples or 'no'} samples; give it at least 1")

    @property
    def num_samples(self) -> int:
        """Sequences of a micro-batch that the stage takes."""
        return sum([replica.samples or 0 for replica in self.replicas])

    @property
    def executors(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: the replicas."""
        return tuple([replica.devices for replica in self.replicas])

    @property
    def token_layouts(self) -> tuple["TokenLayout", ...]:
        """As of `TensorParallel`."""
        return self.executors

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: the replicas."""
        return self.executors

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """As of `TensorParallel`."""
        return tuple([replica.samples or 0 for replica in self.replicas])


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """One all-to-all group of a sequence layout: per device, its tokens of the sequence and its query heads.

    Raises InputError where a device lacks either.
    """

    devices: Devices
    tokens: tuple[int, ...]
    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        check_devices(self, "a group of the sequence layout")
        if not type(self.tokens) is type(self.heads) is tuple:
            make_tuple(self, "tokens")
            make_tuple(self, "heads")
        devices, tokens, heads = self.devices, self.tokens, self.heads
        if not len(devices) == len(tokens) == len(heads):
            said = f"a group has {len(devices)} devices, {len(tokens)} numbers of tokens and {len(heads)} of heads"
            raise InputError(f"{said}; state one of each for every device")
        if min(tokens) < 1 or min(heads) < 1:
            word, given = ("tokens", tokens) if min(tokens) < 1 else ("heads", heads)
            said = f"a group has {word} {quoted(list(given))}"
            raise InputError(f"{said}; give every device at least 1, or leave it out")


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Context and head parallelism of a stage; `order` of the shards is `contiguous` or `zigzag`.

    Raises InputError for another order and where there is no group. Whether tokens and heads are those of the problem,
    `token_layout.misfit` says.
    """

    groups: tuple[SequenceGroup, ...]
    order: str = "contiguous"
    num_samples: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if type(self.groups) is not tuple:
            make_tuple(self, "groups")
        if self.order not in ORDERS:
            raise InputError(f"the sequence layout has order {quoted(self.order)}; choose {' or '.join(ORDERS)}")
        if not self.groups:
            raise InputError("the sequence layout has no group; name at least one")

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
    def token_layouts(self) -> tuple["TokenLayout", ...]:
        """As of `TensorParallel`: the layout itself."""
        return (self,)

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: each device alone."""
        return tuple((d,) for d in self.devices)

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """As of `TensorParallel`: all."""
        return (micro_batch_size,)


StageParallelism = TensorParallel | Replicated | SequenceParallel

# Who shares the tokens of a micro-batch at the boundary of a stage: a TP group in equal parts, or a layout as it says.
TokenLayout = Union[Devices, SequenceParallel]  # noqa: UP007
