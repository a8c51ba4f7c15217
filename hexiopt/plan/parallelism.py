"""How the devices of a stage work together: a closed union, whose types answer the same questions.

Where the types differ in kind, each concern (files, checks, costs, layouts of processes, reports) has one `match`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Union

from hexiopt.checks import whole_in, word_in
from hexiopt.errors import FieldError, InputError, quoted

Devices = tuple[int, ...]
ORDERS = ("contiguous", "zigzag")  # of the shards of a sequence layout
MAX_COUNT = 10**7  # of micro-batches, and of sequences in one


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
            fault = f"{what} has device {quoted(device)}"
            raise InputError(f"{fault}; state devices by their numbers in the cluster, from 0 on")
    if owner.heads is not None:
        check_numbers(owner, what, "heads")


def check_numbers(owner: "TensorParallel | Replica | SequenceGroup", what: str, name: str) -> None:
    """Refuse, by InputError, a field `name` that does not list a whole number from 1 for every device."""
    if type(getattr(owner, name)) is not tuple:
        make_tuple(owner, name)
    numbers = getattr(owner, name)
    if len(numbers) != len(owner.devices):
        fault = f"{what} has {len(owner.devices)} devices and {name} {quoted(numbers)}"
        raise InputError(f"{fault}; state one number for every device")
    if any(type(number) is not int or number < 1 for number in numbers):
        raise InputError(f"{what} has {name} {quoted(numbers)}; give every device at least 1, or leave it out")


@dataclass(frozen=True, slots=True)
class Replica:
    """The devices that hold one copy of a replicated stage by tensor parallelism.

    `samples` of each micro-batch come to this replica (None: all, for a TP group alone); `heads` per device where
    uneven. Raises InputError where a number is not from its range.
    """

    devices: Devices
    samples: int | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_devices(self, "a replica of the stage")
        if self.samples is not None and (type(self.samples) is not int or not 1 <= self.samples <= MAX_COUNT):
            samples = whole_in(self.samples, "a replica of the stage: samples", at_least=1, at_most=MAX_COUNT)
            object.__setattr__(self, "samples", samples)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One TP group, to which all samples come; `heads` per device where uneven. Raises as `Replica`.

    Devices that share the experts of a layer may be several replicas of everything else, each of `degree` devices in
    a row, which divide the samples evenly and exchange copies of tokens. None: one replica of all devices, or where
    there are experts what is fastest, which a price decides and states.
    """

    devices: Devices
    heads: tuple[int, ...] | None = None
    degree: int | None = None
    num_samples: ClassVar[int | None] = None  # sequences of a micro-batch that the stage takes; None: all

    def __post_init__(self) -> None:
        check_devices(self, "the stage")
        if self.degree is None:
            return
        if type(self.degree) is not int or self.degree < 1 or len(self.devices) % self.degree:
            fault = f"the stage has {len(self.devices)} devices and degree {quoted(self.degree)}"
            raise InputError(f"{fault}; give each replica equally many devices")
        if self.heads is not None:
            raise InputError("the stage states heads and degree; leave out one")

    @property
    def num_replicas(self) -> int:
        """Replicas that share experts; 1 where none are stated."""
        return 1 if self.degree is None else len(self.devices) // self.degree

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The group as a replica of all samples."""
        return (Replica(self.devices, None, self.heads),)

    @property
    def executors(self) -> tuple[Devices, ...]:
        """The groups of devices that each run the operations of the stage as one."""
        return (self.devices,)

    @property
    def token_layouts(self) -> tuple["TokenLayout", ...]:
        """Who shares the tokens of a message at the boundary of the stage, per executor."""
        return (self.devices,)

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """The devices that hold each copy of the stage's parameters, experts aside."""
        if self.degree is None:
            return (self.devices,)
        return tuple([self.devices[at : at + self.degree] for at in range(0, len(self.devices), self.degree)])

    @property
    def degrees(self) -> str:
        """The TP degree, or the sizes of groups, as tables show them."""
        return str(len(self.devices)) if self.num_replicas == 1 else f"{self.num_replicas}×{self.degree}"

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
            raise FieldError("the stage: replicas", [], "is empty; name at least one replica")
        for r, replica in enumerate(self.replicas):
            if not isinstance(replica, Replica):
                raise InputError(f"replica {r} of the stage is {quoted(replica)}; give Replica(devices, samples)")
            if replica.samples is None:
                raise InputError(f"replica {r} of the stage has no samples; state them for each")

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

    @property
    def degrees(self) -> str:
        """As of `TensorParallel`: one a replica."""
        return "+".join([str(len(devices)) for devices in self.executors])

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
        check_numbers(self, "a group of the sequence layout", "tokens")


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
            word_in(self.order, "the sequence layout: order", ORDERS)
        if not self.groups:
            raise FieldError("the sequence layout: groups", [], "is empty; name at least one group")
        for g, group in enumerate(self.groups):
            if not isinstance(group, SequenceGroup):
                fault = f"group {g} of the sequence layout is {quoted(group)}"
                raise InputError(f"{fault}; give SequenceGroup(devices, tokens, heads)")

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

    @property
    def degrees(self) -> str:
        """As of `TensorParallel`: the groups, alike ones together."""
        sizes = Counter(len(group.devices) for group in self.groups)
        return "seq " + "+".join(f"{number}×{size}" if number > 1 else f"{size}" for size, number in sizes.items())

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """As of `TensorParallel`: all."""
        return (micro_batch_size,)


StageParallelism = TensorParallel | Replicated | SequenceParallel

# Who shares the tokens of a micro-batch at the boundary of a stage: a TP group in equal parts, or a layout as it says.
TokenLayout = Union[Devices, SequenceParallel]  # noqa: UP007
