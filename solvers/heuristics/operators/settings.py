"""Operators on what a partition says beside devices: micro-batch sizes, schedule, ZeRO stage, layer ranges."""

import random
from dataclasses import replace

from hexiopt.schedules.registry import INTERLEAVED
from solvers.core.interleaving import drawn_chunks, drawn_schedule
from solvers.core.partition import Structure
from solvers.core.zero import drawn_groups, drawn_stage
from solvers.heuristics.operators.neighbourhood import Neighbourhood


def resize_micro_batch(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """Twice or half the micro-batch, of one bundle or of all."""
    factor = rng.choice((0.5, 2.0))
    chosen = range(len(structure.bundles))
    if rng.random() < 0.5 and near.problem.space.uneven_batch:
        chosen = range(first := rng.randrange(len(structure.bundles)), first + 1)
    bundles = list(structure.bundles)
    for at in chosen:
        size = int(bundles[at].micro_batch_size * factor)
        if size not in near.sizes or size < bundles[at].most_replicas:
            return None
        bundles[at] = replace(bundles[at], micro_batch_size=size)
    return structure.with_bundles(bundles)


def change_schedule_or_sharding(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure:
    """Another schedule or sharding."""
    schedule, chunks = drawn_schedule(near.problem, rng)
    sharding = drawn_stage(near.problem, rng, aligned=len(structure.bundles) == 1)
    return Structure(structure.bundles, schedule, sharding, chunks, drawn_groups(near.problem, rng, sharding))


def change_chunks(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """The same pipelines interleaved, or interleaved with other numbers of layer ranges."""
    chunks = drawn_chunks(near.problem, rng)
    if all(len(bundle.stages) == 1 for bundle in structure.bundles) or chunks == structure.chunks:
        return None
    return replace(structure, schedule=INTERLEAVED, chunks=chunks)
