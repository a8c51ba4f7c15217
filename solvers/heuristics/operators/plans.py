"""Operators on completed plans: single layers, micro-batches, recompute policies, samples of replicas, sharding.

To add one, write a function `(near, priced, rng) -> plan or None` and a line of `PLAN_OPERATORS`, as in `table.py`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import TypeAlias

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.plan.parallelism import ExpertParallel, Replicated
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import layer_ranges, ranges_of, recompute_first, sharding_stages
from hexiopt.problem.workload import RECOMPUTE_POLICIES
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.schedule import positions
from solvers.completion.completer import PlanCompleter
from solvers.completion.executors import works_of
from solvers.completion.experts import may_share_unevenly, with_stage
from solvers.completion.pricing import PricedPlan
from solvers.core.interleaving import may_interleave
from solvers.core.operators import Operator
from solvers.core.zero import LOCKSTEP, holders_of, sharding_groups
from solvers.heuristics.operators.experts import share_experts, shares_unevenly, shift_expert


class PlanNeighbourhood:
    """What operators on plans know: the problem, the pricer, and the completer that assigns policies to stages."""

    def __init__(self, completer: PlanCompleter) -> None:
        self.completer, self.pricer, self.problem = completer, completer.pricer, completer.problem
        self.policies = self.pricer.policies()
        self.machine_of: list[int] = self.problem.cluster.machine_of.tolist()


def shift_layer(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Move a layer across a stage boundary, in one pipeline or in all that are cut there; policies follow memory."""
    plan = priced.plan
    p = rng.randrange(len(plan.pipelines))
    if len(plan.pipelines[p].stages) < 2:
        return None
    s = rng.randrange(len(plan.pipelines[p].stages) - 1)
    change = rng.choice((-1, 1))
    if rng.random() < 0.3:  # aim at a boundary of another pipeline
        other = rng.choice(plan.pipelines)
        ends = [stage.layers[0][1] for stage in other.stages[:-1]]
        here = plan.pipelines[p].stages[s].layers[0][1]
        if ends:
            change = min((end - here for end in ends), key=abs) or change
    chosen = [p]
    together = not near.problem.space.uneven_structure or plan.sharding.stage >= LOCKSTEP
    if together or rng.random() < 0.4:
        shape = [stage.layers for stage in plan.pipelines[p].stages]
        chosen = [k for k, q in enumerate(plan.pipelines) if [stage.layers for stage in q.stages] == shape]
    pipelines = list(plan.pipelines)
    for k in chosen:
        moved = _with_boundary(near, plan, pipelines[k], s, change)
        if moved is None:
            return None
        pipelines[k] = moved
    return replace(plan, pipelines=tuple(pipelines))


def _with_boundary(near: PlanNeighbourhood, plan: Plan, pipeline: Pipeline, s: int, change: int) -> Pipeline | None:
    """`pipeline` with `change` more layers in stage s and fewer in the next; where interleaved, all layer ranges
    follow, or, where they may be uneven, the longest of those that give.
    """
    chunks, counts = pipeline.num_chunks, [stage.num_layers for stage in pipeline.stages]
    if near.problem.space.uneven_chunks:
        parts, k = _parts(pipeline), s + (change > 0)
        giving = max(range(k, len(parts), len(counts)), key=lambda part: parts[part])
        taking = giving + (-1 if change > 0 else 1)
        parts[giving], parts[taking] = parts[giving] - abs(change), parts[taking] + abs(change)
        if parts[giving] < 1:
            return None
        ranges = list(ranges_of(parts, len(counts)))
    else:
        counts[s], counts[s + 1] = counts[s] + change, counts[s + 1] - change
        if min(counts) < chunks:
            return None
        ranges = layer_ranges(counts, chunks)
    # Both stages get policies for their new layers below.
    stages = [
        replace(stage, layers=own, recompute=(stage.policy,) if at in (s, s + 1) else stage.recompute)
        for at, (stage, own) in enumerate(zip(pipeline.stages, ranges, strict=True))
    ]
    for at in (s, s + 1):
        fitted = _fit(near, plan, pipeline, at, stages[at])
        if fitted is None:
            return None
        stages[at] = fitted
    return replace(pipeline, stages=tuple(stages))


def _parts(pipeline: Pipeline) -> list[int]:
    """Layers of each virtual stage, in the order of the model."""
    return [own[1] - own[0] for turn in zip(*(s.layers for s in pipeline.stages), strict=True) for own in turn]


def shift_chunk_layer(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Move a layer from one range of a stage to another, in one pipeline or in all that are cut there."""
    plan = priced.plan
    pipeline = rng.choice(plan.pipelines)
    count, chunks = len(pipeline.stages), pipeline.num_chunks
    if chunks < 2:
        return None
    s, (giving, taking) = rng.randrange(count), rng.sample(range(chunks), 2)
    parts = _parts(pipeline)
    parts[giving * count + s] -= 1
    parts[taking * count + s] += 1
    if parts[giving * count + s] < 1:
        return None
    together = not near.problem.space.uneven_structure or rng.random() < 0.4
    shape, ranges = [stage.layers for stage in pipeline.stages], ranges_of(parts, count)

    def moved(one: Pipeline) -> Pipeline:
        if one is not pipeline and not (together and [stage.layers for stage in one.stages] == shape):
            return one
        stages = [replace(stage, layers=own) for stage, own in zip(one.stages, ranges, strict=True)]
        return replace(one, stages=tuple(stages))

    return replace(plan, pipelines=tuple(map(moved, plan.pipelines)))


def _fit(near: PlanNeighbourhood, plan: Plan, pipeline: Pipeline, s: int, stage: Stage) -> Stage | None:
    """`stage` with the fastest policies that fit (of its own policy set, where stages may not differ); None where none
    does.
    """
    count = len(pipeline.stages)
    places = positions(count, pipeline.num_micro_batches, pipeline.num_chunks, pipeline.depths)
    held = in_flight(plan.schedule, places[s])
    holders = holders_of(plan, near.machine_of)
    if plan.sharding.groups == "all":
        holders += len(stage.parallelism.replicas) - 1
    shards = StateSharding(plan.sharding.stage, holders)
    size = pipeline.micro_batch_size
    if isinstance(stage.parallelism, ExpertParallel):
        return stage
    works = works_of(map(near.pricer.tp_group, stage.parallelism.executors), stage.parallelism.samples(size), size)
    splitter = near.completer.splitter(stage.policy)
    options = splitter.options[works, s == 0, s == count - 1, size, held, shards]
    if len(options.times) < stage.num_layers:
        return None
    return replace(stage, recompute=options.recompute(stage.num_layers))


def change_recompute(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Change the policy of a stage, or of one more of its layers."""
    plan = priced.plan
    p = rng.randrange(len(plan.pipelines))
    pipeline = plan.pipelines[p]
    s = rng.randrange(len(pipeline.stages))
    stage, policy = pipeline.stages[s], rng.choice(near.policies)
    recompute: tuple[str, ...] = (policy,)
    if near.problem.space.recompute_per_layer and rng.random() < 0.5:
        recompute = _with_one(stage.recompute, policy, stage.num_layers)
    if recompute == stage.recompute:
        return None
    return with_stage(plan, p, s, replace(stage, recompute=recompute))


def change_sharding_groups(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Shard inside machines instead of over all holders, or the reverse."""
    plan = priced.plan
    other = replace(plan.sharding, groups="all" if plan.sharding.groups == "machine" else "machine")
    return None if other.broken_rule(plan.pipelines, plan.schedule) else replace(plan, sharding=other)


def change_zero_stage(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Another ZeRO stage: which is best depends on where the layers are."""
    plan = priced.plan
    stage = rng.choice(sharding_stages(near.problem.workload))
    other = Sharding(stage, plan.sharding.groups if stage else "all")
    if other == plan.sharding or other.broken_rule(plan.pipelines, plan.schedule):
        return None
    return replace(plan, sharding=other)


def shift_sample(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Move a sample of each micro-batch from one replica of a stage to another."""
    plan = priced.plan
    places = [
        (p, s)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if isinstance(stage.parallelism, Replicated | ExpertParallel) and len(stage.parallelism.shares) > 1
    ]
    p, s = rng.choice(places)
    stage = plan.pipelines[p].stages[s]
    shared = stage.parallelism
    assert isinstance(shared, Replicated | ExpertParallel)
    samples = list(shared.shares)
    a, b = rng.sample(range(len(samples)), 2)
    moved = shared.waves if isinstance(shared, ExpertParallel) else 1
    if samples[a] <= moved:
        return None
    samples[a], samples[b] = samples[a] - moved, samples[b] + moved
    return with_stage(plan, p, s, replace(stage, parallelism=shared.with_shares(samples)))


def shift_micro_batch(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Move a micro-batch, or as many as the schedule requires, from the slowest pipeline to another with the same
    size.
    """
    plan = priced.plan
    ends = [pipeline.end_s for pipeline in priced.cost.pipelines]
    a = max(range(len(ends)), key=ends.__getitem__)
    b = rng.randrange(len(ends))
    giver, taker = plan.pipelines[a], plan.pipelines[b]
    moved = lcm(*(plan.schedule.micro_batch_multiple(len(own.stages), own.num_chunks) for own in (giver, taker)))
    if a == b or giver.num_micro_batches <= moved or giver.micro_batch_size != taker.micro_batch_size:
        return None
    pipelines = list(plan.pipelines)
    pipelines[a] = giver.with_micro_batches(giver.num_micro_batches - moved)
    pipelines[b] = taker.with_micro_batches(taker.num_micro_batches + moved)
    return replace(plan, pipelines=tuple(pipelines))


def _with_one(recompute: tuple[str, ...], policy: str, num_layers: int) -> tuple[str, ...]:
    """The policies of `num_layers` layers after one more of them gets `policy`; unchanged where they have two
    others.
    """
    smaller, faster = recompute[0], recompute[-1]
    num_smaller = recompute.count(smaller) if smaller != faster else 0
    if smaller == faster:
        ranks = {name: k for k, name in enumerate(RECOMPUTE_POLICIES)}
        if ranks[policy] > ranks[faster]:
            return recompute_first(policy, 1, faster, num_layers)
        return recompute_first(smaller, num_layers - 1, policy, num_layers)
    if policy == smaller:
        return recompute_first(smaller, num_smaller + 1, faster, num_layers)
    return recompute_first(smaller, num_smaller - 1, faster, num_layers) if policy == faster else recompute


# Where they apply.


def _switched_on(switch: str) -> Callable[[Problem], bool]:
    """A condition: the plan space has this switch on."""
    return lambda problem: bool(getattr(problem.space, switch))


def _several_policies(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    return len(near.policies) > 1


def _split_batch(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    return len(priced.plan.pipelines) > 1 and priced.plan.sharding.stage < LOCKSTEP


def _may_have_uneven_chunks(problem: Problem) -> bool:
    return problem.space.uneven_chunks and may_interleave(problem)


def _interleaved(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    return any(pipeline.num_chunks > 1 for pipeline in priced.plan.pipelines)


def _several_groups(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    plan = priced.plan
    return len(sharding_groups(near.problem, plan.sharding.stage)) > 1 and len(plan.pipelines) > 1


def _replicated(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    return any(
        isinstance(stage.parallelism, Replicated | ExpertParallel) and len(stage.parallelism.shares) > 1
        for pipeline in priced.plan.pipelines
        for stage in pipeline.stages
    )


def _shared_states(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    several_stages = len(sharding_stages(near.problem.workload)) > 1
    return several_stages and (len(priced.plan.pipelines) > 1 or _replicated(near, priced))


def _share_experts(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    stages = near.pricer.features.stages
    return None if stages is None else share_experts(stages, priced, rng)


def _shift_expert(near: PlanNeighbourhood, priced: PricedPlan, rng: random.Random) -> Plan | None:
    stages = near.pricer.features.stages
    return None if stages is None else shift_expert(stages, priced, rng)


def _shares_unevenly(near: PlanNeighbourhood, priced: PricedPlan) -> bool:
    return shares_unevenly(priced.plan)


PlanOperator: TypeAlias = Operator[PlanNeighbourhood, PricedPlan, Plan]
PLAN_OPERATORS: tuple[PlanOperator, ...] = (
    Operator("shift_layer", 3, shift_layer, _switched_on("uneven_layers")),
    Operator("shift_chunk_layer", 1, shift_chunk_layer, _may_have_uneven_chunks, _interleaved),
    Operator("change_recompute", 1, change_recompute, _switched_on("recompute_per_stage"), _several_policies),
    Operator("shift_micro_batch", 1, shift_micro_batch, _switched_on("uneven_batch"), _split_batch),
    Operator("change_sharding_groups", 1, change_sharding_groups, applies=_several_groups),
    Operator("shift_sample", 1, shift_sample, applies=_replicated),
    Operator("change_zero_stage", 1, change_zero_stage, applies=_shared_states),
    Operator("share_experts", 3, _share_experts, may_share_unevenly),
    Operator("shift_expert", 3, _shift_expert, may_share_unevenly, _shares_unevenly),
)
