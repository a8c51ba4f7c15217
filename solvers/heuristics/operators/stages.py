"""Operators inside a pipeline group: the order of its stages, their TP degrees, its width and its length."""

import random
from collections.abc import Iterable

from solvers.core.partition import PipelineGroup
from solvers.heuristics.operators.neighbourhood import Neighbourhood, PipelineGroups, StageGroups, halves, on_one


def _with(pipeline_group: PipelineGroup, stages: Iterable[StageGroups]) -> PipelineGroups:
    return (pipeline_group.with_stages(stages),)


@on_one
def reorder_stages(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """Move a stage to another place, or swap two."""
    stages = list(pipeline_group.stages)
    if len(stages) < 2:
        return None
    a, b = rng.sample(range(len(stages)), 2)
    if rng.random() < 0.5:
        stages[a], stages[b] = stages[b], stages[a]
    else:
        stages.insert(b, stages.pop(a))
    return _with(pipeline_group, stages)


@on_one
def halve_tp(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """A stage becomes two of half its TP degree."""
    s = rng.randrange(len(pipeline_group.stages))
    two = halves(pipeline_group.stages[s])
    return (
        None
        if two is None
        else _with(pipeline_group, (*pipeline_group.stages[:s], *two, *pipeline_group.stages[s + 1 :]))
    )


@on_one
def double_tp(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """Two stages in the same machines become one of twice the TP degree."""
    stages = list(pipeline_group.stages)
    if len(stages) < 2:
        return None
    a = rng.randrange(len(stages))
    partners = {b: joined for b, other in enumerate(stages) if b != a and (joined := near.join(stages[a], other))}
    if not partners:
        return None
    b = rng.choice(list(partners))
    stages[a] = partners[b]
    del stages[b]
    return _with(pipeline_group, stages)


@on_one
def width_to_stages(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """Half as many pipelines, twice as long: each stage is followed by one on the devices of the other half."""
    half = pipeline_group.width // 2
    if pipeline_group.width % 2:
        return None
    return _with(
        pipeline_group,
        (part for stage_groups in pipeline_group.stages for part in (stage_groups[:half], stage_groups[half:])),
    )


@on_one
def stages_to_width(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """Twice as many pipelines, half as long: two stages of equal TP degree become one of twice the width."""
    stages = pipeline_group.stages
    if len(stages) % 2 or pipeline_group.replicated:
        return None
    half = len(stages) // 2
    pairs = list(zip(stages[::2], stages[1::2], strict=True))
    if rng.random() >= 0.5:
        pairs = list(zip(stages[:half], stages[half:], strict=True))
    if any(len(a[0]) != len(b[0]) for a, b in pairs):
        return None
    return _with(pipeline_group, (a + b for a, b in pairs))


@on_one
def width_to_tp(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """Half as many pipelines, every TP degree doubled."""
    half = pipeline_group.width // 2
    if pipeline_group.width % 2:
        return None
    joined = [
        near.join(stage_groups[:half], stage_groups[half:]) or near.join(stage_groups[::2], stage_groups[1::2])
        for stage_groups in pipeline_group.stages
    ]
    return None if None in joined else _with(pipeline_group, filter(None, joined))


@on_one
def tp_to_width(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """Twice as many pipelines, every TP degree halved."""
    pairs = [None] if pipeline_group.replicated else [halves(stage_groups) for stage_groups in pipeline_group.stages]
    return None if None in pairs else _with(pipeline_group, (a + b for a, b in filter(None, pairs)))


@on_one
def split_group(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """One pipeline group becomes two of the same stages."""
    if pipeline_group.width < 2:
        return None
    k = rng.choice((pipeline_group.width // 2, rng.randrange(1, pipeline_group.width)))
    return (
        pipeline_group.with_stages(stage_groups[:k] for stage_groups in pipeline_group.stages),
        pipeline_group.with_stages(stage_groups[k:] for stage_groups in pipeline_group.stages),
    )


@on_one
def cut_pipeline(near: Neighbourhood, pipeline_group: PipelineGroup, rng: random.Random) -> PipelineGroups | None:
    """A pipeline group becomes two with shorter pipelines."""
    stages = pipeline_group.stages
    if len(stages) < 2:
        return None
    s = rng.randrange(1, len(stages))
    if rng.random() >= 0.5:
        return pipeline_group.with_stages(stages[:s]), pipeline_group.with_stages(stages[s:])
    order = list(range(len(stages)))
    rng.shuffle(order)
    chosen = set(order[:s])
    parts = ([x for i, x in enumerate(stages) if (i in chosen) is side] for side in (True, False))
    first, second = map(pipeline_group.with_stages, parts)
    return first, second
