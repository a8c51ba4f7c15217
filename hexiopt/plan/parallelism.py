"""How the devices of a stage work together: a closed union, whose types answer the same questions.

Where the types differ in kind, each concern (files, checks, costs, layouts of processes, reports) has one `match`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


def check_devices(owner: "TensorParallel | Replica | SequenceGroup | ExpertReplica", what: str) -> None:
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


def check_numbers(
    owner: "TensorParallel | Replica | SequenceGroup | ExpertReplica", what: str, name: str, at_least: int = 1
) -> None:
    """Refuse, by InputError, a field `name` that does not list a whole number from `at_least` for every device."""
    if type(getattr(owner, name)) is not tuple:
        make_tuple(owner, name)
    numbers = getattr(owner, name)
    if len(numbers) != len(owner.devices):
        fault = f"{what} has {len(owner.devices)} devices and {name} {quoted(numbers)}"
        raise InputError(f"{fault}; state one number for every device")
    if any(type(number) is not int or not at_least <= number <= MAX_COUNT for number in numbers):
        raise InputError(f"{what} has {name} {quoted(numbers)}; give every device at least {at_least}, or leave it out")


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
    def shares(self) -> tuple[int, ...]:
        """Samples of a micro-batch that come to each replica."""
        return self.samples(self.num_samples)

    def with_shares(self, samples: Sequence[int]) -> "Replicated":
        """The same replicas with other samples [replicas]."""
        return Replicated(tuple([replace(r, samples=n) for r, n in zip(self.replicas, samples, strict=True)]))

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


@dataclass(frozen=True, slots=True)
class ExpertReplica:
    """Devices of a stage that shares its experts: tensor parallel for all but experts, of which each holds so many
    whole ones. To devices that hold experts alone come no `samples`.

    Raises InputError where a number is not from its range, or where devices have neither samples nor experts.
    """

    devices: Devices
    samples: int
    experts: tuple[int, ...]
    heads: ClassVar[None] = None

    def __post_init__(self) -> None:
        what = "a replica of the stage"
        check_devices(self, what)
        if type(self.samples) is not int or not 0 <= self.samples <= MAX_COUNT:
            samples = whole_in(self.samples, f"{what}: samples", at_least=0, at_most=MAX_COUNT)
            object.__setattr__(self, "samples", samples)
        check_numbers(self, what, "experts", at_least=0 if self.samples else 1)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Replicas that share the samples of each micro-batch, and the experts of each layer: the first device has the
    first experts. Replicas stand in any machines, and may be of several GPU types.

    They exchange copies of tokens in every layer with experts, so that all take their turns together. With two
    `waves`, halves of each micro-batch alternate in these layers. Raises InputError where no replica has samples, or no
    device experts, and where waves do not divide the samples of a replica.
    """

    members: tuple[ExpertReplica, ...]
    waves: int = 1

    def __post_init__(self) -> None:
        if type(self.members) is not tuple:
            make_tuple(self, "members")
        for r, member in enumerate(self.members):
            if not isinstance(member, ExpertReplica):
                raise InputError(
                    f"replica {r} of the stage is {quoted(member)}; give ExpertReplica(devices, samples, experts)"
                )
        if not self.num_samples:
            raise InputError("no replica of the stage has samples; give some to at least one")
        if not self.num_experts:
            raise InputError("no device of the stage has experts; give every expert to one")
        if type(self.waves) is not int or self.waves not in (1, 2):
            object.__setattr__(self, "waves", whole_in(self.waves, "the stage: waves", at_least=1, at_most=2))
        if any(samples % self.waves for samples in self.shares):
            what = f"the stage has {self.waves} waves and replicas of {' + '.join(map(str, self.shares))} samples"
            raise InputError(f"{what}; give all replicas even numbers")

    @property
    def devices(self) -> Devices:
        """The devices of all replicas, in order."""
        return tuple(d for member in self.members for d in member.devices)

    @property
    def experts(self) -> tuple[int, ...]:
        """Whole experts of each of `devices`."""
        return tuple(n for member in self.members for n in member.experts)

    @property
    def num_experts(self) -> int:
        """Experts of a layer, of all devices."""
        return sum(self.experts)

    @property
    def num_samples(self) -> int:
        """As of `Replicated`."""
        return sum(self.shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """As of `Replicated`, of all members."""
        return tuple([member.samples for member in self.members])

    def with_shares(self, samples: Sequence[int]) -> "ExpertParallel":
        """As of `Replicated`, of all members."""
        members = [replace(member, samples=n) for member, n in zip(self.members, samples, strict=True)]
        return ExpertParallel(tuple(members), self.waves)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """As of `Replicated`: those with samples."""
        return tuple(Replica(member.devices, member.samples) for member in self.members if member.samples)

    @property
    def executors(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: all devices together."""
        return (self.devices,)

    @property
    def token_layouts(self) -> tuple["TokenLayout", ...]:
        """As of `TensorParallel`: by samples, and in each replica in equal parts."""
        return (self,)

    @property
    def parameter_copies(self) -> tuple[Devices, ...]:
        """As of `TensorParallel`: the replicas, and devices that hold experts alone, of which each is by itself."""
        return tuple(
            devices
            for member in self.members
            for devices in ((member.devices,) if member.samples else tuple((d,) for d in member.devices))
        )

    @property
    def experts_of_copies(self) -> tuple[int, ...]:
        """The most whole experts of a device, of each of `parameter_copies`."""
        return tuple(
            n for member in self.members for n in ((max(member.experts),) if member.samples else member.experts)
        )

    @property
    def samples_of_copies(self) -> tuple[int, ...]:
        """The samples of each of `parameter_copies`: 0 of devices that hold experts alone."""
        return tuple(
            member.samples for member in self.members for _ in (member.devices if not member.samples else (0,))
        )

    @property
    def degrees(self) -> str:
        """As of `TensorParallel`: the experts of each device, alike ones together, replica by replica."""
        return ("ep " if self.waves == 1 else f"ep {self.waves} waves ") + " ".join(
            "+".join(f"{number}×{n}" if number > 1 else f"{n}" for n, number in Counter(member.experts).items())
            for member in self.members
        )

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """As of `TensorParallel`: all."""
        return (micro_batch_size,)


StageParallelism = TensorParallel | Replicated | SequenceParallel | ExpertParallel

# Who shares the tokens of a micro-batch at the boundary of a stage: a TP group in equal parts, or a layout as it says.
TokenLayout = Union[Devices, SequenceParallel, ExpertParallel]  # noqa: UP007
