"""Starts in the order in which they are worth a price, by estimates of their step times, which take no steps.

An estimate is that of the completed plan's pipelines, with gradients that cross the interface of the busiest machine:
it ranks, and no plan is judged by it. So hundreds of starts can be looked at where there are steps to price a few.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from solvers.completion.completer import CompletedPlan, PlanCompleter
from solvers.core.partition import DoesNotFit, Partition
from solvers.core.zero import LOCKSTEP, passed_bytes

Start = TypeVar("Start")
_A_STEP = 12  # starts estimated for each step of a limited budget


def in_turns(*families: Iterable[Start]) -> Iterator[Start]:
    """One of each family, again and again, while there are any."""
    left = [iter(family) for family in families]
    while left:
        for family in tuple(left):
            try:
                yield next(family)
            except StopIteration:
                left.remove(family)


def promising_first(
    completer: PlanCompleter, starts: Iterable[Partition], max_steps: int | None, should_continue: Callable[[], bool]
) -> Iterator[Partition]:
    """`starts` by the estimates of their step times, as many as are looked at while `should_continue` says so.

    Those that do not fit follow, by the layers for which there is no room, and then those that the plan space forbids:
    they may lead to plans. With a limit of `max_steps`, starts are limited in proportion.
    """
    found = []
    for number, start in enumerate(islice(starts, None if max_steps is None else _A_STEP * max_steps)):
        found.append((*_rank(completer, start), number, start))
        if not should_continue():
            break
    for *_, start in sorted(found, key=lambda item: item[:3]):
        yield start


def _rank(completer: PlanCompleter, start: Partition) -> tuple[int, float]:
    distance = completer.distance(start)
    if distance:
        return 2, distance
    completed = completer.complete(start)
    if isinstance(completed, DoesNotFit):
        return 1, completed.missing
    return 0, estimated_step_s(completer.problem, completed)


def estimated_step_s(problem: Problem, completed: CompletedPlan) -> float:
    """The estimate of its pipelines, and gradient sync: after them, or beside them from ZeRO-2 on."""
    batches = max(pipeline.num_micro_batches for pipeline in completed.plan.pipelines)
    sync_s = _layers_passed(problem, completed.plan) * problem.parameters.layer_params
    zero_stage = completed.plan.sharding.stage
    sync_s *= passed_bytes(problem, zero_stage, batches)
    return max(completed.estimate_s, sync_s) if zero_stage >= LOCKSTEP else completed.estimate_s + sync_s


def _layers_passed(problem: Problem, plan: Plan) -> float:
    """The most layers that an interface, or the links inside a machine, pass to other holders, over its bytes/s."""
    cluster = problem.cluster
    held, twice = defaultdict[int, int](int), defaultdict[int, int](int)  # by machine, layers as the bits of a number
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            layers = sum((1 << end) - (1 << first) for first, end in stage.layers)
            for replica in stage.parallelism.replicas:
                m = int(cluster.machine_of[replica.devices[0]])
                twice[m] |= held[m] & layers
                held[m] |= layers
    anywhere = shared = 0
    for layers in held.values():
        shared |= anywhere & layers
        anywhere |= layers
    most = 0.0
    for m, layers in held.items():
        machine = cluster.machines[m]
        outside = (layers & shared).bit_count() / (machine.nic_bandwidth_bytes_per_s * machine.num_interfaces)
        most = max(most, outside, twice[m].bit_count() / machine.intra_bandwidth_bytes_per_s)
    return most
