"""The good plans that HexiScale's iterations work on."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from hexiopt.schedules.schedule import Schedule
from solvers.core.partition import Partition


@dataclass(frozen=True)
class Style:
    """The choices common to all pipelines of an iteration: micro-batch size, schedule, sharding, order of kinds, layer
    ranges.
    """

    size: int
    schedule: Schedule
    sharding: int
    ranks: tuple[int, ...]
    chunks: int
    groups: str  # sharding groups

    @classmethod
    def of(cls, partition: Partition, kind_of: Callable[[int], int], num_kinds: int) -> "Style":
        """That of a partition, if all its pipelines had the micro-batches of the first. Kinds are ordered by the mean
        place of their stages; `kind_of` is that of a device.
        """
        places: list[list[float]] = [[] for _ in range(num_kinds)]
        for own in partition.pipeline_groups:
            for s, groups in enumerate(own.stages):
                places[kind_of(groups[0][0])].append(s / len(own.stages))
        ordered = sorted(range(num_kinds), key=lambda kind: fmean(places[kind] or [1.0]))
        ranks = tuple(map(ordered.index, range(num_kinds)))
        size = partition.pipeline_groups[0].micro_batch_size
        return cls(size, partition.schedule, partition.sharding, ranks, partition.chunks, partition.groups)


@dataclass(frozen=True)
class Incumbent:
    """The partition of a good plan: the positions of each pipeline's GPUs, and the pipelines built from them."""

    step_time_s: float
    parts: tuple[tuple[int, ...], ...]
    partition: Partition
    style: Style
