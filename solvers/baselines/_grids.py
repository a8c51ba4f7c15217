"""Where stages stand: grids of TP groups along an order of the machines, and the areas of a cluster to stay in.

What planners for uniform clusters share: every pipeline has as many stages, every TP group as many GPUs. Ranks run
through the machines one after another, so that a grid follows from the order of the machines and from whether
neighbouring groups belong to one stage (data parallelism inside) or to one pipeline.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations, product

from hexiopt.problem.problem import Problem
from solvers.baselines._plans import divides_model
from solvers.core.partition import DeviceGroup
from solvers.frame.starts import cut, machine_classes

_MAX_PERMUTED = 4  # kinds up to which all their orders are tried
_MAX_RATES, _MAX_AREAS = 8, 16  # areas, and link rates that they are formed by, the slowest

Area = frozenset[int]  # machines


@dataclass(frozen=True, slots=True)
class StageGrid:
    """Pipelines of equally many stages. `stages[s][k]` are the devices of stage s in pipeline k.

    `degree`: the devices of a group are replicas of so many devices each, which share experts; None: they are one TP
    group or, where layers have experts, what is fastest.
    """

    stages: tuple[tuple[DeviceGroup, ...], ...]
    degree: int | None = None

    @property
    def width(self) -> int:
        """Number of pipelines."""
        return len(self.stages[0])

    @property
    def tp(self) -> int:
        """GPUs of a group."""
        return len(self.stages[0][0])

    @property
    def replicas(self) -> int:
        """Replicas that share experts in a group."""
        return 1 if self.degree is None else self.tp // self.degree

    def lines(self) -> Iterator[tuple[DeviceGroup, ...]]:
        """The stages of each pipeline."""
        return zip(*self.stages, strict=True)

    def devices(self) -> Iterator[int]:
        """All devices, stage by stage."""
        return (device for stage_groups in self.stages for group in stage_groups for device in group)

    def of(self, pipelines: Sequence[int]) -> "StageGrid":
        """The grid of some of its pipelines."""
        stages = tuple(tuple(stage_groups[k] for k in pipelines) for stage_groups in self.stages)
        return StageGrid(stages, self.degree)

    def sharing(self, replicas: int) -> "StageGrid":
        """The grid whose pipelines share experts, so many neighbours each, which become one pipeline of replicas."""
        starts = range(0, self.width, replicas)
        stages = tuple(
            tuple(tuple(d for group in groups[k : k + replicas] for d in group) for k in starts)
            for groups in self.stages
        )
        return StageGrid(stages, self.tp)


def lay_out(groups: Sequence[DeviceGroup], stages: int, along: bool) -> StageGrid:
    """The grid of `groups` in rank order; `stages` divides their number.

    Neighbours form a stage, or with `along` a pipeline.
    """
    width = len(groups) // stages
    if along:
        return StageGrid(tuple(tuple(groups[k * stages + s] for k in range(width)) for s in range(stages)))
    return StageGrid(tuple(tuple(groups[s * width : (s + 1) * width]) for s in range(stages)))


def grids(problem: Problem, groups: Sequence[DeviceGroup], *, both: bool) -> Iterator[StageGrid]:
    """All grids of `groups` whose pipelines share the batch equally and whose stages hold at least a layer.

    Neighbours form a stage; with `both`, grids in which they form a pipeline are included.
    """
    space, count = problem.space, len(groups)
    for stages in range(1, min(count, problem.model.num_layers) + 1):
        if count % stages or problem.workload.global_batch % (count // stages):
            continue
        if space.num_stages not in (None, stages) or space.num_pipelines not in (None, count // stages):
            continue
        yield lay_out(groups, stages, along=False)
        if both and 1 < stages < count:
            yield lay_out(groups, stages, along=True)


def processes_per_machine(problem: Problem) -> list[int]:
    """Numbers of processes that a launcher may start on every machine: the sizes of all machines, largest first.

    A machine of fewer GPUs runs one process for each.
    """
    return sorted({len(devices) for devices in problem.usable_by_machine.values()}, reverse=True)


def rank_groups(problem: Problem, machines: Iterable[int], tp: int, processes: int) -> list[DeviceGroup]:
    """TP groups of `machines` in order, from up to `processes` GPUs of each."""
    return [group for m in machines for group in cut(problem.usable_by_machine[m][:processes], tp)]


def rank_devices(problem: Problem, machines: Iterable[int], processes: int) -> tuple[int, ...]:
    """The devices of `machines` in order, up to `processes` of each."""
    return tuple(d for m in machines for d in problem.usable_by_machine[m][:processes])


def tp_degrees(problem: Problem) -> list[int]:
    """TP degrees that some machine allows and that divide the model."""
    allowed = {t for devices in problem.usable_by_machine.values() for t in problem.space.allowed_tp(len(devices))}
    return sorted(tp for tp in allowed if divides_model(problem, tp))


def machine_orders(problem: Problem, limit: int, *, subsets: bool) -> list[tuple[int, ...]]:
    """Orders of all machines, and with `subsets` of some of them; machines of a class are interchangeable.

    If there are more than `limit` orders, machines of a class stay together: in every order of up to four classes (of
    more, by speed or along fast links, both ways), with any number of machines of each class. If these are still too
    many, with all machines of a class or none; and at last, only the slowest classes are left out.
    """
    classes = machine_classes(problem)
    full = tuple(len(members) for members in classes)
    linked = _by_link(problem, [members[0] for members in classes])

    def some() -> Iterator[tuple[int, ...]]:
        return (c for c in product(*(range(n, -1, -1) for n in full)) if any(c)) if subsets else iter((full,))

    def whole() -> Iterator[tuple[int, ...]]:
        return (c for c in product(*((n, 0) for n in full)) if any(c)) if subsets else iter((full,))

    fastest = ((0,) * k + full[k:] for k in range(len(full) if subsets else 1))
    ways = (
        (order for counts in some() for order in _sequences(counts)),
        (order for counts in some() for order in _blocks(counts, linked)),
        (order for counts in whole() for order in _blocks(counts, linked)),
        (order for counts in fastest for order in _blocks(counts, linked)),
    )
    orders: list[tuple[int, ...]] = []
    for way in ways:
        orders = list(islice(way, limit + 1))
        if len(orders) <= limit:
            break
    machines = []
    for order in orders[:limit]:
        members = [iter(machines_of) for machines_of in classes]
        machines.append(tuple(next(members[c]) for c in order))
    return machines


def orders_of(kinds: Sequence[int]) -> list[tuple[int, ...]]:
    """All orders of a few kinds of machines or stages; of more, the given one and its reverse."""
    if len(kinds) <= _MAX_PERMUTED:
        return list(permutations(kinds))
    return [tuple(kinds), tuple(kinds[::-1])]


def _sequences(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All sequences in which class c stands `counts[c]` times."""
    if not any(counts):
        yield ()
        return
    for c, n in enumerate(counts):
        if n:
            for rest in _sequences([m - (k == c) for k, m in enumerate(counts)]):
                yield (c, *rest)


def _blocks(counts: Sequence[int], linked: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sequences in which every class stands together."""
    orders = orders_of([c for c, n in enumerate(counts) if n])
    if len(orders[0]) > _MAX_PERMUTED:
        along = tuple(c for c in linked if counts[c])
        orders = [*orders, along, along[::-1]]
    for order in dict.fromkeys(orders):
        yield tuple(c for c in order for _ in range(counts[c]))


def _by_link(problem: Problem, machines: Sequence[int]) -> list[int]:
    """Positions of `machines`, beginning with the first, so that each is followed by the one to which its link is
    fastest."""
    bandwidth = problem.cluster.network.bandwidth
    order, left = [0], list(range(1, len(machines)))
    while left:
        here = machines[order[-1]]
        order.append(max(left, key=lambda k: (float(bandwidth[here, machines[k]]), -k)))
        left.remove(order[-1])
    return order


def fill_slots(
    problem: Problem,
    machines: Sequence[Sequence[Sequence[int]]],
    wanted: Sequence[Sequence[tuple[int, int]]],
    pipelines: int,
    *,
    along: bool,
    near: bool,
) -> StageGrid | None:
    """TP groups for all slots, assigned stage by stage or `along` pipelines; None if there are too few devices.

    `machines[k]` holds the devices of each machine of kind k. Stage s takes the first (kind, TP degree) of `wanted[s]`
    for which a machine has devices left: the first such machine, or with `near` the one with the fastest link to the
    stage before.
    """
    free = [[list(devices) for devices in kind] for kind in machines]
    stages = len(wanted)
    slots: list[list[DeviceGroup]] = [[] for _ in range(stages)]
    for at in range(stages * pipelines):
        k, s = divmod(at, stages) if along else divmod(at, pipelines)[::-1]
        before = slots[s - 1][k][0] if near and s else None
        group = next((g for kind, tp in wanted[s] if (g := _take_group(problem, free[kind], tp, before))), None)
        if group is None:
            return None
        slots[s].append(group)
    return StageGrid(tuple(tuple(stage_groups) for stage_groups in slots))


def _take_group(problem: Problem, machines: list[list[int]], tp: int, near: int | None) -> DeviceGroup | None:
    """Take `tp` devices of the first machine that has them, or of the one with the fastest link to device `near`; None
    if no machine has."""
    able = (devices for devices in machines if len(devices) >= tp)
    if near is None:
        devices = next(able, None)
    else:
        bandwidth, machine_of = problem.cluster.network.bandwidth, problem.cluster.machine_of
        devices = max(
            able, key=lambda devices: float(bandwidth[machine_of[near], machine_of[devices[0]]]), default=None
        )
    if devices is None:
        return None
    group = tuple(devices[:tp])
    del devices[:tp]
    return group


def linked_areas(problem: Problem) -> list[Area]:
    """All machines, and where links differ the sets connected by links of at least a certain rate; largest first."""
    machines = list(problem.usable_by_machine)
    linked = {frozenset(machines)}
    if problem.cluster.groups or problem.cluster.links:
        bandwidth = problem.cluster.network.bandwidth
        rates = sorted({float(bandwidth[a, b]) for a, b in combinations(machines, 2)})
        for rate in rates[:_MAX_RATES]:
            left = set(machines)
            while left:
                area, edge = set[int](), {min(left)}
                while edge:
                    area |= edge
                    edge = {b for b in left - area if any(min(bandwidth[a, b], bandwidth[b, a]) >= rate for a in edge)}
                left -= area
                linked.add(frozenset(area))
    return sorted(linked, key=lambda area: (-len(area), sorted(area)))[:_MAX_AREAS]


def areas(problem: Problem) -> list[Area]:
    """Linked areas, every class of machines, and one machine of every class; smallest first."""
    every_area = set(linked_areas(problem))
    for members in machine_classes(problem):
        every_area |= {frozenset(members), frozenset(members[:1])}
    return sorted(every_area, key=lambda area: (len(area), sorted(area)))
