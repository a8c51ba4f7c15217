"""The best plan of a tiny problem by looking at all; shares only the cost model, space and check with solvers."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica, Replicated, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, broken_rule
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SHARDING_GROUPS, layer_ranges, recompute_policies, schedules, sharding_stages

DeviceGroup = tuple[int, ...]


class TooManyError(Exception):
    """There is more to look at than asked for."""


def every_plan(problem: Problem, most: int = 1 << 40) -> Iterator[Plan]:
    """Every plan of the whole plan space, under all names of devices; nothing is left out, nothing is clever.

    Raises TooManyError beyond `most` sets of pipelines, whether they make a plan or not.
    """
    batch, devices = problem.workload.global_batch, problem.usable_devices
    assert len(devices) <= 4, "an oracle is for tiny problems"
    for count in range(1, len(devices) + 1):
        for used in itertools.combinations(devices, count):
            for blocks in _partitions(used):
                pipelines = [
                    [p for line in _lines(problem, block) for p in _pipelines(problem, line)] for block in blocks
                ]
                for chosen in itertools.product(*pipelines):
                    most -= 1
                    if most < 0:
                        raise TooManyError
                    if sum(pipeline.num_sequences for pipeline in chosen) == batch:
                        yield from _whole_plans(problem, chosen)


def _whole_plans(problem: Problem, pipelines: tuple[Pipeline, ...]) -> Iterator[Plan]:
    """The plans of these pipelines that obey every rule."""
    for schedule in schedules(problem.workload):
        for stage in sharding_stages(problem.workload):
            for groups in SHARDING_GROUPS if stage else ("all",):
                if broken_rule(pipelines, schedule, Sharding(stage, groups)) is None:
                    plan = Plan(pipelines, schedule, Sharding(stage, groups))
                    if not check(problem, plan):
                        yield plan


def _lines(problem: Problem, devices: Sequence[int]) -> Iterator[tuple[tuple[DeviceGroup, ...], ...]]:
    """Devices in any order, cut into stages, those into replicas, those into TP groups."""
    for order in itertools.permutations(devices):
        for cuts in itertools.product(("rank", "replica", "stage"), repeat=len(order) - 1):
            line = [[[order[0]]]]
            for device, cut in zip(order[1:], cuts, strict=True):
                if cut == "rank":
                    line[-1][-1].append(device)
                elif cut == "replica":
                    line[-1].append([device])
                else:
                    line.append([[device]])
            if len(line) <= problem.model.num_layers and all(_may_hold(problem, stage) for stage in line):
                yield tuple(tuple(map(tuple, stage)) for stage in line)


def _may_hold(problem: Problem, stage: Sequence[Sequence[int]]) -> bool:
    """Whether a stage may have these groups: of one, the devices may be replicas that share experts over machines."""
    return all(_is_group(problem, g) for g in stage) or (problem.model.shares_experts and len(stage) == 1)


def holders(problem: Problem, groups: Sequence[DeviceGroup], size: int) -> list[TensorParallel | Replicated]:
    """All stages on these groups for micro-batches of `size`: replicas with any samples, or one group of replicas that
    share experts, of any TP degree."""
    stages: list[TensorParallel | Replicated] = []
    if all(_is_group(problem, group) for group in groups):
        stages += [Replicated(tuple(map(Replica, groups, samples))) for samples in sums(size, len(groups))]
    if len(groups) == 1 and problem.model.shares_experts:
        count = len(groups[0])
        degrees = [t for t in range(1, count) if count % t == 0 and size % (count // t) == 0]
        stages += [TensorParallel(groups[0], None, degree) for degree in degrees]
    return stages


def _pipelines(problem: Problem, line: tuple[tuple[DeviceGroup, ...], ...]) -> Iterator[Pipeline]:
    """All pipelines of a line: layers, policies, samples, micro-batches."""
    layers, batch = problem.model.num_layers, problem.workload.global_batch
    cuts = [
        tuple(layer_ranges(held, chunks))
        for chunks in range(1, layers + 1)
        for held in sums(layers, len(line))
        if min(held) >= chunks
    ]
    for size in problem.space.micro_batch_sizes(batch):
        deals = [holders(problem, stage, size) for stage in line]
        for ranges, *given in itertools.product(cuts, *deals):
            each = [_recomputes(problem, sum(end - first for first, end in stage_ranges)) for stage_ranges in ranges]
            for chosen in itertools.product(*each):
                stages = tuple(
                    Stage(parallelism, stage_ranges, recompute)
                    for parallelism, stage_ranges, recompute in zip(given, ranges, chosen, strict=True)
                )
                for count in range(1, batch // size + 1):
                    yield Pipeline(stages, count, size)


def _recomputes(problem: Problem, num_layers: int) -> list[tuple[str, ...]]:
    """One policy, or two, the leaner one on the first layers."""
    policies = recompute_policies(problem.workload)
    recomputes: list[tuple[str, ...]] = [(policy,) for policy in policies]
    if problem.space.recompute_per_layer:
        for faster, smaller in itertools.combinations(policies, 2):
            recomputes += [(smaller,) * n + (faster,) * (num_layers - n) for n in range(1, num_layers)]
    return recomputes


def sums(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ordered whole numbers from 1 that sum to `total`."""
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [tuple(end - first for first, end in itertools.pairwise((0, *inner_cuts, total))) for inner_cuts in cuts]


def _is_group(problem: Problem, group: Sequence[int]) -> bool:
    machines = {int(problem.cluster.machine_of[d]) for d in group}
    return len(machines) == 1 and len(group) in problem.space.allowed_tp(
        problem.cluster.machines[machines.pop()].num_gpus
    )


def _partitions(items: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """All set partitions."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield [[first], *parts]
        for k in range(len(parts)):
            yield [*parts[:k], [first, *parts[k]], *parts[k + 1 :]]
