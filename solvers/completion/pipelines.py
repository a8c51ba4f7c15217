"""The pipelines of a pipeline group with their layers and recompute policies, on a network shared by all messages."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.network_load import PlacedMessage, executor_loads, total_load
from hexiopt.cost.executors.routes import place_messages
from hexiopt.memo import Memo
from hexiopt.plan.messages import messages_of, round_trips_s
from hexiopt.plan.plan import Stage
from hexiopt.problem.space import layer_ranges
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Pricer
from solvers.completion.executors import Executor, StageExecutors, Works
from solvers.completion.layers import LayerSplitter, StageLayers
from solvers.core.interleaving import possible_chunks
from solvers.core.partition import DeviceGroup, DoesNotFit, Partition, PipelineGroup

RoundTrips = tuple[tuple[float, ...], ...]  # per pipeline and boundary, seconds of a message ahead and of one back
_EXACT = 1e-9
_KEPT = 20_000  # pipeline groups remembered


@dataclass(frozen=True, slots=True)
class PipelineRate:
    """m micro-batches take about fill + m · period seconds."""

    fill_s: float
    period_s: float
    waits: bool  # whether even the slowest stage waits for messages

    @classmethod
    def of(cls, schedule: Schedule, stage_s: Sequence[float], trip_s: Sequence[float], chunks: int) -> "PipelineRate":
        """The rate of a pipeline from the seconds of its stages and messages, each forward and backward together."""
        period = schedule.cycle_s(stage_s, trip_s, chunks)
        fill = schedule.fill_s(stage_s, trip_s, chunks, period)
        return cls(fill, period, period > max(stage_s) * (1 + _EXACT))


PlacedPipeline = tuple[Executor, ...]  # of a pipeline, by stage


@dataclass(frozen=True)
class TimedPipeline:
    """A placed pipeline with the layers and policies of each stage, its layer ranges per stage, and its rate.

    `split_again`: whether stages with layers that balance compute would wait for messages, so that others were tried.
    """

    placed: PlacedPipeline
    split: tuple[StageLayers, ...]
    chunks: int
    rate: PipelineRate
    split_again: bool = False

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages."""
        ranges = layer_ranges([n for n, _ in self.split], self.chunks)
        return tuple(
            executor.stage(layers, recompute)
            for executor, layers, (_, recompute) in zip(self.placed, ranges, self.split, strict=True)
        )


@dataclass(frozen=True, slots=True)
class SplitInput:
    """What the layer split of a pipeline group depends on."""

    schedule: Schedule
    chunks: int  # layer ranges a stage
    shards: StateSharding
    everywhere: bool  # whether states are sharded over all their holders, not only those of a machine
    batches: int  # micro-batches a pipeline, about
    tight: bool = False  # layers of pipelines that wait minimise the period: no slack for messages of others


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The pipelines of a pipeline group and their messages.

    Pipelines placed on equivalent devices cost the same: one of them stands for all.
    """

    placed_pipelines: tuple[PlacedPipeline, ...]
    works: tuple[Works, ...]  # of each stage in all of them
    examples: tuple[int, ...]  # rows that differ
    example_of: tuple[int, ...]  # of each row, which of them stands for it
    messages: tuple[tuple[PlacedMessage, ...], ...] = ()  # of the examples
    load: tuple[tuple[int, float], ...] = ()  # (shared resource, seconds) of all rows


class PipelineTimer:
    """Splits and times the pipelines of pipeline groups, and caches what it computes; one for a search."""

    def __init__(self, pricer: Pricer, executors: StageExecutors | None = None) -> None:
        self._pricer, self.executors = pricer, executors or StageExecutors(pricer)
        self._num_layers = pricer.problem.model.num_layers
        self._stages = pricer.features.stages  # without, the network is left to each message
        cluster = pricer.problem.cluster
        self._machine_of: list[int] = cluster.machine_of.tolist()
        self._uniform = [machine.is_uniform for machine in cluster.machines]
        self._traffic: Memo[tuple[PipelineGroup, bool], _Traffic] = Memo(lambda key: self._sends(*key), _KEPT)
        self.pipelines: Memo[
            tuple[PipelineGroup, SplitInput, LayerSplitter, RoundTrips], list[TimedPipeline] | DoesNotFit
        ] = Memo(lambda key: self._time(*key), _KEPT)

    def trips_s(self, partition: Partition) -> list[RoundTrips]:
        """Seconds of the round trips in every pipeline group while the messages of all groups share the network."""
        each = [
            self._traffic[pipeline_group, self.chunks(pipeline_group, partition) > 1]
            for pipeline_group in partition.pipeline_groups
        ]
        if self._stages is None:
            return [tuple(map(self._alone_s, own.placed_pipelines)) for own in each]
        load_s = total_load(item for own in each for item in own.load)
        found = []
        for own in each:
            trips = [
                tuple(
                    round_trips_s(
                        [placed.message for placed in messages],
                        [placed.seconds(load_s) for placed in messages],
                        len(own.placed_pipelines[0]),
                    )
                )
                for messages in own.messages
            ]
            found.append(tuple([trips[k] for k in own.example_of]))
        return found

    def chunks(self, pipeline_group: PipelineGroup, partition: Partition) -> int:
        """Layer ranges per stage of a pipeline group: as many as the partition asks for, or as many as possible."""
        if not partition.schedule.chunked:
            return 1
        return possible_chunks(partition.chunks, len(pipeline_group.stages), self._num_layers)

    def _time(
        self, pipeline_group: PipelineGroup, terms: SplitInput, splitter: LayerSplitter, trips_s: RoundTrips
    ) -> list[TimedPipeline] | DoesNotFit:
        """The timed pipelines. Where even the slowest stage waits for messages, which its neighbours may share, layers
        are split again, and the better split wins: with room for half of each round trip in either stage or, if
        `tight`, with the least period.
        """
        if pipeline_group.most_replicas > pipeline_group.micro_batch_size:
            return DoesNotFit(pipeline_group.most_replicas - pipeline_group.micro_batch_size)
        longest = tuple([max(own) for own in zip(*trips_s, strict=True)])
        if self._pricer.features.sends_occupy_stages:
            return self._split(pipeline_group, terms, splitter, trips_s, added_s=(*longest, 0.0))
        found = self._split(pipeline_group, terms, splitter, trips_s)
        if (
            not terms.schedule.shares_waits
            or isinstance(found, DoesNotFit)
            or not any(timed_pipeline.rate.waits for timed_pipeline in found)
        ):
            return found
        if terms.tight:
            other = self._split(pipeline_group, terms, splitter, trips_s, round_trip_s=longest)
        else:
            halves = [0.5 * (before + after) for before, after in pairwise((0.0, *longest, 0.0))]
            other = self._split(pipeline_group, terms, splitter, trips_s, added_s=tuple(halves))
        if isinstance(other, DoesNotFit):
            other = found
        best = min(
            found,
            other,
            key=lambda timed_pipelines: sum(timed_pipeline.rate.period_s for timed_pipeline in timed_pipelines),
        )
        return [replace(timed_pipeline, split_again=True) for timed_pipeline in best]

    def _split(
        self,
        pipeline_group: PipelineGroup,
        terms: SplitInput,
        splitter: LayerSplitter,
        trips_s: RoundTrips,
        added_s: tuple[float, ...] = (),
        round_trip_s: tuple[float, ...] = (),
    ) -> list[TimedPipeline] | DoesNotFit:
        """The pipelines with layers that balance the stages, where each stage also spends `added_s`, or waits for
        messages of `round_trip_s`.
        """
        traffic = self._traffic[pipeline_group, terms.chunks > 1]
        more = self.executors.more_holders(pipeline_group, everywhere=terms.everywhere)
        split = splitter.split(
            traffic.works,
            pipeline_group.micro_batch_size,
            terms.schedule,
            terms.batches,
            terms.shards,
            added_s,
            terms.chunks,
            more,
            round_trip_s,
        )
        if isinstance(split, int):
            return DoesNotFit(split)
        # Rows with the same example share its trips too.
        rates = [
            PipelineRate.of(terms.schedule, self._stage_s(traffic.placed_pipelines[k], split), trips_s[k], terms.chunks)
            for k in traffic.examples
        ]
        return [
            TimedPipeline(placed, split, terms.chunks, rates[k])
            for placed, k in zip(traffic.placed_pipelines, traffic.example_of, strict=True)
        ]

    def _stage_s(self, placed: PlacedPipeline, split: tuple[StageLayers, ...]) -> list[float]:
        """Compute seconds of each stage for a micro-batch."""
        last = len(placed) - 1
        return [
            self.executors.seconds(executor, s == 0, s == last, *choice)
            for s, (executor, choice) in enumerate(zip(placed, split, strict=True))
        ]

    def _sends(self, pipeline_group: PipelineGroup, wraps: bool) -> _Traffic:
        placed_pipelines, size = self.executors.of(pipeline_group), pipeline_group.micro_batch_size
        works = tuple(
            frozenset[Any]().union(*(executor.works(size) for executor in slot))
            for slot in zip(*placed_pipelines, strict=True)
        )
        numbers: dict[Hashable, int] = {}
        example_of = tuple([numbers.setdefault(self._places(placed), len(numbers)) for placed in placed_pipelines])
        examples = tuple(map(example_of.index, range(len(numbers))))
        if self._stages is None:
            return _Traffic(placed_pipelines, works, examples, example_of)
        sample_bytes = self._stages.routes.message_bytes(1)
        found = tuple(
            place_messages(
                messages_of(tuple([executor.samples for executor in placed_pipelines[k]]), wraps),
                [executor.groups for executor in placed_pipelines[k]],
                self._stages.routes.between,
                sample_bytes,
            )
            for k in examples
        )
        counts = map(example_of.count, range(len(examples)))
        load = total_load(
            (resource, count * seconds)
            for own, count in zip(found, counts, strict=True)
            for resource, seconds in executor_loads(own)
        )
        return _Traffic(placed_pipelines, works, examples, example_of, found, tuple(load.items()))

    def _places(self, placed: PlacedPipeline) -> Hashable:
        """A key, equal for pipelines with equally fast stages and equal routes; other pricers may distinguish all
        devices.
        """
        if self._stages is None:
            return placed
        return tuple(
            [tuple([(self._place(group), samples) for group, _, samples in executor.replicas]) for executor in placed]
        )

    def _place(self, group: DeviceGroup) -> Hashable:
        """A key, equal for interchangeable TP groups."""
        machine = self._machine_of[group[0]]
        return (machine, len(group)) if self._uniform[machine] else group

    def _alone_s(self, placed: PlacedPipeline) -> tuple[float, ...]:
        """Round trips of a pipeline without replicas, if messages do not compete for the network."""
        message_s = self._pricer.message_s
        return tuple(
            message_s(a.group, b.group, a.samples) + message_s(b.group, a.group, a.samples)
            for ((a,),), ((b,),) in pairwise(placed)
        )
