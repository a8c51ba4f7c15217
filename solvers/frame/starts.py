"""Rule-based partitions to start a search from: what engineers would configure by hand, enumerated.

Every machine is cut into TP groups. A *chain* is a pipeline group that passes through several machines one after
another and is as wide as every machine has TP groups for; machines too small for its width are combined with others of
their kind.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from math import factorial, prod

import numpy as np

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup
from solvers.core.zero import LOCKSTEP, first_stage, sharding_groups

_MOST_PERMUTED = 4  # kinds whose orders are all tried
_MOST_ORDERS = 120  # orders of machines up to which all are tried
_FEW = 8  # GPUs up to which single pipelines are tried in all ways, and lockstep at all micro-batch sizes
_FEW_SIZES = 2  # micro-batch sizes for each of those
_ALL_COUNTS = 64  # GPUs up to which every number of stages is tried
_ALL_CHAIN_COUNTS = 8  # machines up to which every number of chains is tried


def kinds(problem: Problem) -> list[list[int]]:
    """Machines by kind (equal hardware and as many usable devices), slowest kind first."""
    devices = problem.usable_by_machine
    found: dict[object, list[int]] = defaultdict(list)
    for machine, own in devices.items():
        found[problem.cluster.machines[machine].kind, len(own)].append(machine)
    precision = problem.workload.precision
    return sorted(
        found.values(),
        key=lambda members: (problem.cluster.machines[members[0]].gpu.peak_flops(precision) or 0.0, members),
    )


def cut(devices: Sequence[int], tp: int) -> list[DeviceGroup]:
    """Consecutive groups of `tp` devices; a remainder stays unused."""
    return [tuple(devices[i : i + tp]) for i in range(0, len(devices) - tp + 1, tp)]


def symmetric(problem: Problem, machines: Sequence[int]) -> Iterator[PipelineGroup]:
    """All symmetric grids (TP × stages × width) over machines of one kind, laid out along stages and along
    pipelines.
    """
    devices = problem.usable_by_machine
    size = len(devices[machines[0]])
    for tp in problem.space.allowed_tp(size):
        groups = [group for machine in machines for group in cut(devices[machine], tp)]
        for stages in stage_counts(problem, len(groups)):
            width = min(len(groups) // stages, problem.workload.global_batch)
            if width * stages <= len(groups) - stages and width < problem.workload.global_batch:
                continue
            along = [tuple(groups[s * width : (s + 1) * width]) for s in range(stages)]
            across = [tuple(groups[k * stages + s] for k in range(width)) for s in range(stages)]
            for layout in [along] if stages == 1 or width == 1 else [along, across]:
                yield PipelineGroup(tuple(layout))


def stage_counts(problem: Problem, most: int) -> list[int]:
    """Numbers of stages to try, up to `most` and the model's layers.

    All of them on a few machines; on many, where each takes milliseconds to evaluate, powers of two and the numbers
    half-way between.
    """
    most = min(most, problem.model.num_layers)
    if len(problem.usable_devices) <= _ALL_COUNTS:
        return list(range(1, most + 1))
    return sorted({count for k in range(most.bit_length()) for count in (1 << k, 3 << k >> 1) if count <= most})


def whole_grids(problem: Problem) -> Iterator[Partition]:
    """Symmetric grids over all machines whatever their kinds, the slowest kind first, by ascending number of stages."""
    machines, devices = [m for members in kinds(problem) for m in members], problem.usable_by_machine
    counts = stage_counts(problem, len(problem.usable_devices))
    for stages, tp in product(counts, problem.space.allowed_tp(max(map(len, devices.values())))):
        yield from _widest_grid(problem, machines, (tp,) * stages)


def _widest_grid(problem: Problem, machines: Sequence[int], degrees: Sequence[int]) -> Iterator[Partition]:
    """The widest grid of stages of these TP degrees on machines in their order, where they suffice for one."""
    devices = [problem.usable_by_machine[m] for m in machines]

    def grid(width: int) -> tuple[tuple[DeviceGroup, ...], ...] | None:
        left, stages = devices, []
        for tp in degrees:
            groups: list[DeviceGroup] = []
            taken = []
            for own in left:
                number = min(len(own) // tp, width - len(groups))
                groups += cut(own[: number * tp], tp)
                taken.append(own[number * tp :])
            if len(groups) < width:
                return None
            stages.append(tuple(groups))
            left = taken
        return tuple(stages)

    least = min(degrees)
    most = min(sum(len(own) // least * least for own in devices) // sum(degrees), problem.workload.global_batch)
    found = grid(most) if most else None
    if found is None:
        found = grid(bisect_left(range(1, most), True, key=lambda width: grid(width) is None))
    if found is not None and found[0]:
        yield first_choice(problem, (PipelineGroup(found),))


def chain(problem: Problem, machines: Sequence[int], width: int, max_tp: int) -> PipelineGroup | None:
    """One pipeline group of `width` pipelines through all devices of `machines` in order, with TP degrees up to
    `max_tp`; None where no stage is formed or there are more stages than layers.
    """
    devices, cluster = problem.usable_by_machine, problem.cluster
    stages: list[tuple[DeviceGroup, ...]] = []
    waiting: dict[object, list[DeviceGroup]] = defaultdict(list)
    for machine in machines:
        own = devices[machine]
        share = max(1, len(own) // width)
        tp = max(t for t in problem.space.allowed_tp(len(own)) if t <= min(share, max_tp) or t == 1)
        pool = waiting[cluster.machines[machine].kind, tp]
        pool += cut(own, tp)
        while len(pool) >= width:
            stages.append(tuple(pool[:width]))
            del pool[:width]
    if not stages or len(stages) > problem.model.num_layers:
        return None
    return PipelineGroup(tuple(stages))


def distribute(members: Sequence[Sequence[int]], num_chains: int) -> list[list[int]] | None:
    """Distribute machines over `num_chains` chains, every kind as evenly as possible, the slowest kind first in each
    chain.

    None where a chain would be empty.
    """
    found: list[list[int]] = [[] for _ in range(num_chains)]
    for at, machine in enumerate(machine for kind in members for machine in kind):
        found[at % num_chains].append(machine)
    return found if all(found) else None


def sorted_blocks(members: Sequence[Sequence[int]], num_chains: int) -> list[list[int]] | None:
    """Cut the machines, ordered by kind, into `num_chains` consecutive blocks, so that most chains are of one kind."""
    ordered = [machine for kind in members for machine in kind]
    if num_chains > len(ordered):
        return None
    size, extra = divmod(len(ordered), num_chains)
    found, at = [], 0
    for k in range(num_chains):
        end = at + size + (k < extra)
        found.append(ordered[at:end])
        at = end
    return found


def machine_classes(problem: Problem) -> list[list[int]]:
    """Classes of interchangeable machines, the slowest class first.

    Machines of a class are of one kind, have equally many usable devices, and have equal links to all other machines.
    """
    cluster, devices = problem.cluster, problem.usable_by_machine
    tables = (cluster.network.bandwidth, cluster.network.latency_s)
    by_kind: dict[Hashable, list[list[int]]] = defaultdict(list)
    for m, usable in devices.items():
        alike = by_kind[cluster.machines[m].kind, len(usable)]
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
        (members for alike in by_kind.values() for members in alike),
        key=lambda members: (cluster.machines[members[0]].gpu.peak_flops(precision) or 0.0, members),
    )


def orders(problem: Problem, machines: Sequence[int]) -> Iterator[list[int]]:
    """Orders of `machines`, where equal machines are interchangeable: first by kind, then all orders if these are few.

    By kind: all permutations of up to four kinds, else slowest first and fastest first.
    """
    by_kind: dict[object, list[int]] = defaultdict(list)
    for machine in machines:
        by_kind[problem.cluster.machines[machine].kind].append(machine)
    blocks = list(by_kind.values())
    if len(blocks) > _MOST_PERMUTED:
        yield [m for block in blocks for m in block]
        yield [m for block in blocks[::-1] for m in block]
        return
    for order in permutations(blocks):
        yield [m for block in order for m in block]
    if factorial(len(machines)) <= _MOST_ORDERS * prod(factorial(len(block)) for block in blocks):
        yield from (list(order) for order in _mixed([list(block) for block in blocks], len(machines)))


def _mixed(blocks: list[list[int]], left: int) -> Iterator[tuple[int, ...]]:
    """All interleavings of the machines in `blocks`, each block in its own order."""
    if not left:
        yield ()
    for k, block in enumerate(blocks):
        if block:
            rest = [*blocks[:k], block[1:], *blocks[k + 1 :]]
            yield from ((block[0], *others) for others in _mixed(rest, left - 1))


def chain_partitions(problem: Problem) -> Iterator[Partition]:
    """Chains over all machines, and over all but the slowest kinds.

    They vary in the number of chains, width, TP degree, whether machines are distributed or cut into blocks, and, for a
    single chain, the order of kinds.
    """
    groups = kinds(problem)
    seen: set[tuple[PipelineGroup, ...]] = set()
    for left_out in range(len(groups)):
        members = groups[left_out:]
        machines = [machine for kind in members for machine in kind]
        top = max(len(problem.usable_by_machine[m]) for m in machines)
        widths = [1 << k for k in range(top.bit_length()) if 1 << k <= top]
        for num_chains in chain_counts(len(machines)):
            distributions = [[order] for order in orders(problem, machines)]
            if num_chains > 1:
                parts = [
                    p for p in (distribute(members, num_chains), sorted_blocks(members, num_chains)) if p is not None
                ]
                distributions = [[part[::way] for part in p] for p in parts for way in (1, -1)]
            for width in widths:
                for max_tp in problem.space.allowed_tp(top):
                    for distribution in distributions:
                        found = [chain(problem, part, width, max_tp) for part in distribution]
                        pipeline_groups = tuple(b for b in found if b is not None)
                        if pipeline_groups and pipeline_groups not in seen:
                            seen.add(pipeline_groups)
                            yield first_choice(problem, pipeline_groups)


def lockstep_partitions(problem: Problem) -> Iterator[Partition]:
    """Equal pipelines over machines of any kinds under ZeRO-3 and ZeRO-2, for plans that must or may run in lockstep.

    First without stages, at all micro-batch sizes, over all machines, all but the slowest kinds, each kind, and a
    machine of each; then in several stages over the first of these, by ascending micro-batch size.
    """
    deep = [stage for stage in sharding_stages(problem.workload)[::-1] if stage >= LOCKSTEP]
    members, devices, batch = kinds(problem), problem.usable_by_machine, problem.workload.global_batch
    all_sizes = len(problem.usable_devices) <= _FEW
    ranges = [[machine for kind in members[left_out:] for machine in kind] for left_out in range(len(members))]
    alone = [[*kind] for kind in members] + [kind[:1] for kind in members]
    flat = [(machines, True) for machines in (*ranges, *(own for own in alone if own not in ranges))]
    for machines, without_stages in (*flat, *((own, False) for own in ranges)) if deep else ():
        for tp in problem.space.allowed_tp(min(len(devices[m]) for m in machines)):
            groups = [group for machine in machines for group in cut(devices[machine], tp)]
            for stages in (1 << k for k in range(min(len(groups), problem.model.num_layers).bit_length())):
                most = len(groups) // stages
                width = max((w for w in range(1, most + 1) if batch % w == 0), default=0)
                if not width or (stages == 1) != without_stages:
                    continue
                fastest = groups[len(groups) - stages * width :]
                grid = tuple(tuple(fastest[s * width : (s + 1) * width]) for s in range(stages))
                sizes = problem.space.micro_batch_sizes(batch // width)
                for size in sizes if all_sizes or without_stages else sizes[:3]:
                    if batch % (width * size) == 0:
                        base = first_choice(problem, (PipelineGroup(grid, size),))
                        for stage in deep:
                            for way in sharding_groups(problem, stage):
                                yield replace(base, sharding=stage, groups=way)


def single_pipeline_partitions(problem: Problem, replicates: bool) -> Iterator[Partition]:
    """For a few GPUs: a single pipeline over all machines, and over all but some of each kind, the most first.

    It visits the machines in every order with every TP degree in each, one stage for each TP group. With `replicates`,
    consecutive groups also become the replicas of a stage in every way, at the smallest micro-batch sizes that give
    each replica a sample.
    """
    devices, members, seen = problem.usable_by_machine, kinds(problem), set[PipelineGroup]()
    if len(problem.usable_devices) > _FEW:
        return
    sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
    subsets = sorted(product(*(range(len(kind), -1, -1) for kind in members)), key=sum, reverse=True)
    for counts in subsets[:-1]:
        machines = [machine for kind, count in zip(members, counts, strict=True) for machine in kind[:count]]
        for order in orders(problem, machines):
            for degrees in product(*(problem.space.allowed_tp(len(devices[machine])) for machine in order)):
                cuts = zip(order, degrees, strict=True)
                groups = [group for machine, tp in cuts for group in cut(devices[machine], tp)]
                for stages in _in_runs(groups) if replicates else [tuple((group,) for group in groups)]:
                    most = max(map(len, stages))
                    for size in [size for size in sizes if size >= most][:_FEW_SIZES]:
                        pipeline_group = PipelineGroup.pipeline(stages, size)
                        if pipeline_group not in seen:
                            seen.add(pipeline_group)
                            yield first_choice(problem, (pipeline_group,))


def _in_runs(groups: Sequence[DeviceGroup]) -> Iterator[tuple[tuple[DeviceGroup, ...], ...]]:
    """All ways to cut a sequence into consecutive runs."""
    for cuts in product((True, False), repeat=len(groups) - 1):
        ends = [k for k, here in enumerate(cuts, 1) if here]
        yield tuple(tuple(groups[a:b]) for a, b in pairwise([0, *ends, len(groups)]))


def chain_counts(machines: int) -> list[int]:
    """Numbers of chains to try: all on a few machines, powers of two beyond."""
    if machines <= _ALL_CHAIN_COUNTS:
        return list(range(1, machines + 1))
    return [1 << k for k in range(machines.bit_length())]


def first_choice(problem: Problem, pipeline_groups: tuple[PipelineGroup, ...]) -> Partition:
    """`pipeline_groups` with the default schedule (1F1B where allowed) and ZeRO stage."""
    return Partition(pipeline_groups, problem.default_schedule, first_stage(problem))
