"""The ZeRO stages and sharding groups of partitions, and the least number of holders among which states are spread.

From ZeRO-2 on, all pipelines must form one pipeline group.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hexiopt.plan.holdings import Holdings
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SHARDING_GROUPS, sharding_stages

LOCKSTEP = 2  # from this stage on, holders gather and scatter together in every micro-batch
_DEEP = 0.15  # share of draws from ZeRO-2 on, where both are open
_HYBRID = 0.25  # share of draws that shard inside machines only


def without_idle_sharding(plan: Plan, problem: Problem) -> Plan:
    """`plan` without sharding where every parameter has a single holder, so that ZeRO would shard nothing: equal
    price.
    """
    if not plan.sharding.stage or len(plan.pipelines) > 1 or 0 not in sharding_stages(problem.workload):
        return plan
    several = Holdings.of(plan.pipelines).shared_groups(problem.parameters.trained_groups)
    return plan if several else replace(plan, sharding=Sharding())


def requires_lockstep(problem: Problem) -> bool:
    """Whether every plan of `problem` is in lockstep."""
    return min(sharding_stages(problem.workload)) >= LOCKSTEP


def plain_stages(problem: Problem) -> tuple[int, ...]:
    """The ZeRO stages that any partition may have; none where every plan must be in lockstep."""
    return tuple(stage for stage in sharding_stages(problem.workload) if stage < LOCKSTEP)


def first_stage(problem: Problem) -> int:
    """The ZeRO stage to begin with: ZeRO-1 where it may be."""
    return max(plain_stages(problem), default=sharding_stages(problem.workload)[-1])


def passed_bytes(problem: Problem, zero_stage: int, batches: int = 1) -> float:
    """What a ring over many holders sends of each parameter, from each machine, in a step of so many micro-batches.

    Gradients are scattered, in every micro-batch from ZeRO-2 on, and gathered, or the weights once a step, or twice a
    micro-batch in ZeRO-3 (`hexiopt/cost/lockstep.py`).
    """
    gradient_bytes, weight_bytes = problem.workload.states.gradient, problem.workload.states.weight
    scattered = gradient_bytes * (batches if zero_stage >= LOCKSTEP else 1)
    return scattered + (gradient_bytes, weight_bytes, weight_bytes, 2 * weight_bytes * batches)[zero_stage]


def draw_zero_stage(problem: Problem, rng: random.Random, *, aligned: bool) -> int:
    """A ZeRO stage at random, from ZeRO-2 on only for an `aligned` partition or where nothing else is allowed."""
    plain = plain_stages(problem)
    deep = [stage for stage in sharding_stages(problem.workload) if stage >= LOCKSTEP]
    if not plain or (aligned and deep and rng.random() < _DEEP):
        return rng.choice(deep)
    return rng.choice(plain)


def sharding_groups(problem: Problem, stage: int) -> tuple[str, ...]:
    """The sharding groups worth trying at a ZeRO stage."""
    several = len(problem.usable_by_machine) > 1 and problem.space.machine_sharding
    return SHARDING_GROUPS if stage and several else SHARDING_GROUPS[:1]


def draw_sharding_groups(problem: Problem, rng: random.Random, stage: int) -> str:
    """Sharding groups at random, all holders most often."""
    return "machine" if len(sharding_groups(problem, stage)) > 1 and rng.random() < _HYBRID else "all"


def fewest_holders(stages: Iterable[Iterable[Sequence[int]]], machine_of: Sequence[int]) -> int:
    """The fewest TP groups with the same layers that share a machine, over all stages.

    Inside a machine, states are spread over at least that many holders; over more where layers of several stages meet.
    """
    return min(min(Counter(machine_of[group[0]] for group in stage_groups).values()) for stage_groups in stages)


def holders_of(plan: Plan, machine_of: Sequence[int]) -> int:
    """The least number of holders over which the states of a plan are spread."""
    if plan.sharding.groups == "all":
        return len(plan.pipelines)
    stages: dict[object, list[tuple[int, ...]]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            stages.setdefault(stage.layers, []).extend(replica.devices for replica in stage.parallelism.replicas)
    return fewest_holders(stages.values(), machine_of)
