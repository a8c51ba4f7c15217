"""Random plans of a published space: drawn by its columns for all baselines alike, and kept where no rule is broken."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, layer_ranges, recompute_policies, schedules, sharding_stages
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._grids import lay_out, rank_devices
from solvers.baselines._plans import StageHolders, aligned_plan, even_parts, pipeline_of
from solvers.core.partition import DeviceGroup
from solvers.frame.starts import cut
from tests.solvers.baselines import published_space as columns
from tests.solvers.baselines.published_space import PublishedSpace

Slots = Sequence[Sequence[StageHolders]]
Complete = Callable[[Problem, Plan, random.Random], Plan | None]


def random_plans(
    space: PublishedSpace, problem: Problem, rng: random.Random, tries: int, complete: Complete | None = None
) -> Iterator[Plan]:
    """Valid plans of `space` among `tries` draws; they may exceed memory. `complete` makes one of a draw whose layers
    the space computes."""
    free = replace(space, layers=columns.ANY_LAYERS)
    for _ in range(tries):
        try:
            plan = _draw_plan(space, problem, rng)
        except InputError:
            continue
        if plan is None or check(problem, plan):
            continue
        if complete is not None:
            plan = complete(problem, plan, rng) if free.first_violation(problem, plan) is None else None
        if plan is not None and space.first_violation(problem, plan) is None:
            yield plan


def _draw_plan(space: PublishedSpace, problem: Problem, rng: random.Random) -> Plan | None:
    allowed = [name for name in space.schedules if name in schedules(problem.workload)]
    sharding = [each for each in space.sharding if each.stage in sharding_stages(problem.workload)]
    if not allowed or not sharding:
        return None
    chosen = rng.choice(allowed), rng.choice(sharding)
    if space.pipelines is columns.ANY_PIPELINES:
        return _unequal(problem, rng, *chosen)
    return _draw_aligned(space, problem, rng, *chosen)


def _draw_aligned(
    space: PublishedSpace, problem: Problem, rng: random.Random, schedule: Schedule, sharding: Sharding
) -> Plan | None:
    """Pipelines of the same layers: on a grid of ranks, on blocks of ranks, or on any TP groups."""
    size = rng.choice(problem.space.micro_batch_sizes(problem.workload.global_batch))
    place = {columns.TP_PER_STAGE: _blocks, columns.ANY_TP: _scattered_groups}.get(space.tp, _grid)
    if space.tp is columns.ONE_TP and rng.random() < 0.5:
        place = _of_one_type
    slots = place(space, problem, rng, size)
    if slots is None or len(slots) > problem.model.num_layers:
        return None
    total, rest = divmod(problem.workload.global_batch, size)
    width = len(slots[0])
    batches = even_parts(total, width)
    if rest or total < width or (space.batches is columns.EQUAL_BATCHES and total % width):
        return None
    interleaved = schedule.chunked and space.stages is columns.INTERLEAVED_STAGES and len(slots) > 1
    chunks = rng.randint(2, problem.space.max_chunks) if interleaved else 1
    layers = _layers(space, problem, rng, slots, chunks)
    if layers is None:
        return None
    recompute = _recompute(space, problem, rng, layers, chunks)
    return aligned_plan(slots, layers, recompute, batches, size, schedule, sharding, chunks=chunks)


def _machines(problem: Problem, rng: random.Random) -> list[int]:
    """Some machines, or all, in random order; types together half of the time."""
    machines = list(problem.usable_by_machine)
    rng.shuffle(machines)
    if rng.random() < 0.5:
        machines = machines[: rng.randint(1, len(machines))]
    if rng.random() < 0.5:
        names = [problem.cluster.machines[m].gpu.name for m in machines]
        machines.sort(key=lambda m: names.index(problem.cluster.machines[m].gpu.name))
    return machines


def _processes(problem: Problem, rng: random.Random) -> int:
    return rng.choice([len(devices) for devices in problem.usable_by_machine.values()])


def _degree(space: PublishedSpace, problem: Problem, rng: random.Random) -> int:
    if space.tp is columns.NO_TP:
        return 1
    return rng.choice(problem.space.allowed_tp(max(map(len, problem.usable_by_machine.values()))))


def _shape(space: PublishedSpace, problem: Problem, rng: random.Random, count: int) -> int | None:
    """A number of stages that divides `count` TP groups."""
    stages = [n for n in range(1, count + 1) if count % n == 0 and problem.space.num_stages in (None, n)]
    if space.pipelines is columns.SINGLE_STAGES:
        stages = [n for n in stages if n == 1]
    return rng.choice(stages) if stages else None


def _grid(space: PublishedSpace, problem: Problem, rng: random.Random, size: int) -> Slots | None:
    tp, most, devices = _degree(space, problem, rng), _processes(problem, rng), problem.usable_by_machine
    groups = [group for m in _machines(problem, rng) for group in cut(devices[m][:most], tp)]
    stages = _shape(space, problem, rng, len(groups))
    return lay_out(groups, stages, along=rng.random() < 0.5).stages if stages else None


def _of_one_type(space: PublishedSpace, problem: Problem, rng: random.Random, size: int) -> Slots | None:
    """TP groups of one degree, those of a stage of one GPU type."""
    tp, by_type = _degree(space, problem, rng), dict[str, list[DeviceGroup]]()
    for m in _machines(problem, rng):
        by_type.setdefault(problem.cluster.machines[m].gpu.name, []).extend(cut(problem.usable_by_machine[m], tp))
    width = rng.randint(1, max(map(len, by_type.values()), default=1) or 1)
    slots = [
        tuple(groups[k] for k in stage_groups)
        for groups in by_type.values()
        for stage_groups in cut(range(len(groups)), width)
    ]
    if rng.random() < 0.5:
        rng.shuffle(slots)
    return slots[: rng.randint(1, len(slots))] if slots else None


def _scattered_groups(space: PublishedSpace, problem: Problem, rng: random.Random, size: int) -> Slots | None:
    """TP groups of any degree: of one a machine half of the time."""
    fixed = {m: rng.choice(problem.space.allowed_tp(len(devices))) for m, devices in problem.usable_by_machine.items()}
    groups = [group for m in _machines(problem, rng) for group in cut(problem.usable_by_machine[m], fixed[m])]
    if rng.random() < 0.5:
        rng.shuffle(groups)
    groups = groups[: rng.randint(1, len(groups))]
    stages = _shape(space, problem, rng, len(groups))
    return lay_out(groups, stages, along=rng.random() < 0.5).stages if stages else None


def _blocks(space: PublishedSpace, problem: Problem, rng: random.Random, size: int) -> Slots | None:
    """Ranks in powers of two, equal half of the time, each with its own TP degree and replicas."""
    ranks, most = rank_devices(problem, _machines(problem, rng), _processes(problem, rng)), problem.space.num_stages
    blocks: list[DeviceGroup] = []
    equal = 1 << rng.randrange(len(ranks).bit_length()) if rng.random() < 0.5 else None
    at = 0
    while at < len(ranks):
        length = equal or 1 << rng.randrange((len(ranks) - at).bit_length())
        blocks.append(ranks[at : at + length])
        at += length
    if most not in (None, len(blocks)):
        return None
    groups = [cut(block, _degree(space, problem, rng)) for block in blocks]
    fewest = min(map(len, groups))
    width = rng.choice([n for n in range(1, fewest + 1) if all(len(block) % n == 0 for block in groups)] or [0])
    if not width:
        return None
    slots = []
    for block_groups in groups:
        each = len(block_groups) // width
        slots.append([_replicas(problem, block_groups[k * each : (k + 1) * each], size) for k in range(width)])
    return None if any(devices is None for stage_groups in slots for devices in stage_groups) else slots  # type: ignore[return-value]


def _replicas(problem: Problem, groups: Sequence[DeviceGroup], size: int) -> StageHolders | None:
    """Replicas whose samples follow their speed."""
    if len(groups) == 1:
        return groups[0]
    if len(groups) > size:
        return None
    speeds, samples = [_speed(problem, group) for group in groups], [1] * len(groups)
    for _ in range(size - len(groups)):
        samples[max(range(len(groups)), key=lambda k: speeds[k] / (samples[k] + 1))] += 1
    return tuple(Replica(group, n) for group, n in zip(groups, samples, strict=True))


def _speed(problem: Problem, devices: Sequence[int]) -> float:
    return sum(problem.cluster.gpu_of(d).peak_flops(problem.workload.precision) or 1.0 for d in devices)


def _layers(space: PublishedSpace, problem: Problem, rng: random.Random, slots: Slots, chunks: int) -> list[int] | None:
    """Layers per stage in equal ranges: by speed, equal, equal but at the ends, or at random."""
    stages = len(slots)
    total, rest = divmod(problem.model.num_layers, chunks)
    if rest or total < stages:
        return None
    kind = rng.choice(["speed", "equal", "ends", "random"]) if space.layers is not columns.EQUAL_LAYERS else "equal"
    if kind == "speed":
        layers = [1] * stages
        speeds = [
            min(_speed(problem, _devices(holders)) for holders in stage_groups) * rng.uniform(0.8, 1.2)
            for stage_groups in slots
        ]
        for _ in range(total - stages):
            layers[max(range(stages), key=lambda s: speeds[s] / (layers[s] + 1))] += 1
    elif kind == "equal":
        layers = even_parts(total, stages)[:: rng.choice((1, -1))]
    elif kind == "ends" and stages > 2:
        middle = rng.randint(1, (total - 2) // (stages - 2))
        ends = total - middle * (stages - 2)
        first = rng.randint(1, ends - 1)
        layers = [first, *[middle] * (stages - 2), ends - first]
    else:
        layers = composition(total, stages, rng)
    return [n * chunks for n in layers]


def _devices(holders: StageHolders) -> list[int]:
    return [d for part in holders for d in (part.devices if isinstance(part, Replica) else (part,))]  # type: ignore[union-attr]


def composition(total: int, parts: int, rng: random.Random) -> list[int]:
    """`parts` whole numbers from 1 that sum to `total`, at random."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [end - start for start, end in pairwise([0, *cuts, total])]


def _recompute(
    space: PublishedSpace, problem: Problem, rng: random.Random, layers: Sequence[int], chunks: int
) -> str | list[Recompute]:
    """One policy, or that of the first layers of every range and another."""
    policies, smaller = (
        recompute_policies(problem.workload),
        rng.choice((0, 0, rng.randint(1, problem.model.num_layers))),
    )
    if space.recompute is columns.ONE_POLICY or not smaller or not problem.space.recompute_per_layer:
        return rng.choice(policies)
    recomputes = []
    for ranges in layer_ranges(layers, chunks):
        each = [policies[-1] if k < smaller else policies[0] for first, end in ranges for k in range(end - first)]
        recomputes.append(tuple(each[:1] if len(set(each)) == 1 else each))
    return recomputes


def _unequal(problem: Problem, rng: random.Random, schedule: Schedule, sharding: Sharding) -> Plan | None:
    """All devices dealt to pipelines of any stages, layers and batches, those of a machine together."""
    workload, devices = problem.workload, list(problem.usable_devices)
    count = problem.space.num_pipelines or rng.randint(1, min(len(devices), workload.global_batch))
    size = rng.choice(problem.space.micro_batch_sizes(max(1, workload.global_batch // count)))
    total, rest = divmod(workload.global_batch, size)
    rng.shuffle(devices)
    policy, pipelines = rng.choice(recompute_policies(workload)), []
    if rest or total < count:
        return None
    for pipeline_devices, batches in zip(
        (devices[k::count] for k in range(count)), composition(total, count, rng), strict=True
    ):
        by_machine: dict[int, list[int]] = {}
        for d in pipeline_devices:
            by_machine.setdefault(int(problem.cluster.machine_of[d]), []).append(d)
        groups = [
            group
            for m, members in by_machine.items()
            for group in _all_cut(sorted(members), problem.space.allowed_tp(len(problem.usable_by_machine[m])), rng)
        ]
        if len(groups) > problem.model.num_layers:
            return None
        layers = composition(problem.model.num_layers, len(groups), rng)
        pipelines.append(pipeline_of(groups, layers, policy, batches, size))
    return Plan(tuple(pipelines), schedule, sharding)


def _all_cut(devices: Sequence[int], degrees: Sequence[int], rng: random.Random) -> Iterator[DeviceGroup]:
    """`devices` in TP groups of random degrees, none left out."""
    at = 0
    while at < len(devices):
        tp = rng.choice([t for t in degrees if t <= len(devices) - at])
        yield tuple(devices[at : at + tp])
        at += tp
