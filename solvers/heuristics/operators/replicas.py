"""Operators that turn stages, pipelines and TP groups into replicas, and their inverses.

A TP group joins another stage as a replica, in its own or another pipeline, and leaves it again; parallel pipelines
become replicas of one pipeline and separate again; a TP group splits into replicas, equal or not, and replicas merge
into one TP group.
"""

import random
from itertools import combinations

from solvers.core.partition import Partition, PipelineGroup
from solvers.heuristics.operators.neighbourhood import Neighbourhood, PipelineGroups, StageGroups, replace_groups


def pipelines_to_replicas(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """The pipelines of a group, or of two groups of equal length, become one pipeline whose stages are replicated."""
    chosen = [rng.randrange(len(partition.pipeline_groups))]
    first = partition.pipeline_groups[chosen[0]]
    if first.replicated or first.width == 1 or rng.random() < 0.5:
        partners = [
            at
            for at, other in enumerate(partition.pipeline_groups)
            if at != chosen[0] and len(other.stages) == len(first.stages)
        ]
        if not partners:
            return None
        chosen.append(rng.choice(partners))
    pipeline_groups = [partition.pipeline_groups[at] for at in chosen]
    stages = [
        sum(same_stage, start=())
        for same_stage in zip(*(pipeline_group.stages for pipeline_group in pipeline_groups), strict=True)
    ]
    # Each replica has as many samples as before, or as few as possible.
    size = (
        sum(pipeline_group.width * pipeline_group.micro_batch_size for pipeline_group in pipeline_groups)
        if rng.random() < 0.5
        else 1
    )
    pipeline = near.pipeline(stages, size)
    return None if pipeline is None else replace_groups(partition, dict.fromkeys(chosen, ()), [pipeline])


def replicas_to_pipelines(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A pipeline whose stages all have the same number of replicas becomes that many pipelines."""
    at = _replicated(partition, rng)
    if at is None:
        return None
    pipeline_group = partition.pipeline_groups[at]
    width = len(pipeline_group.stages[0])
    if any(len(stage_groups) != width for stage_groups in pipeline_group.stages):
        return None
    size = max((n for n in near.sizes if n * width <= pipeline_group.micro_batch_size), default=near.sizes[0])
    if all(len(set(map(len, stage_groups))) == 1 for stage_groups in pipeline_group.stages):
        return replace_groups(partition, {at: ()}, [PipelineGroup(pipeline_group.stages, size)])
    pipelines = [
        PipelineGroup(tuple((stage_groups[k],) for stage_groups in pipeline_group.stages), size) for k in range(width)
    ]
    return replace_groups(partition, {at: ()}, pipelines)


def join_as_replica(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A stage, or one of its replicas, becomes a replica of another stage, among pipelines that are groups of one."""
    places = [
        (b, s)
        for b, pipeline_group in enumerate(partition.pipeline_groups)
        if pipeline_group.width == 1
        for s in range(len(pipeline_group.stages))
    ]
    if len(places) < 2:
        return None
    (a, s), (b, t) = rng.sample(places, 2)
    changed = {at: list(partition.pipeline_groups[at].stages) for at in (a, b)}
    stage_groups = changed[a][s]
    k = rng.randrange(len(stage_groups))
    whole = rng.random() < 0.5
    moved, kept = (stage_groups, ()) if whole else (stage_groups[k : k + 1], stage_groups[:k] + stage_groups[k + 1 :])
    place = rng.randrange(len(changed[b][t]) + 1)
    changed[b][t] = changed[b][t][:place] + moved + changed[b][t][place:]
    changed[a][s : s + 1] = [kept] if kept else []
    return _with_pipelines(near, partition, changed)


def leave_replicas(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Some replicas of a stage become a stage of their own, in any pipeline that is a group of one, or a new
    pipeline.
    """
    at = _replicated(partition, rng)
    if at is None:
        return None
    stages = list(partition.pipeline_groups[at].stages)
    s = rng.choice([s for s, stage_groups in enumerate(stages) if len(stage_groups) > 1])
    order = list(stages[s])
    rng.shuffle(order)
    cut = rng.randrange(1, len(order))
    stages[s], moved = (tuple(g for g in stages[s] if g in part) for part in (order[:cut], order[cut:]))
    changed = {at: stages}
    if rng.random() < 0.3:
        pipeline = near.pipeline([moved], partition.pipeline_groups[at].micro_batch_size)
        return None if pipeline is None else _with_pipelines(near, partition, changed, pipeline)
    taker = rng.choice([b for b, pipeline_group in enumerate(partition.pipeline_groups) if pipeline_group.width == 1])
    taking = changed.setdefault(taker, list(partition.pipeline_groups[taker].stages))
    taking.insert(rng.randrange(len(taking) + 1), moved)
    return _with_pipelines(near, partition, changed)


def group_to_replicas(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A TP group of a pipeline that is a group of one becomes two replicas, of any allowed degrees."""
    places = [
        (b, s, k)
        for b, pipeline_group in enumerate(partition.pipeline_groups)
        if pipeline_group.width == 1
        for s, stage_groups in enumerate(pipeline_group.stages)
        for k, group in enumerate(stage_groups)
        if len(group) > 1
    ]
    if not places:
        return None
    b, s, k = rng.choice(places)
    stages = list(partition.pipeline_groups[b].stages)
    group = stages[s][k]
    allowed = near.allowed[near.machine_of[group[0]]]
    cuts = [n for n in range(1, len(group)) if n in allowed and len(group) - n in allowed]
    if not cuts:
        return None
    n = rng.choice(cuts)
    stages[s] = (*stages[s][:k], group[:n], group[n:], *stages[s][k + 1 :])
    return _with_pipelines(near, partition, {b: stages})


def replicas_to_group(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Two replicas in the same machine become one TP group."""
    at = _replicated(partition, rng)
    if at is None:
        return None
    stages = list(partition.pipeline_groups[at].stages)
    pairs = [
        (s, a, b) for s, stage_groups in enumerate(stages) for a, b in combinations(stage_groups, 2) if near.joins(a, b)
    ]
    if not pairs:
        return None
    s, a, b = rng.choice(pairs)
    joined = tuple(sorted(a + b))
    stages[s] = tuple(joined if group == a else group for group in stages[s] if group != b)
    return _with_pipelines(near, partition, {at: stages})


def _replicated(partition: Partition, rng: random.Random) -> int | None:
    """The index of a random replicated pipeline group; None where there is none."""
    found = [at for at, pipeline_group in enumerate(partition.pipeline_groups) if pipeline_group.replicated]
    return rng.choice(found) if found else None


def _with_pipelines(
    near: Neighbourhood, partition: Partition, changed: dict[int, list[StageGroups]], *more: PipelineGroup
) -> Partition | None:
    """The partition with new stages for some single pipelines, which are removed where no stages are left; and
    `more`.
    """
    pipelines: dict[int, PipelineGroups] = {}
    for at, stages in changed.items():
        pipeline = near.pipeline(stages, partition.pipeline_groups[at].micro_batch_size) if stages else None
        if stages and pipeline is None:
            return None
        pipelines[at] = () if pipeline is None else (pipeline,)
    return replace_groups(partition, pipelines, more)
