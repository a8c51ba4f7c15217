"""Times of a pipeline whose stages have replicas or several layer ranges: its executors, its links, and its ends."""

from collections.abc import Sequence

from hexiopt.cost.boundary import Load, Way, longest_s
from hexiopt.cost.cost import LinkCost, PipelineCost, StageCost
from hexiopt.schedules.recurrence import Executor, Link, executor_ends_s
from hexiopt.schedules.schedule import Schedule


def replicated_cost(
    schedule: Schedule, num_micro_batches: int, stages: tuple[StageCost, ...], ways: Sequence[Way], load_s: Load
) -> PipelineCost:
    """The pipeline's cost, from those of its stages; its messages go `ways` of a network loaded with `load_s`."""
    links = tuple(
        LinkCost(way.backward, way.stage, way.sender, way.receiver, way.hop.seconds(way.num_bytes, load_s))
        for way in ways
    )
    count = len(stages)
    first = [0]  # executor of each stage's first replica
    for stage in stages:
        first.append(first[-1] + len(stage.each))
    ends = executor_ends_s(
        schedule,
        count,
        num_micro_batches,
        tuple([Executor(s, replica.each_chunk_s) for s, stage in enumerate(stages) for replica in stage.each]),
        tuple(
            [
                Link(
                    link.backward,
                    first[link.stage] + link.sender,
                    first[(link.stage + (-1 if link.backward else 1)) % count] + link.receiver,
                    link.seconds,
                )
                for link in links
            ]
        ),
    )
    replica_ends = tuple(ends[first[s] : first[s + 1]] for s in range(count))
    ahead, back = longest_s([(link.backward, link.stage, link.seconds) for link in links], count)
    return PipelineCost(
        stages,
        tuple(ahead),
        tuple(back),
        tuple(max(each) for each in replica_ends),
        max(ends),
        links,
        replica_ends,
    )
