"""How the messages of all pipelines of a plan share the network, and when executors end for it.

A message has a part of its resources for as long as it is under way, beside those that are under way with it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.simulation.engine import SimulatedLink, Span, StageTimes, Step, link_of


class NetworkModel(Protocol):
    """How the messages of all pipelines of a plan share the network, and when executors end as a result."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The costs of pipelines that run beside each other [pipelines]."""

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """The operations and messages of pipeline `number` of those with costs `priced`, in the order of their ends."""

    def forget(self) -> None:
        """Free the memory of remembered pipelines."""


class FairShares:
    """A network whose resources are shared by those messages that are under way at once, by max-min fairness.

    Times are of the compiled clock, spans of the event simulation (`hexiopt/simulation`), which ends when the clock
    does; those of the last plan are remembered.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._spans = Memo(_simulate, 1)

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        return tuple(
            [
                PipelineCost(line.stages, line.plain_messages, message_s, ends_s, max(ends_s))
                for line, (ends_s, message_s) in zip(placed, self._clock.times(placed), strict=True)
            ]
        )

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`."""
        return (span for span in self._spans[tuple(placed)] if span.pipeline == number)

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._clock.forget()
        self._spans.clear()


def stage_times(stages: Sequence[StageCost]) -> list[StageTimes]:
    """What the executors of each stage take, as the simulation asks for it."""
    return [tuple([executor.chunk_s for executor in stage.executors]) for stage in stages]


def _simulate(placed: tuple[PlacedPipeline, ...]) -> tuple[Span, ...]:
    """All spans of pipelines that share the network, in the order in which they end."""
    links = [link for p, line in enumerate(placed) for link in _links(p, line)]
    running = {p: (line.num_micro_batches, stage_times(line.stages)) for p, line in enumerate(placed)}
    return tuple(Step(running, placed[0].schedule, links).spans())


def _links(p: int, pipeline: PlacedPipeline) -> Iterator[SimulatedLink]:
    for placed, lane in zip(pipeline.messages, pipeline.lanes.by_message(), strict=True):
        yield link_of(p, placed.message, lane.fixed_s, len(pipeline.stages), dict(lane.needs), lane.most)
