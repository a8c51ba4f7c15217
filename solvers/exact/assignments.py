"""Every way to arrange a few devices in pipelines of stages of replicas, once for all names of equal devices.

Devices of a machine are equal where they share a network interface and have equal links to every other device;
they form a *seat*, and an arrangement says how many devices of which seat go where. Machines next to each other in
the cluster are equal where kind, devices to use and network beyond them are; arrangements that differ only in which
of them is which count once. Exchanging equals changes no device's or link's part in a plan but one: a ring of
gradient sync visits its devices in the order of their numbers, so with three holders or more the names may matter
(`labelings`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product

from hexiopt.problem.problem import Problem

ClassGroup = tuple[int, ...]  # the seats of a TP group's devices, rank by rank
PipelinePlacement = tuple[tuple[ClassGroup, ...], ...]  # a pipeline: per stage its replicas
DeviceAssignment = tuple[PipelinePlacement, ...]
PlacedDevices = tuple[tuple[tuple[int, ...], ...], ...]  # a line's devices: per stage, per replica, by rank


@dataclass(frozen=True)
class DeviceClasses:
    """Equal devices: `devices[k]` of seat k, `machine_of[k]` its machine; `runs` of equal machines, ascending."""

    problem: Problem
    devices: tuple[tuple[int, ...], ...]
    machine_of: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> "DeviceClasses":
        """The seats of a problem's usable devices."""
        device_classes, machines = [], []
        for machine, own in problem.usable_by_machine.items():
            found: list[list[int]] = []
            for device in own:
                same = next(
                    (device_class for device_class in found if _equal_devices(problem, device_class[0], device)), None
                )
                if same is None:
                    found.append([device])
                else:
                    same.append(device)
            device_classes += [tuple(device_class) for device_class in found]
            machines += [machine] * len(found)
        return cls(problem, tuple(device_classes), tuple(machines), _runs(problem))

    @cached_property
    def of_machine(self) -> dict[int, tuple[int, ...]]:
        """The seats of each machine."""
        return {
            m: tuple(k for k, own in enumerate(self.machine_of) if own == m) for m in dict.fromkeys(self.machine_of)
        }

    @cached_property
    def exchanges(self) -> tuple[tuple[int, ...], ...]:
        """What becomes of each seat when equal machines change places, for all ways to do so."""
        found = []
        for orders in product(*map(permutations, self.runs)):
            to = {m: n for run, order in zip(self.runs, orders, strict=True) for m, n in zip(run, order, strict=True)}
            device_classes = [
                self.of_machine[to[m]][self.of_machine[m].index(k)] for k, m in enumerate(self.machine_of)
            ]
            found.append(tuple(device_classes))
        return tuple(found)

    def labelings(self, assignment: DeviceAssignment) -> Iterator[tuple[PlacedDevices, ...]]:
        """The arrangement with devices, in every way to name those of a seat; lowest numbers in order of use first."""
        used = [sum(line_seats.count(k) for line_seats in map(_flat, assignment)) for k in range(len(self.devices))]
        choices = [permutations(own, count) for own, count in zip(self.devices, used, strict=True)]
        for chosen in product(*choices):
            left = [iter(own) for own in chosen]
            yield tuple(
                tuple(tuple(tuple(next(left[k]) for k in group) for group in stage) for stage in placement)
                for placement in assignment
            )

    def labeled(self, assignment: DeviceAssignment) -> tuple[PlacedDevices, ...]:
        """The arrangement with the lowest devices of each seat, in the order of use."""
        return next(self.labelings(assignment))

    def assignments(self) -> Iterator[DeviceAssignment]:
        """All arrangements of at least one device that obey the TP degrees and the numbers of the plan space."""
        space, workload = self.problem.space, self.problem.workload
        most = min(len(self.problem.usable_devices), workload.global_batch, space.num_pipelines or 1 << 30)
        seen: set[DeviceAssignment] = set()
        for found in self._pipelines(tuple(map(len, self.devices)), most, ()):
            if space.num_pipelines in (None, len(found)):
                same = self.canonical(found)
                if same not in seen:
                    seen.add(same)
                    yield found

    def canonical(self, assignment: DeviceAssignment) -> DeviceAssignment:
        """The least of the arrangements that are the same but for the names of pipelines and equal machines."""
        return min(tuple(sorted(exchanged(placement, to) for placement in assignment)) for to in self.exchanges)

    def _pipelines(self, free: tuple[int, ...], most: int, least: tuple[object, ...]) -> Iterator[DeviceAssignment]:
        """One pipeline to `most`, from `free` devices per seat, in the order of their shapes."""
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
        """One stage to `most`, and what is left free."""
        for stage, left in self._slots(free, self._most_replicas):
            yield (stage,), left
            if most > 1:
                for others, rest in self._stages(left, most - 1):
                    yield (stage, *others), rest

    def _slots(self, free: tuple[int, ...], most: int) -> Iterator[tuple[tuple[ClassGroup, ...], tuple[int, ...]]]:
        """One TP group to `most`, in order, and what is left free."""
        for group in self._groups(free):
            left = tuple(count - group.count(k) for k, count in enumerate(free))
            yield (group,), left
            if most > 1:
                for others, rest in self._slots(left, most - 1):
                    yield (group, *others), rest

    def _groups(self, free: tuple[int, ...]) -> Iterator[ClassGroup]:
        """TP groups from free devices; of equal machines not yet used, only of the first."""
        for machine, device_classes in self.of_machine.items():
            if self._waits(machine, free):
                continue
            for degree in self.problem.space.allowed_tp(self.problem.cluster.machines[machine].num_gpus):
                for group in product(device_classes, repeat=degree):
                    if all(group.count(k) <= free[k] for k in device_classes):
                        yield group

    def _waits(self, machine: int, free: tuple[int, ...]) -> bool:
        """Whether an equal machine before this one is still wholly free, and this one too."""
        run = next(run for run in self.runs if machine in run)
        place = run.index(machine)
        return place > 0 and self._is_free(run[place - 1], free) and self._is_free(machine, free)

    def _is_free(self, machine: int, free: tuple[int, ...]) -> bool:
        return all(free[k] == len(self.devices[k]) for k in self.of_machine[machine])

    def _shape(self, placement: PipelinePlacement) -> tuple[object, ...]:
        """The line, equal machines not told apart."""
        return exchanged(placement, self._looks)

    @cached_property
    def _looks(self) -> tuple[int, ...]:
        """Of each seat, the like seat in the first of the equal machines."""
        first = {m: run[0] for run in self.runs for m in run}
        return tuple(self.of_machine[first[m]][self.of_machine[m].index(k)] for k, m in enumerate(self.machine_of))


def exchanged(placement: PipelinePlacement, to: Sequence[int]) -> PipelinePlacement:
    """The line with other seats, `to[k]` in place of k."""
    return tuple(tuple(tuple(to[k] for k in group) for group in stage) for stage in placement)


def _flat(placement: PipelinePlacement) -> list[int]:
    return [k for stage in placement for group in stage for k in group]


def _equal_devices(problem: Problem, a: int, b: int) -> bool:
    """Whether two devices of a machine can change places."""
    network = problem.cluster.network
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
    """Machines next to each other that can change places."""
    runs: list[list[int]] = []
    for machine in problem.usable_by_machine:
        if runs and all(_equal_machines(problem, other, machine) for other in runs[-1]):
            runs[-1].append(machine)
        else:
            runs.append([machine])
    return tuple(map(tuple, runs))


def _equal_machines(problem: Problem, a: int, b: int) -> bool:
    """Whether two machines can change places: equal in themselves, joined directly, and alike to all others."""
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
    others = [d for m, own in usable.items() if m not in (a, b) for d in own]
    return all(
        network.route(x, d)[1:] == network.route(y, d)[1:]
        and network.route(d, x)[:-1] == network.route(d, y)[:-1]
        and network.pair_latency(x, d) == network.pair_latency(y, d)
        and network.pair_latency(d, x) == network.pair_latency(d, y)
        for x, y in pairs
        for d in others
    )
