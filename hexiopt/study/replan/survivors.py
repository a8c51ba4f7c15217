"""What is left of a plan after a change of its cluster: whole pipelines, and those that go on without what was lost.

They move little and take no search. The batch is shared in proportion to the pipelines' speeds after the change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from math import gcd

from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import ExpertParallel, Replica, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import layer_ranges, recompute_policies
from hexiopt.schedules.registry import DEFAULT_SCHEDULE
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Pricer
from hexiopt.solving.naming import renumber
from hexiopt.study.solution import PlacedPlan

_LEAST_MEMORY = "full"


class _Leaner(Enum):
    """Where a mended plan recomputes all: nowhere more than before, in stages that hold more layers a device than
    before, or everywhere.
    """

    NOWHERE, GROWN, EVERYWHERE = range(3)


def whole_pipelines(before: PlacedPlan, pricer: Pricer) -> Plan | None:
    """The pipelines of a plan whose devices are all left, with the batch shared by their speed, or as it was.

    None where that is no plan for the problem of `pricer`: no pipeline is whole, the batch cannot be shared, or memory
    is exceeded.
    """
    numbers = _new_numbers(before, pricer.problem)
    return _fastest(before, pricer, numbers, [(_intact_pipelines(before, numbers), before.schedule)])


def mend(before: PlacedPlan, pricer: Pricer) -> Plan | None:
    """All pipelines of a plan without lost devices: TP groups become smaller, stages and replicas without a device end,
    and the layers are shared by the devices that a stage has left.

    None where that is no plan for the problem of `pricer`, and where no pipeline is broken.
    """
    problem = pricer.problem
    numbers = _new_numbers(before, problem)
    if len(_intact_pipelines(before, numbers)) == len(before.pipelines):
        return None
    policies, variants = recompute_policies(problem.workload), []
    for schedule in dict.fromkeys((before.schedule, DEFAULT_SCHEDULE)):
        for leaner in _Leaner if _LEAST_MEMORY in policies else (_Leaner.NOWHERE,):
            single_range = schedule is not before.schedule
            survivors = (_survivor(pipeline, problem, numbers, leaner, single_range) for pipeline in before.pipelines)
            variants.append(([survivor for survivor in survivors if survivor is not None], schedule))
    return _fastest(before, pricer, numbers, variants)


def _new_numbers(before: PlacedPlan, problem: Problem) -> dict[int, int]:
    """The devices of `before` that `problem` may use: old numbers to those in its cluster."""
    names = {problem.cluster.device_name(device): device for device in problem.usable_devices}
    now = {device: names.get(before.problem.cluster.device_name(device)) for device in before.devices()}
    return {old: new for old, new in now.items() if new is not None}


def _intact_pipelines(before: Plan, numbers: Mapping[int, int]) -> list[Pipeline]:
    return [
        pipeline
        for pipeline in before.pipelines
        if all(d in numbers for stage in pipeline.stages for d in stage.devices)
    ]


def _fastest(
    before: Plan, pricer: Pricer, numbers: Mapping[int, int], variants: Sequence[tuple[Sequence[Pipeline], Schedule]]
) -> Plan | None:
    """The fastest plan of `variants` for the problem of `pricer`, None where none fits. A variant is pipelines, whose
    devices have the numbers of `before`, and their schedule."""
    best: tuple[float, Plan] | None = None
    for pipelines, schedule in variants:
        for plan in _plans(before, pricer, numbers, pipelines, schedule):
            try:
                cost = None if check(pricer.problem, plan) else pricer.price(plan)
            except InputError:  # such as a number of micro-batches that the schedule does not take
                continue
            if cost is not None and cost.fits and (best is None or cost.step_time_s < best[0]):
                best = cost.step_time_s, plan
    return None if best is None else best[1]


def _plans(
    before: Plan, pricer: Pricer, numbers: Mapping[int, int], pipelines: Sequence[Pipeline], schedule: Schedule
) -> Iterator[Plan]:
    """The plan of `pipelines`, with the batch as it is, and then with the batch shared anew."""
    if not pipelines:
        return
    groups = before.sharding.groups
    if not isinstance(groups, str):
        used = {device for pipeline in pipelines for stage in pipeline.stages for device in stage.devices}
        groups = tuple(rest for group in groups if (rest := tuple(device for device in group if device in used)))
    try:
        plan = renumber(Plan(tuple(pipelines), schedule, Sharding(before.sharding.stage, groups)), numbers)
        yield plan
        ends_s = [pipeline.end_s for pipeline in pricer.price(plan).pipelines]
        shared = _share_batch(plan.pipelines, ends_s, pricer.problem.workload.global_batch)
        if shared is not None:
            yield replace(plan, pipelines=shared)
    except InputError:
        return


def _share_batch(pipelines: Sequence[Pipeline], ends_s: Sequence[float], batch: int) -> tuple[Pipeline, ...] | None:
    """The pipelines with as many micro-batches as let all end at about the same time, where they end at `ends_s` with
    those that they have; None where they cannot sum to `batch`."""
    # interleaved stages take micro-batches in turns of as many as there are stages
    turns = [len(pipeline.stages) if pipeline.num_chunks > 1 else 1 for pipeline in pipelines]
    sizes = [turn * pipeline.micro_batch_size for turn, pipeline in zip(turns, pipelines, strict=True)]
    per_sequence_s = [end_s / pipeline.num_sequences for end_s, pipeline in zip(ends_s, pipelines, strict=True)]
    counts = [1] * len(sizes)
    left = batch - sum(sizes)
    if left < 0 or left % gcd(*sizes):
        return None
    while left:
        # the pipeline that would end first with one more, of those whose micro-batch still leaves a sum
        fitting = [k for k, size in enumerate(sizes) if size <= left]
        k = min(fitting, key=lambda k: ((counts[k] + 1) * sizes[k] * per_sequence_s[k], k), default=None)
        if k is None:
            return None
        counts[k] += 1
        left -= sizes[k]
    shares = zip(pipelines, turns, counts, strict=True)
    return tuple(pipeline.with_micro_batches(turn * count) for pipeline, turn, count in shares)


def _survivor(
    pipeline: Pipeline, problem: Problem, numbers: Mapping[int, int], leaner: _Leaner, single_range: bool
) -> Pipeline | None:
    """A pipeline without lost devices, which recomputes all where `leaner` says, with one layer range a stage if
    `single_range`; None where no device of it is left, or where it divides tokens or states experts and lost any."""
    if any(isinstance(stage.parallelism, SequenceParallel | ExpertParallel) for stage in pipeline.stages):
        whole = all(device in numbers for stage in pipeline.stages for device in stage.devices)
        return pipeline if whole else None
    machines, machine_of = problem.cluster.machines, problem.cluster.machine_of

    def degrees_at(device: int) -> tuple[int, ...]:
        return problem.space.allowed_tp(machines[int(machine_of[numbers[device]])].num_gpus)

    held, weights = [], []
    for stage in pipeline.stages:
        replicas = _surviving_replicas(stage, numbers, degrees_at)
        if replicas:
            now, then = sum(len(replica.devices) for replica in replicas), len(stage.devices)
            held.append((stage, replicas))
            weights.append(stage.num_layers * now / then)
    if not held or len(held) > pipeline.num_layers:
        return None
    chunks = 1 if single_range or len(held) == 1 else min(pipeline.num_chunks, pipeline.num_layers // len(held))
    ranges = layer_ranges(_in_proportion(weights, pipeline.num_layers, chunks), chunks)
    stages = []
    for (stage, replicas), layers in zip(held, ranges, strict=True):
        now, then = sum(len(replica.devices) for replica in replicas), len(stage.devices)
        grown = sum(end - first for first, end in layers) * then > stage.num_layers * now
        lean = leaner is _Leaner.EVERYWHERE or (grown and leaner is _Leaner.GROWN)
        stages.append(Stage.of_replicas(replicas, layers, (_LEAST_MEMORY if lean else stage.recompute[0],)))
    return replace(pipeline, stages=tuple(stages))


def _surviving_replicas(
    stage: Stage, numbers: Mapping[int, int], degrees_at: Callable[[int], tuple[int, ...]]
) -> tuple[Replica, ...]:
    """The replicas of a stage with the devices that are left; samples of those that end go to the others in turn."""
    survivors, lost = [], 0
    for replica in stage.parallelism.replicas:
        devices = tuple(device for device in replica.devices if device in numbers)
        if not devices:
            lost += replica.samples or 0
            continue
        degree = max(degree for degree in degrees_at(devices[0]) if degree <= len(devices))
        whole = degree == len(replica.devices)
        survivors.append(Replica(devices[:degree], replica.samples, replica.heads if whole else None))
    for k in range(lost if survivors else 0):
        at = k % len(survivors)
        survivors[at] = replace(survivors[at], samples=(survivors[at].samples or 0) + 1)
    return tuple(survivors)


def _in_proportion(weights: Sequence[float], total: int, least: int) -> list[int]:
    """Whole numbers of at least `least` that sum to `total`, about in proportion to `weights`."""
    counts = [least] * len(weights)
    for _ in range(total - sum(counts)):
        k = min(range(len(weights)), key=lambda k: ((counts[k] + 1) / weights[k], k))
        counts[k] += 1
    return counts
