"""Times of a pipeline whose stages have replicas or several layer ranges: its executors, its links, and its ends."""

from collections.abc import Sequence
from itertools import accumulate

from hexiopt.cost.boundary import Way, longest_s
from hexiopt.cost.cost import LinkCost, PipelineCost, StageCost
from hexiopt.cost.executors.routes import NetworkLoad
from hexiopt.schedules.recurrence import Executor, Link, executor_ends_s
from hexiopt.schedules.schedule import Schedule


def replicated_cost(
    schedule: Schedule, num_micro_batches: int, stages: tuple[StageCost, ...], ways: Sequence[Way], load_s: NetworkLoad
) -> PipelineCost:
    """The pipeline's cost, from those of its stages; its messages go `ways` of a network loaded with `load_s`."""
    links = tuple(
        LinkCost(way.backward, way.stage, way.sender, way.receiver, way.route.seconds(way.num_bytes, load_s))
        for way in ways
    )
    count = len(stages)
    ends = replica_ends_s(schedule, num_micro_batches, stages, links)
    first = _first_executors(stages)
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


def replica_ends_s(
    schedule: Schedule,
    num_micro_batches: int,
    stages: tuple[StageCost, ...],
    links: Sequence[LinkCost],
    message_factor: float = 1.0,
) -> tuple[float, ...]:
    """When each replica ends [executors], stage by stage, if messages take `message_factor` times their seconds."""
    count, first = len(stages), _first_executors(stages)
    return executor_ends_s(
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
                    message_factor * link.seconds,
                )
                for link in links
            ]
        ),
    )


def _first_executors(stages: tuple[StageCost, ...]) -> list[int]:
    """The number of the executor that is each stage's first replica, and how many there are in all [stages + 1]."""
    return [0, *accumulate(len(stage.each) for stage in stages)]
