"""Operators on the other choices of a partition: micro-batch sizes, schedule, ZeRO stage, layer ranges."""

import random
from dataclasses import replace

from solvers.core.interleaving import draw_schedule, interleavings
from solvers.core.partition import Partition
from solvers.core.zero import draw_sharding_groups, draw_zero_stage
from solvers.heuristics.operators.neighbourhood import Neighbourhood


def resize_micro_batch(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Double or halve the micro-batch size, of one pipeline group or of all."""
    factor = rng.choice((0.5, 2.0))
    chosen = range(len(partition.pipeline_groups))
    if rng.random() < 0.5 and near.problem.space.uneven_batch:
        chosen = range(first := rng.randrange(len(partition.pipeline_groups)), first + 1)
    pipeline_groups = list(partition.pipeline_groups)
    for at in chosen:
        size = int(pipeline_groups[at].micro_batch_size * factor)
        if size not in near.sizes or size < pipeline_groups[at].most_replicas:
            return None
        pipeline_groups[at] = replace(pipeline_groups[at], micro_batch_size=size)
    return partition.with_pipeline_groups(pipeline_groups)


def change_schedule_or_sharding(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition:
    """Another schedule or sharding."""
    schedule, chunks = draw_schedule(near.problem, rng)
    sharding = draw_zero_stage(near.problem, rng, aligned=len(partition.pipeline_groups) == 1)
    return Partition(
        partition.pipeline_groups, schedule, sharding, chunks, draw_sharding_groups(near.problem, rng, sharding)
    )


def change_chunks(near: Neighbourhood, partition: Partition, rng: random.Random) -> Partition | None:
    """Interleave the same pipelines, or change their number of layer ranges."""
    schedule, chunks = rng.choice(list(interleavings(near.problem)))
    alone = all(len(pipeline_group.stages) == 1 for pipeline_group in partition.pipeline_groups)
    if alone or (schedule, chunks) == (partition.schedule, partition.chunks):
        return None
    return replace(partition, schedule=schedule, chunks=chunks)
