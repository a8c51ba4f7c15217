"""Every assignment of a few devices to pipelines of stages of replicas, one representative for equal devices.

Devices of a machine are equal if they share a network interface and have equal links to all other devices. They form a
*device class*, and an assignment says how many devices of which class go where. Adjacent machines of the cluster are
equal if their kind, usable devices and outside network are; assignments that differ only by exchanging equal machines
count once. Exchanging equal devices leaves every device and link with the same role in a plan, with one exception: a
ring of gradient sync visits its devices in the order of their numbers, so that with three or more holders it may matter
which of them is which (`labelings`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product

from hexiopt.problem.problem import Problem

ClassGroup = tuple[int, ...]  # the device classes of a TP group's devices, rank by rank
PipelinePlacement = tuple[tuple[ClassGroup, ...], ...]  # a pipeline: per stage its replicas
DeviceAssignment = tuple[PipelinePlacement, ...]
PlacedDevices = tuple[tuple[tuple[int, ...], ...], ...]  # a placement's devices: per stage, per replica, by rank


@dataclass(frozen=True)
class DeviceClasses:
    """Classes of equal devices: `devices[k]` of class k, in machine `machine_of[k]`; `runs` of equal machines,
    ascending.
    """

    problem: Problem
    devices: tuple[tuple[int, ...], ...]
    machine_of: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> "DeviceClasses":
        """The device classes of the usable devices of a problem."""
        device_classes, machines = [], []
        for machine, devices in problem.usable_by_machine.items():
            machine_classes: list[list[int]] = []
            for device in devices:
                same = next(
                    (
                        device_class
                        for device_class in machine_classes
                        if _equal_devices(problem, device_class[0], device)
                    ),
                    None,
                )
                if same is None:
                    machine_classes.append([device])
                else:
                    same.append(device)
            device_classes += [tuple(device_class) for device_class in machine_classes]
            machines += [machine] * len(machine_classes)
        return cls(problem, tuple(device_classes), tuple(machines), _runs(problem))

    @cached_property
    def of_machine(self) -> dict[int, tuple[int, ...]]:
        """The device classes of each machine."""
        return {
            m: tuple(k for k, machine in enumerate(self.machine_of) if machine == m)
            for m in dict.fromkeys(self.machine_of)
        }

    @cached_property
    def exchanges(self) -> tuple[tuple[int, ...], ...]:
        """For every exchange of equal machines, the device class that takes the place of each class."""
        replacements = []
        for orders in product(*map(permutations, self.runs)):
            to = {m: n for run, order in zip(self.runs, orders, strict=True) for m, n in zip(run, order, strict=True)}
            device_classes = [
                self.of_machine[to[m]][self.of_machine[m].index(k)] for k, m in enumerate(self.machine_of)
            ]
            replacements.append(tuple(device_classes))
        return tuple(replacements)

    def labelings(self, assignment: DeviceAssignment) -> Iterator[tuple[PlacedDevices, ...]]:
        """The assignment with concrete devices, in every labeling of equal ones; first the lowest numbers in order of
        use.
        """
        used = [sum(line_seats.count(k) for line_seats in map(_flat, assignment)) for k in range(len(self.devices))]
        choices = [permutations(devices, count) for devices, count in zip(self.devices, used, strict=True)]
        for chosen in product(*choices):
            left = [iter(order) for order in chosen]
            yield tuple(
                tuple(tuple(tuple(next(left[k]) for k in group) for group in stage) for stage in placement)
                for placement in assignment
            )

    def first_labeling(self, assignment: DeviceAssignment) -> tuple[PlacedDevices, ...]:
        """The assignment with the lowest-numbered devices of each class, in order of use."""
        return next(self.labelings(assignment))

    def assignments(self) -> Iterator[DeviceAssignment]:
        """All assignments of at least one device that obey the TP degrees and the constraints of the plan space."""
        space, workload = self.problem.space, self.problem.workload
        most = min(len(self.problem.usable_devices), workload.global_batch, space.num_pipelines or 1 << 30)
        seen: set[DeviceAssignment] = set()
        for assignment in self._pipelines(tuple(map(len, self.devices)), most, ()):
            if space.num_pipelines in (None, len(assignment)):
                same = self.canonical(assignment)
                if same not in seen:
                    seen.add(same)
                    yield assignment

    def canonical(self, assignment: DeviceAssignment) -> DeviceAssignment:
        """The smallest of all assignments that differ only in the order of pipelines and in equal machines."""
        return min(tuple(sorted(exchange_classes(placement, to) for placement in assignment)) for to in self.exchanges)

    def _pipelines(self, free: tuple[int, ...], most: int, least: tuple[object, ...]) -> Iterator[DeviceAssignment]:
        """From one pipeline to `most`, from `free` devices per class, in ascending order of their shapes."""
        for placement, left in self._stages(free, self._most_stages):
            if self.problem.space.num_stages not in (None, len(placement)):
                continue
            shape = self._shape(placement)
            if shape >= least:
                yield (placement,)
                if most > 1:
                    for others in self._pipelines(left, most - 1, shape):
                        yield (placement, *others)

    @cached_property
    def _most_stages(self) -> int:
        return self.problem.space.num_stages or self.problem.model.num_layers

    @cached_property
    def _most_replicas(self) -> int:
        return self.problem.space.micro_batch_sizes(self.problem.workload.global_batch)[-1] if self._replicas else 1

    @property
    def _replicas(self) -> bool:
        return self.problem.space.replicas

    def _stages(self, free: tuple[int, ...], most: int) -> Iterator[tuple[PipelinePlacement, tuple[int, ...]]]:
        """From one stage to `most`, and the devices left free."""
        for stage, left in self._slots(free, self._most_replicas):
            yield (stage,), left
            if most > 1:
                for others, rest in self._stages(left, most - 1):
                    yield (stage, *others), rest

    def _slots(self, free: tuple[int, ...], most: int) -> Iterator[tuple[tuple[ClassGroup, ...], tuple[int, ...]]]:
        """From one TP group to `most`, in order, and the devices left free."""
        for group in self._groups(free):
            left = tuple(count - group.count(k) for k, count in enumerate(free))
            yield (group,), left
            if most > 1:
                for others, rest in self._slots(left, most - 1):
                    yield (group, *others), rest

    def _groups(self, free: tuple[int, ...]) -> Iterator[ClassGroup]:
        """TP groups of free devices; among equal unused machines only in the first."""
        for machine, device_classes in self.of_machine.items():
            if self._waits(machine, free):
                continue
            for degree in self.problem.space.allowed_tp(self.problem.cluster.machines[machine].num_gpus):
                for group in product(device_classes, repeat=degree):
                    if all(group.count(k) <= free[k] for k in device_classes):
                        yield group

    def _waits(self, machine: int, free: tuple[int, ...]) -> bool:
        """Whether this machine and an equal one before it are both unused."""
        run = next(run for run in self.runs if machine in run)
        place = run.index(machine)
        return place > 0 and self._is_free(run[place - 1], free) and self._is_free(machine, free)

    def _is_free(self, machine: int, free: tuple[int, ...]) -> bool:
        return all(free[k] == len(self.devices[k]) for k in self.of_machine[machine])

    def _shape(self, placement: PipelinePlacement) -> tuple[object, ...]:
        """The placement with equal machines identified."""
        return exchange_classes(placement, self._looks)

    @cached_property
    def _looks(self) -> tuple[int, ...]:
        """For each device class, the corresponding class in the first of the equal machines."""
        first = {m: run[0] for run in self.runs for m in run}
        return tuple(self.of_machine[first[m]][self.of_machine[m].index(k)] for k, m in enumerate(self.machine_of))


def exchange_classes(placement: PipelinePlacement, to: Sequence[int]) -> PipelinePlacement:
    """The placement with class `to[k]` in place of class k."""
    return tuple(tuple(tuple(to[k] for k in group) for group in stage) for stage in placement)


def _flat(placement: PipelinePlacement) -> list[int]:
    return [k for stage in placement for group in stage for k in group]


def _equal_devices(problem: Problem, a: int, b: int) -> bool:
    """Whether two devices of a machine are interchangeable."""
    network = problem.cluster.network
    if problem.cluster.type_of[a] != problem.cluster.type_of[b]:
        return False
    if network.transmit_interface(a) != network.transmit_interface(b):
        return False
    machine = int(problem.cluster.machine_of[a])
    others = [d for d in problem.usable_by_machine[machine] if d not in (a, b)]
    return all(
        (network.pair_bandwidth(a, d), network.pair_latency(a, d))
        == (network.pair_bandwidth(b, d), network.pair_latency(b, d))
        for d in others
    )


def _runs(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Runs of adjacent interchangeable machines."""
    runs: list[list[int]] = []
    for machine in problem.usable_by_machine:
        if runs and all(_equal_machines(problem, other, machine) for other in runs[-1]):
            runs[-1].append(machine)
        else:
            runs.append([machine])
    return tuple(map(tuple, runs))


def _equal_machines(problem: Problem, a: int, b: int) -> bool:
    """Whether two machines are interchangeable: equal in themselves, directly connected, and with equal routes to all
    others.
    """
    cluster, network, usable = problem.cluster, problem.cluster.network, problem.usable_by_machine
    index = cluster.index_in_machine
    ours, theirs = usable[a], usable[b]
    if cluster.machines[a].kind != cluster.machines[b].kind or [*index[list(ours)]] != [*index[list(theirs)]]:
        return False
    pairs = list(zip(ours, theirs, strict=True))
    between = list(product(ours, theirs))
    if any(len(network.route(x, y)) > 2 or len(network.route(y, x)) > 2 for x, y in between):
        return False
    if len({network.pair_latency(*way) for x, y in between for way in ((x, y), (y, x))}) > 1:
        return False
    others = [d for m, devices in usable.items() if m not in (a, b) for d in devices]
    return all(
        network.route(x, d)[1:] == network.route(y, d)[1:]
        and network.route(d, x)[:-1] == network.route(d, y)[:-1]
        and network.pair_latency(x, d) == network.pair_latency(y, d)
        and network.pair_latency(d, x) == network.pair_latency(d, y)
        for x, y in pairs
        for d in others
    )
