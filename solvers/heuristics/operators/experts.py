"""Operators where replicas may share experts in any numbers: stages become such, experts move between devices."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.plan.parallelism import ExpertParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from solvers.completion.experts import balance, groups_of, undivided, with_stage
from solvers.completion.pricing import PricedPlan
from solvers.core.zero import LOCKSTEP

_ALONE = 0.25  # chance that devices of the slower type get experts alone
_PIPELINES, _STAGES = 0.4, 0.4  # chances that two pipelines, or two stages, are joined


def shares_unevenly(plan: Plan) -> bool:
    """Whether a stage of `plan` shares experts so."""
    return any(isinstance(stage.parallelism, ExpertParallel) for line in plan.pipelines for stage in line.stages)


def share_experts(stages: StageModel, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Let the replicas of a stage, of two that follow each other, or of those in the same place of two pipelines, share
    its experts; those of the slower type may get experts alone."""
    plan, alone = _with_plain_groups(stages.problem, priced.plan), rng.random() < _ALONE
    if plan is None or any(line.num_chunks > 1 or line.depths for line in plan.pipelines):
        return None
    space = stages.problem.space
    pairs = [] if space.num_pipelines is not None else _alike(plan)
    several = [p for p, line in enumerate(plan.pipelines) if len(line.stages) > 1 and space.num_stages is None]
    draw = rng.random()
    if pairs and draw < _PIPELINES:
        joined = _join_pipelines(stages.problem, plan, *rng.choice(pairs))
    elif several and draw < _PIPELINES + _STAGES:
        p = rng.choice(several)
        joined = _join_stages(stages.problem, plan, p, rng.randrange(len(plan.pipelines[p].stages) - 1), 2)
    else:
        p = rng.randrange(len(plan.pipelines))
        joined = _join_stages(stages.problem, plan, p, rng.randrange(len(plan.pipelines[p].stages)), 1)
    if joined is None:
        return None
    for p, s in joined.places:
        balanced = balance(stages, joined.plan, p, s, alone)
        if balanced is None:
            return None
        joined = joined._replace(plan=with_stage(joined.plan, p, s, balanced))
    return joined.plan


class _Joined(NamedTuple):
    """A plan with replicas that share experts in the stages at `places` (pipeline, stage), in numbers yet to be
    chosen."""

    plan: Plan
    places: Sequence[tuple[int, int]]


def _with_plain_groups(problem: Problem, plan: Plan) -> Plan | None:
    """`plan` under a sharding that stages which share experts may have; None where the workload allows none."""
    if plan.schedule.splits:
        return None
    if plan.sharding.stage < LOCKSTEP and plan.sharding.groups == "all":
        return plan
    stage = min(plan.sharding.stage, 1)
    return replace(plan, sharding=Sharding(stage)) if stage in sharding_stages(problem.workload) else None


def _join_stages(problem: Problem, plan: Plan, p: int, s: int, count: int) -> _Joined | None:
    """`count` stages of pipeline `p` from `s` on as one."""
    line = plan.pipelines[p]
    parts = line.stages[s : s + count]
    groups = [group for part in parts for group in groups_of(part.parallelism)]
    roomy = _with_room(problem, line, len(groups))
    if roomy is None or len(groups) < 2:
        return None
    size, span = roomy.micro_batch_size, (parts[0].layers[0][0], parts[-1].layers[0][1])
    joined = Stage(undivided(groups, size), (span,), parts[0].recompute[:1])
    lines = list(plan.pipelines)
    lines[p] = replace(roomy, stages=(*roomy.stages[:s], joined, *roomy.stages[s + count :]))
    return _Joined(replace(plan, pipelines=tuple(lines)), [(p, s)])


def _join_pipelines(problem: Problem, plan: Plan, a: int, b: int) -> _Joined | None:
    """Pipelines `a` and `b` as one, with the layers of the first."""
    line, other = plan.pipelines[a], plan.pipelines[b]
    sequences = line.num_sequences + other.num_sequences
    groups = [
        [*groups_of(one.parallelism), *groups_of(two.parallelism)]
        for one, two in zip(line.stages, other.stages, strict=True)
    ]
    least, both = max(map(len, groups)), line.micro_batch_size + other.micro_batch_size
    sizes = [n for n in problem.space.micro_batch_sizes(problem.workload.global_batch) if sequences % n == 0]
    size = max((n for n in sizes if n <= both), default=0)
    if size < least:
        size = min((n for n in sizes if n >= least), default=0)
    if not size:
        return None
    stages = [
        replace(stage, parallelism=undivided(some, size), recompute=stage.recompute[:1])
        for stage, some in zip(line.stages, groups, strict=True)
    ]
    rest = [each for k, each in enumerate(plan.pipelines) if k not in (a, b)]
    joined = Pipeline(tuple(stages), sequences // size, size)
    return _Joined(replace(plan, pipelines=(joined, *rest)), [(0, s) for s in range(len(stages))])


def _alike(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of pipelines with as many stages."""
    lengths = [len(line.stages) for line in plan.pipelines]
    return [(a, b) for b in range(len(lengths)) for a in range(b) if lengths[a] == lengths[b]]


def _with_room(problem: Problem, line: Pipeline, replicas: int) -> Pipeline | None:
    """`line` with micro-batches of at least as many sequences as there are `replicas`; None where sizes do not allow
    it."""
    sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
    size = next((n for n in sizes if n >= max(replicas, line.micro_batch_size) and line.num_sequences % n == 0), None)
    resized = None if size is None else line.resize(size)
    return None if resized is None else resized.with_micro_batches(line.num_sequences // resized.micro_batch_size)


def shift_expert(stages: StageModel, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Move experts of a stage from one device to another: one, or as many as double from one draw to the next."""
    plan = priced.plan
    places = [
        (p, s)
        for p, line in enumerate(plan.pipelines)
        for s, stage in enumerate(line.stages)
        if isinstance(stage.parallelism, ExpertParallel) and len(stage.devices) > 1
    ]
    if not places:
        return None
    p, s = rng.choice(places)
    stage = plan.pipelines[p].stages[s]
    group = stage.parallelism
    assert isinstance(group, ExpertParallel)
    experts = list(group.experts)
    a, b = rng.sample(range(len(experts)), 2)
    moved = min(experts[a], 1 << rng.randrange(5))
    experts[a], experts[b] = experts[a] - moved, experts[b] + moved
    given = iter(experts)
    held = [tuple(next(given) for _ in member.devices) for member in group.members]
    if any(not member.samples and 0 in some for member, some in zip(group.members, held, strict=True)):
        return None
    members = tuple([replace(member, experts=some) for member, some in zip(group.members, held, strict=True)])
    return with_stage(plan, p, s, replace(stage, parallelism=replace(group, members=members)))
