"""How the messages of all pipelines of a plan share the network, and when executors end for it.

A message has a part of its resources for as long as it is under way, beside those that are under way with it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Protocol

from hexiopt.cost.clock.clock import Clock, PipelineTimes
from hexiopt.cost.clock.folding import Lane, components, fold
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.splits import LateBytes
from hexiopt.memo import Memo
from hexiopt.schedules.operation import Operation, Turn
from hexiopt.schedules.schedule import stage_orders
from hexiopt.schedules.split import late_operations
from hexiopt.simulation.engine import SimulatedLink, Span, StageTimes, Step, link_of
from hexiopt.simulation.fair_shares import Need

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
    does, of one of equal pipelines; those of the last plan are remembered. Where it is not `compiled`, times are of the
    simulation too, except under schedules that split backwards: slower for many GPUs, but there is no kernel to compile
    or to load.
    """

    def __init__(self, compiled: bool = True) -> None:
        self.compiled = compiled
        self._clock, self._late_bytes = Clock(), LateBytes()
        self._spans = Memo(self._simulate, 1)

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        costs = []
        for line, (ends_s, message_s, orders) in zip(placed, self._times(placed), strict=True):
            stages = self._late_bytes.add(line.stages, line.graph.split, orders) if orders else line.stages
            costs.append(PipelineCost(stages, line.plain_messages, message_s, ends_s, max(ends_s)))
        return tuple(costs)

    def orders(self, placed: Sequence[PlacedPipeline]) -> list[StageOrders]:
        """As of `NetworkModel`."""
        if not any(line.schedule.splits for line in placed):
            return [stage_orders(line.schedule, line.graph.positions()) for line in placed]
        return [_stage_orders(line, times) for line, times in zip(placed, self._clock.times(placed), strict=True)]

    def _times(self, placed: Sequence[PlacedPipeline]) -> list[PipelineTimes]:
        if self.compiled or any(line.schedule.splits for line in placed):
            return self._clock.times(placed)
        return [_simulated_times(line, spans) for line, spans in zip(placed, self._spans[tuple(placed)], strict=True)]

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`."""
        return iter(self._spans[tuple(placed)][number])

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._clock.forget()
        self._late_bytes.forget()
        self._spans.clear()

    def _simulate(self, placed: tuple[PlacedPipeline, ...]) -> list[tuple[Span, ...]]:
        """The spans of each pipeline in the order in which they end [pipelines]: pipelines that share nothing are
        simulated apart, and one of those that share alike."""
        orders, spans = self.orders(placed), dict[int, tuple[Span, ...]]()
        for together in components([line.lanes.resources for line in placed]):
            lines = [placed[p] for p in together]
            folding = fold([line.graph for line in lines], [line.lanes.by_message() for line in lines])
            first = [folding.class_of.index(number) for number in range(len(folding.lanes))]
            links = [
                link
                for number, (lanes, flows) in enumerate(zip(folding.lanes, folding.flows, strict=True))
                for link in _links(number, lines[first[number]], lanes, flows)
            ]
            running = {number: stage_times(lines[k]) for number, k in enumerate(first)}
            order = {number: orders[together[k]] for number, k in enumerate(first)}
            simulated: list[list[Span]] = [[] for _ in first]
            for span in Step(running, placed[0].schedule, links, order).spans():
                simulated[span.pipeline].append(span)
            for p, number in zip(together, folding.class_of, strict=True):
                of_class = simulated[number]
                spans[p] = tuple(of_class if p == number else [replace(span, pipeline=p) for span in of_class])
        return [spans[p] for p in range(len(placed))]


def stage_times(line: PlacedPipeline) -> list[StageTimes]:
    """Seconds of executors for the simulation [stages][executors][ranges][kinds of operations]."""
    operation_s = iter(line.graph.operation_s())
    return [tuple([next(operation_s) for _ in stage.executors]) for stage in line.stages]


def _simulated_times(line: PlacedPipeline, spans: Sequence[Span]) -> PipelineTimes:
    """The times of a pipeline by the `spans` of its step."""
    ends_s, sent = dict[tuple[int, int], float](), defaultdict[tuple[bool, int, int, int], list[float]](list)
    for span in spans:
        if span.is_message:
            backward = span.kind == "send_backward"
            sent[backward, span.stage, span.executor, span.receiver].append(span.end_s - span.start_s)
        else:
            ends_s[span.stage, span.executor] = span.end_s
    executors = [(s, e) for s, stage in enumerate(line.stages) for e in range(len(stage.executors))]
    message_s = [
        sent[message.backward, message.stage, message.sender, message.receiver] for message in line.plain_messages
    ]
    return PipelineTimes(tuple([ends_s[place] for place in executors]), tuple(map(fmean, message_s)))


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
    lanes = pipeline.lanes.by_message()
    return _links(p, pipeline, lanes, [[1] * len(lane.needs) for lane in lanes])


def _links(
    p: int, pipeline: PlacedPipeline, lanes: Sequence[Lane], flows: Sequence[Sequence[int]]
) -> Iterator[SimulatedLink]:
    """Links over `lanes` [messages], on which `flows` [messages][needs] equal messages cross a resource at once."""
    for placed, lane, counts in zip(pipeline.messages, lanes, flows, strict=True):
        needs = [Need(resource, seconds, count) for (resource, seconds), count in zip(lane.needs, counts, strict=True)]
        yield link_of(p, placed.message, lane.fixed_s, len(pipeline.stages), needs, lane.most)
