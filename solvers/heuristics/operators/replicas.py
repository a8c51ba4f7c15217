"""Operators that make replicas of stages, pipelines and TP groups, and undo it.

A TP group becomes a replica of another stage, of its own or another pipeline, and leaves it again; pipelines become
the replicas of one and part again; a TP group falls into replicas, in equal parts or not, and replicas join into one.
"""

import random
from itertools import combinations

from solvers.core.partition import Partition, PipelineGroup
from solvers.heuristics.operators.neighbourhood import Bundles, Neighbourhood, Slot, replaced


def pipelines_to_replicas(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """The pipelines of a bundle, or of two that are as long, become one: what were its stages are replicas."""
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
        sum(slots, start=())
        for slots in zip(*(pipeline_group.stages for pipeline_group in pipeline_groups), strict=True)
    ]
    # As many samples for each as before, or as few as there must be.
    size = (
        sum(pipeline_group.width * pipeline_group.micro_batch_size for pipeline_group in pipeline_groups)
        if rng.random() < 0.5
        else 1
    )
    line = near.line(stages, size)
    return None if line is None else replaced(partition, dict.fromkeys(chosen, ()), [line])


def replicas_to_pipelines(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A pipeline whose stages have equally many replicas becomes so many pipelines."""
    at = _replicated(partition, rng)
    if at is None:
        return None
    pipeline_group = partition.pipeline_groups[at]
    width = len(pipeline_group.stages[0])
    if any(len(slot) != width for slot in pipeline_group.stages):
        return None
    size = max((n for n in near.sizes if n * width <= pipeline_group.micro_batch_size), default=near.sizes[0])
    if all(len(set(map(len, slot))) == 1 for slot in pipeline_group.stages):
        return replaced(partition, {at: ()}, [PipelineGroup(pipeline_group.stages, size)])
    lines = [PipelineGroup(tuple((slot[k],) for slot in pipeline_group.stages), size) for k in range(width)]
    return replaced(partition, {at: ()}, lines)


def join_as_replica(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A stage, or one of its replicas, becomes a replica of another stage, of any pipeline that moves alone."""
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
    slot = changed[a][s]
    k = rng.randrange(len(slot))
    whole = rng.random() < 0.5
    moved, kept = (slot, ()) if whole else (slot[k : k + 1], slot[:k] + slot[k + 1 :])
    place = rng.randrange(len(changed[b][t]) + 1)
    changed[b][t] = changed[b][t][:place] + moved + changed[b][t][place:]
    changed[a][s : s + 1] = [kept] if kept else []
    return _with_lines(near, partition, changed)


def leave_replicas(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Some replicas of a stage become a stage of their own, of any pipeline that moves alone, or a pipeline."""
    at = _replicated(partition, rng)
    if at is None:
        return None
    stages = list(partition.pipeline_groups[at].stages)
    s = rng.choice([s for s, slot in enumerate(stages) if len(slot) > 1])
    order = list(stages[s])
    rng.shuffle(order)
    cut = rng.randrange(1, len(order))
    stages[s], moved = (tuple(g for g in stages[s] if g in part) for part in (order[:cut], order[cut:]))
    changed = {at: stages}
    if rng.random() < 0.3:
        line = near.line([moved], partition.pipeline_groups[at].micro_batch_size)
        return None if line is None else _with_lines(near, partition, changed, line)
    taker = rng.choice([b for b, pipeline_group in enumerate(partition.pipeline_groups) if pipeline_group.width == 1])
    taking = changed.setdefault(taker, list(partition.pipeline_groups[taker].stages))
    taking.insert(rng.randrange(len(taking) + 1), moved)
    return _with_lines(near, partition, changed)


def group_to_replicas(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A TP group of a pipeline that moves alone becomes two replicas, of any degrees that are allowed."""
    places = [
        (b, s, k)
        for b, pipeline_group in enumerate(partition.pipeline_groups)
        if pipeline_group.width == 1
        for s, slot in enumerate(pipeline_group.stages)
        for k, group in enumerate(slot)
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
    return _with_lines(near, partition, {b: stages})


def replicas_to_group(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Two replicas in one machine become one TP group."""
    at = _replicated(partition, rng)
    if at is None:
        return None
    stages = list(partition.pipeline_groups[at].stages)
    pairs = [(s, a, b) for s, slot in enumerate(stages) for a, b in combinations(slot, 2) if near.joins(a, b)]
    if not pairs:
        return None
    s, a, b = rng.choice(pairs)
    joined = tuple(sorted(a + b))
    stages[s] = tuple(joined if group == a else group for group in stages[s] if group != b)
    return _with_lines(near, partition, {at: stages})


def _replicated(partition: Partition, rng: random.Random) -> int | None:
    """A replicated bundle."""
    found = [at for at, pipeline_group in enumerate(partition.pipeline_groups) if pipeline_group.replicated]
    return rng.choice(found) if found else None


def _with_lines(
    near: Neighbourhood, partition: Partition, changed: dict[int, list[Slot]], *more: PipelineGroup
) -> Partition | None:
    """The partition with other stages for some bundles of one pipeline, gone where none are left; and `more`."""
    lines: dict[int, Bundles] = {}
    for at, stages in changed.items():
        line = near.line(stages, partition.pipeline_groups[at].micro_batch_size) if stages else None
        if stages and line is None:
            return None
        lines[at] = () if line is None else (line,)
    return replaced(partition, lines, more)
