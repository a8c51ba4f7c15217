"""All plans of pipelines of one sequence stage each, written for brute force: nothing shared with the solvers."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, sharding_stages
from hexiopt.schedules.registry import ONE_F_ONE_B


def parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All rows of `count` whole numbers from 1 that sum to `total`."""
    for cuts in combinations(range(1, total), count - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(ends))


def layouts(problem: Problem, devices: Sequence[int], resolution: int) -> Iterator[SequenceParallel]:
    """All layouts of all of `devices` with tokens in quanta."""
    quantum, heads = problem.workload.seq_len // resolution, problem.model.num_heads
    sizes = [row for count in range(1, len(devices) + 1) for row in parts(len(devices), count) if max(row) <= heads]
    for row, size, tokens in product(permutations(devices), sizes, parts(resolution, len(devices))):
        for held in product(*(list(parts(heads, n)) for n in size)):
            ends = [sum(size[:k]) for k in range(len(size) + 1)]
            groups = tuple(
                SequenceGroup(row[a:b], tuple(quantum * n for n in tokens[a:b]), group_heads)
                for a, b, group_heads in zip(ends, ends[1:], held, strict=False)
            )
            for order in ("contiguous", "zigzag"):
                yield SequenceParallel(groups, order)


def deals(devices: Sequence[int], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to give each device to one of `count` pipelines or to none, no pipeline without."""
    for owner in product(range(count + 1), repeat=len(devices)):
        sets = tuple(tuple(d for d, p in zip(devices, owner, strict=True) if p == q) for q in range(count))
        if all(sets):
            yield sets


def plans(problem: Problem, resolution: int) -> Iterator[Plan]:
    """All plans, without interleaving; a schedule says nothing where pipelines have one stage, but how much is held."""
    space, batch, layers = problem.space, problem.workload.global_batch, ((0, problem.model.num_layers),)
    stages = [zero for zero in sharding_stages(problem.workload) if zero < 2]
    shardings = [Sharding(zero, groups) for zero in stages for groups in ("all", "machine")[: zero + 1]]
    most = min(batch, len(problem.usable_devices))
    for count in [space.num_pipelines] if space.num_pipelines else range(1, most + 1):
        for sets in deals(problem.usable_devices, count):
            if max(map(len, sets)) > resolution:
                continue
            for shares in parts(batch, count):
                sizes = [[n for n in space.micro_batch_sizes(batch) if share % n == 0] for share in shares]
                each = [
                    [
                        Pipeline((Stage(layout, layers, (policy,)),), share // size, size)
                        for layout in layouts(problem, devices, resolution)
                        for policy in recompute_policies(problem.workload)
                        for size in own_sizes
                    ]
                    for devices, share, own_sizes in zip(sets, shares, sizes, strict=True)
                ]
                for pipelines, sharding in product(product(*each), shardings):
                    yield Plan(pipelines, ONE_F_ONE_B, sharding)


def best_step_s(problem: Problem, resolution: int) -> float:
    """The least step time of a plan that fits; infinite where none does."""
    model = PlanPricer(problem)
    return min((model.price(plan).objective for plan in plans(problem, resolution)), default=float("inf"))
