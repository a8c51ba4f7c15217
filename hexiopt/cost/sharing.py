"""How the messages of all pipelines of a plan share the network (`executors/network_load.py`), and when executors end
as a result."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.network_load import total_load
from hexiopt.cost.place import PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.schedules.recurrence import PipelineGraph
from hexiopt.simulation.engine import Span, StageTimes, Step, link_of

_MEMO_SIZE = 50_000  # pipelines, each with the seconds of its messages


class NetworkModel(Protocol):
    """How the messages of all pipelines of a plan share the network, and when executors end as a result."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The costs of pipelines that run beside each other [pipelines]."""

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """The operations and messages of pipeline `number` of those with costs `priced`, in the order of their ends."""

    def forget(self) -> None:
        """Free the memory of remembered pipelines."""


class StaticShares:
    """A network whose resources are shared all the time by all messages that ever use them."""

    def __init__(self) -> None:
        self._ends = Memo(_ends_s, _MEMO_SIZE)  # pipelines that are equal but for their devices end alike

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        message_s = static_message_s(placed)
        ends_s = [self._ends[line.graph, seconds] for line, seconds in zip(placed, message_s, strict=True)]
        return pipeline_costs(placed, message_s, ends_s)

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`; all transfers of a message take equally long."""
        line, cost = placed[number], priced[number]
        links = [
            link_of(number, message, seconds, len(cost.stages))
            for message, seconds in zip(cost.messages, cost.message_s, strict=True)
        ]
        return Step({number: (line.num_micro_batches, stage_times(cost.stages))}, line.schedule, links).spans()

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._ends.clear()


def static_message_s(placed: Sequence[PlacedPipeline]) -> list[tuple[float, ...]]:
    """Seconds of each message [pipelines][messages] where all of them share the network throughout."""
    load_s = total_load([item for line in placed for item in line.network_load])
    return [tuple([message.seconds(load_s) for message in line.messages]) for line in placed]


def pipeline_costs(
    placed: Sequence[PlacedPipeline], message_s: Sequence[tuple[float, ...]], ends_s: Sequence[tuple[float, ...]]
) -> tuple[PipelineCost, ...]:
    """The costs of pipelines [pipelines] from the seconds of their messages [pipelines][messages] and the ends of their
    executors [pipelines][executors]."""
    return tuple(
        [
            PipelineCost(line.stages, line.plain_messages, seconds, ends, max(ends))
            for line, seconds, ends in zip(placed, message_s, ends_s, strict=True)
        ]
    )


def stage_times(stages: Sequence[StageCost]) -> list[StageTimes]:
    """Seconds of executors for the simulation [stages][executors][ranges][kinds of operations]."""
    return [tuple([executor.chunk_s for executor in stage.executors]) for stage in stages]


def _ends_s(key: tuple[PipelineGraph, tuple[float, ...]]) -> tuple[float, ...]:
    graph, message_s = key
    return graph.ends_s(message_s)
