"""How the messages of all pipelines of a plan share the network (`executors/network_load.py`), and when executors end
for it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.network_load import total_load
from hexiopt.cost.place import PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.schedules.recurrence import PipelineGraph
from hexiopt.simulation.engine import Span, StageTimes, Step, link_of

_KEPT = 50_000  # pipelines with the seconds of their messages


class NetworkModel(Protocol):
    """How the messages of all pipelines of a plan share the network, and when executors end for it."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline beside the others."""

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """The operations and messages of the pipeline `number` of those that it `priced`, in the order in which they
        end."""

    def forget(self) -> None:
        """Give back what is remembered of pipelines."""


class StaticShares:
    """A network whose resources are shared all the time by all messages that ever use them."""

    def __init__(self) -> None:
        self._ends = Memo(_ends_s, _KEPT)  # pipelines that are equal but for their devices end alike

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        message_s = shared_message_s(placed)
        ends_s = [self._ends[line.graph, seconds] for line, seconds in zip(placed, message_s, strict=True)]
        return pipeline_costs(placed, message_s, ends_s)

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`: a message always takes as long."""
        line, cost = placed[number], priced[number]
        links = [
            link_of(number, message, seconds, len(cost.stages))
            for message, seconds in zip(cost.messages, cost.message_s, strict=True)
        ]
        return Step({number: (line.num_micro_batches, stage_times(cost.stages))}, line.schedule, links).spans()

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._ends.clear()


def shared_message_s(placed: Sequence[PlacedPipeline]) -> list[tuple[float, ...]]:
    """Seconds of each message of each pipeline [pipelines][messages] where all of them share the network throughout."""
    load_s = total_load([item for line in placed for item in line.network_load])
    return [tuple([message.seconds(load_s) for message in line.messages]) for line in placed]


def pipeline_costs(
    placed: Sequence[PlacedPipeline], message_s: Sequence[tuple[float, ...]], ends_s: Sequence[tuple[float, ...]]
) -> tuple[PipelineCost, ...]:
    """The costs of pipelines from seconds of their messages [pipelines][messages] and ends of their executors
    [pipelines][executors]."""
    return tuple(
        [
            PipelineCost(line.stages, line.plain_messages, seconds, ends, max(ends))
            for line, seconds, ends in zip(placed, message_s, ends_s, strict=True)
        ]
    )


def stage_times(stages: Sequence[StageCost]) -> list[StageTimes]:
    """What the executors of each stage take, as the simulation asks for it."""
    return [tuple([executor.chunk_s for executor in stage.executors]) for stage in stages]


def _ends_s(key: tuple[PipelineGraph, tuple[float, ...]]) -> tuple[float, ...]:
    graph, message_s = key
    return graph.ends_s(message_s)
