"""Operators that exchange stages or TP groups between pipeline groups, join groups, or change which devices are
used.
"""

import random

from solvers.core.partition import Partition, PipelineGroup
from solvers.frame.starts import cut
from solvers.heuristics.operators.neighbourhood import Neighbourhood, PipelineGroups, on_two, replace_groups


@on_two
def merge_groups(
    near: Neighbourhood, first: PipelineGroup, second: PipelineGroup, rng: random.Random
) -> tuple[PipelineGroups, PipelineGroups] | None:
    """Two pipeline groups with the same TP degrees stage by stage become one, so that their layers align."""
    degrees = [[len(stage_groups[0]) for stage_groups in pipeline_group.stages] for pipeline_group in (first, second)]
    if degrees[0] != degrees[1] or first.replicated or second.replicated:
        return None
    return (first.with_stages(x + y for x, y in zip(first.stages, second.stages, strict=True)),), ()


@on_two
def join_pipelines(
    near: Neighbourhood, first: PipelineGroup, second: PipelineGroup, rng: random.Random
) -> tuple[PipelineGroups, PipelineGroups] | None:
    """Two pipeline groups of equal width become one with longer pipelines."""
    if first.width != second.width:
        return None
    joined = near.take(first, second, first.stages + second.stages)
    return None if joined is None else ((joined,), ())


@on_two
def move_stage(
    near: Neighbourhood, giver: PipelineGroup, taker: PipelineGroup, rng: random.Random
) -> tuple[PipelineGroups, PipelineGroups] | None:
    """A stage moves from one pipeline group to another; where that is narrower, it becomes several stages."""
    if len(giver.stages) < 2 or giver.width % taker.width:
        return None
    s, width = rng.randrange(len(giver.stages)), taker.width
    stage_groups = giver.stages[s]
    # Replicas stay together.
    parts = [stage_groups] if giver.replicated else [stage_groups[k : k + width] for k in range(0, giver.width, width)]
    stages = list(taker.stages)
    place = rng.randrange(len(stages) + 1)
    stages[place:place] = parts
    taken = near.take(taker, giver, stages)
    return None if taken is None else ((giver.with_stages(giver.stages[:s] + giver.stages[s + 1 :]),), (taken,))


@on_two
def swap_stages(
    near: Neighbourhood, one: PipelineGroup, two: PipelineGroup, rng: random.Random
) -> tuple[PipelineGroups, PipelineGroups] | None:
    """Two pipeline groups of equal width exchange a stage."""
    if one.width != two.width:
        return None
    first, second = list(one.stages), list(two.stages)
    s, t = rng.randrange(len(first)), rng.randrange(len(second))
    first[s], second[t] = second[t], first[s]
    a, b = near.take(one, two, first), near.take(two, one, second)
    return None if a is None or b is None else ((a,), (b,))


def swap_tp_groups(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Two TP groups of equal degree anywhere in the plan change places."""
    places = [
        (b, s, k)
        for b, pipeline_group in enumerate(partition.pipeline_groups)
        for s, stage_groups in enumerate(pipeline_group.stages)
        for k in range(len(stage_groups))
    ]
    if len(places) < 2:
        return None
    one, two = rng.sample(places, 2)
    x, y = (partition.pipeline_groups[b].stages[s][k] for b, s, k in (one, two))
    machine = near.machine_of[x[0]]
    if len(x) != len(y) or (machine == near.machine_of[y[0]] and machine not in near.uneven):
        return None
    to = {x: y, y: x}
    return partition.with_pipeline_groups(
        pipeline_group.with_stages(
            tuple(to.get(group, group) for group in stage_groups) for stage_groups in pipeline_group.stages
        )
        for pipeline_group in partition.pipeline_groups
    )


def leave_unused(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """A stage, or a whole pipeline group, is removed, and its devices stay idle."""
    at = rng.randrange(len(partition.pipeline_groups))
    pipeline_group = partition.pipeline_groups[at]
    if len(pipeline_group.stages) > 1 and rng.random() < 0.8:
        s = rng.randrange(len(pipeline_group.stages))
        return replace_groups(
            partition, {at: (pipeline_group.with_stages(pipeline_group.stages[:s] + pipeline_group.stages[s + 1 :]),)}
        )
    return replace_groups(partition, {at: ()}) if len(partition.pipeline_groups) > 1 else None


def use_idle(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Idle devices of a machine become a stage of a pipeline group, or a new pipeline group."""
    used = partition.devices()
    idle = {m: [d for d in own if d not in used] for m, own in near.by_machine.items()}
    machines = [m for m, own in idle.items() if own]
    if not machines:
        return None
    machine = rng.choice(machines)
    tp = rng.choice([t for t in sorted(near.allowed[machine]) if t <= len(idle[machine])])
    groups = cut(idle[machine], tp)
    at = rng.randrange(len(partition.pipeline_groups))
    pipeline_group = partition.pipeline_groups[at]
    if rng.random() < 0.3:
        width = rng.choice([w for w in range(1, len(groups) + 1) if len(groups) % w == 0])
        stages = tuple(tuple(groups[k : k + width]) for k in range(0, len(groups), width))
        return replace_groups(partition, {}, (PipelineGroup(stages, pipeline_group.micro_batch_size),))
    if len(groups) < pipeline_group.width:
        return None
    place = rng.randrange(len(pipeline_group.stages) + 1)
    stage_groups = tuple(groups[: pipeline_group.width])
    return replace_groups(
        partition,
        {
            at: (
                pipeline_group.with_stages(
                    (*pipeline_group.stages[:place], stage_groups, *pipeline_group.stages[place:])
                ),
            )
        },
    )
