"""Symmetric grids: equal TP groups laid out as stages × pipelines along an order of the machines.

What planners for uniform clusters share: every pipeline has as many stages, every TP group as many GPUs. Ranks run
through the machines one after another, so that a grid follows from the order of the machines and from whether
neighbouring groups belong to one stage (data parallelism inside) or to one pipeline.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product

import numpy as np

from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from solvers.core.partition import Group
from solvers.frame.starts import cut

_MOST_PERMUTED = 4  # machine classes whose orders are all tried


@dataclass(frozen=True, slots=True)
class Grid:
    """`stages[s][k]` is the TP group of stage s in pipeline k."""

    stages: tuple[tuple[Group, ...], ...]

    @property
    def width(self) -> int:
        """Pipelines."""
        return len(self.stages[0])

    @property
    def tp(self) -> int:
        """GPUs of a TP group."""
        return len(self.stages[0][0])

    def sizes(self, problem: Problem) -> list[int]:
        """Micro-batch sizes that divide a pipeline's share of the global batch."""
        share = problem.workload.global_batch // self.width
        return [size for size in problem.space.micro_batch_sizes(share) if share % size == 0]


def laid_out(groups: Sequence[Group], stages: int, along: bool) -> Grid:
    """The grid of `groups` in rank order; `stages` divides their number. `along`: neighbours form a pipeline."""
    width = len(groups) // stages
    if along:
        return Grid(tuple(tuple(groups[k * stages + s] for k in range(width)) for s in range(stages)))
    return Grid(tuple(tuple(groups[s * width : (s + 1) * width]) for s in range(stages)))


def grids(problem: Problem, groups: Sequence[Group], *, both: bool) -> Iterator[Grid]:
    """All grids of `groups` whose pipelines share the batch equally and whose stages get a layer each.

    Neighbours form a stage, with `both` also a pipeline.
    """
    space, count = problem.space, len(groups)
    for stages in range(1, min(count, problem.model.num_layers) + 1):
        if count % stages or problem.workload.global_batch % (count // stages):
            continue
        if space.num_stages not in (None, stages) or space.num_pipelines not in (None, count // stages):
            continue
        yield laid_out(groups, stages, along=False)
        if both and 1 < stages < count:
            yield laid_out(groups, stages, along=True)


def rank_groups(problem: Problem, machines: Iterable[int], tp: int, most: int) -> list[Group]:
    """TP groups of `machines` in order, from up to `most` GPUs of each."""
    return [group for m in machines for group in cut(problem.usable_by_machine[m][:most], tp)]


def rank_order(problem: Problem, plan: Plan, along: bool) -> list[Group]:
    """The TP groups of a plan of equally many stages in all pipelines, as ranks count them; see `laid_out`."""
    lines = [[stage.devices for stage in pipeline.stages] for pipeline in plan.pipelines]
    if along:
        return [group for line in lines for group in line]
    return [group for slot in zip(*lines, strict=True) for group in slot]


def follows_ranks(problem: Problem, plan: Plan, mosts: Iterable[int], *, both: bool) -> bool:
    """Whether the devices of a symmetric plan are a grid of an order of machines, up to one of `mosts` of each."""
    tp = plan.pipelines[0].stages[0].tp
    machine_of = problem.cluster.machine_of
    for along in (False, True)[: 1 + both]:
        groups = rank_order(problem, plan, along)
        machines = list(dict.fromkeys(int(machine_of[group[0]]) for group in groups))
        if any(rank_groups(problem, machines, tp, most) == groups for most in mosts):
            return True
    return False


def divides_model(problem: Problem, tp: int) -> bool:
    """Whether attention heads and MLP columns divide by `tp`, as the layers of Megatron-LM require."""
    return problem.model.num_heads % tp == 0 and problem.model.ffn_size % tp == 0


def tp_degrees(problem: Problem) -> list[int]:
    """TP degrees that some machine allows and the model divides by."""
    allowed = {t for own in problem.usable_by_machine.values() for t in problem.space.allowed_tp(len(own))}
    return sorted(tp for tp in allowed if divides_model(problem, tp))


def machine_classes(problem: Problem) -> list[list[int]]:
    """Machines that may stand for each other, slowest class first.

    They are of one kind, have as many devices to use, and each links to all other machines as the other does.
    """
    cluster, devices = problem.cluster, problem.usable_by_machine
    tables = (cluster.network.bandwidth, cluster.network.latency_s)
    found: dict[Hashable, list[list[int]]] = defaultdict(list)
    for m, own in devices.items():
        alike = found[cluster.machines[m].kind, len(own)]
        for members in alike:
            rest = [o for o in devices if o not in (m, members[0])]
            if all(
                np.array_equal(t[m, rest], t[members[0], rest]) and np.array_equal(t[rest, m], t[rest, members[0]])
                for t in tables
            ):
                members.append(m)
                break
        else:
            alike.append([m])
    precision = problem.workload.precision
    return sorted(
        (members for alike in found.values() for members in alike),
        key=lambda members: (cluster.machines[members[0]].gpu.peak_flops(precision) or 0.0, members),
    )


def machine_orders(problem: Problem, limit: int, *, subsets: bool) -> list[tuple[int, ...]]:
    """Orders of all machines, or with `subsets` also of some, up to exchanging machines of a class.

    All of them where they are at most `limit`. Else classes stay together, in every order of up to four classes (of
    more: by speed or along fat links, both ways), with any number of machines of each class, or where that is still too
    much with all or none; at the last, only the slowest classes are left out.
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
    found: list[tuple[int, ...]] = []
    for way in ways:
        found = list(islice(way, limit + 1))
        if len(found) <= limit:
            break
    orders = []
    for order in found[:limit]:
        members = [iter(own) for own in classes]
        orders.append(tuple(next(members[c]) for c in order))
    return orders


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
    present = [c for c, n in enumerate(counts) if n]
    orders: Iterable[Sequence[int]] = permutations(present)
    if len(present) > _MOST_PERMUTED:
        along = [c for c in linked if counts[c]]
        orders = dict.fromkeys(tuple(order) for order in (present, present[::-1], along, along[::-1]))
    for order in orders:
        yield tuple(c for c in order for _ in range(counts[c]))


def _by_link(problem: Problem, machines: Sequence[int]) -> list[int]:
    """Positions of `machines`, from the first, so that each is followed by the one it has the fattest link to."""
    bandwidth = problem.cluster.network.bandwidth
    order, left = [0], list(range(1, len(machines)))
    while left:
        here = machines[order[-1]]
        order.append(max(left, key=lambda k: (float(bandwidth[here, machines[k]]), -k)))
        left.remove(order[-1])
    return order


def draw_grid(problem: Problem, rng: random.Random, mosts: Sequence[int], *, subsets: bool, both: bool) -> Grid | None:
    """A random grid of machines in random order; None where the draw does not come to one."""
    machines = list(problem.usable_by_machine)
    rng.shuffle(machines)
    if subsets:
        machines = machines[: rng.randint(1, len(machines))]
    degrees = tp_degrees(problem)
    groups = rank_groups(problem, machines, rng.choice(degrees), rng.choice(mosts)) if degrees else []
    found = list(grids(problem, groups, both=both))
    return rng.choice(found) if found else None
