"""How the messages of all pipelines of a plan share the network, and when executors end for it.

A message has a part of its resources for as long as it is under way, beside those that are under way with it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from hexiopt.cost.clock.clock import Clock, PipelineTimes
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.splits import LateBytes
from hexiopt.memo import Memo
from hexiopt.schedules.operation import Operation, Turn
from hexiopt.schedules.schedule import stage_orders
from hexiopt.schedules.split import late_operations
from hexiopt.simulation.engine import SimulatedLink, Span, StageTimes, Step, link_of

StageOrders = tuple[tuple[Operation, ...], ...]  # of each stage of a pipeline


class NetworkModel(Protocol):
    """How the messages of all pipelines of a plan share the network, and when executors end as a result."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The costs of pipelines that run beside each other [pipelines]."""

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """The operations and messages of pipeline `number` of those with costs `priced`, in the order of their ends."""

    def orders(self, placed: Sequence[PlacedPipeline]) -> list[StageOrders]:
        """What the executors of each stage run, in the order in which they were priced [pipelines][stages]."""

    def forget(self) -> None:
        """Free the memory of remembered pipelines."""


class FairShares:
    """A network whose resources are shared by those messages that are under way at once, by max-min fairness.

    Times are of the compiled clock, spans of the event simulation (`hexiopt/simulation`), which ends when the clock
    does; those of the last plan are remembered.
    """

    def __init__(self) -> None:
        self._clock, self._late_bytes = Clock(), LateBytes()
        self._spans = Memo(self._simulate, 1)

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        costs = []
        for line, (ends_s, message_s, orders) in zip(placed, self._clock.times(placed), strict=True):
            stages = self._late_bytes.add(line.stages, line.graph.split, orders) if orders else line.stages
            costs.append(PipelineCost(stages, line.plain_messages, message_s, ends_s, max(ends_s)))
        return tuple(costs)

    def orders(self, placed: Sequence[PlacedPipeline]) -> list[StageOrders]:
        """As of `NetworkModel`."""
        return [_stage_orders(line, times) for line, times in zip(placed, self._clock.times(placed), strict=True)]

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`."""
        return (span for span in self._spans[tuple(placed)] if span.pipeline == number)

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._clock.forget()
        self._late_bytes.forget()
        self._spans.clear()

    def _simulate(self, placed: tuple[PlacedPipeline, ...]) -> tuple[Span, ...]:
        """All spans of pipelines that share the network, in the order in which they end."""
        schedule, links = placed[0].schedule, [link for p, line in enumerate(placed) for link in links_of(p, line)]
        running = {p: stage_times(line) for p, line in enumerate(placed)}
        return tuple(Step(running, schedule, links, dict(enumerate(self.orders(placed)))).spans())


def stage_times(line: PlacedPipeline) -> list[StageTimes]:
    """Seconds of executors for the simulation [stages][executors][ranges][kinds of operations]."""
    operation_s = iter(line.graph.operation_s())
    return [tuple([next(operation_s) for _ in stage.executors]) for stage in line.stages]


def _stage_orders(line: PlacedPipeline, times: PipelineTimes) -> StageOrders:
    """What the executors of each stage of a pipeline run, in order [stages]."""
    graph, chunks = line.graph, len(line.graph.chunk_s[0])
    if not times.orders:
        return stage_orders(line.schedule, graph.positions())
    first = [graph.stages.index(stage) for stage in range(graph.num_stages)]
    turns = [Turn(kind, chunk) for chunk in range(chunks) for kind in line.schedule.kinds]
    return tuple(
        [
            tuple(late_operations([turns[k] if k >= 0 else None for k in times.orders[e].turns], graph.split[e]))
            for e in first
        ]
    )


def links_of(p: int, pipeline: PlacedPipeline) -> Iterator[SimulatedLink]:
    """The links of the pipeline of number `p`, as the simulation asks for them."""
    for placed, lane in zip(pipeline.messages, pipeline.lanes.by_message(), strict=True):
        yield link_of(p, placed.message, lane.fixed_s, len(pipeline.stages), dict(lane.needs), lane.most)
