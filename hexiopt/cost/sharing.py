"""How the messages of all pipelines of a plan share the network (`executors/network_load.py`), and when executors end
for it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from hexiopt.cost.clock.clock import Clock, Run
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.executors.network_load import total_load
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.splits import with_late_bytes
from hexiopt.memo import Memo
from hexiopt.schedules.operation import Operation, Turn
from hexiopt.schedules.recurrence import PipelineGraph
from hexiopt.schedules.schedule import operations, positions
from hexiopt.schedules.split import late_operations
from hexiopt.simulation.engine import Span, StageTimes, Step, link_of

_KEPT = 50_000  # pipelines with the seconds of their messages


StageOrders = tuple[tuple[Operation, ...], ...]  # of each stage of a pipeline


class NetworkModel(Protocol):
    """How the messages of all pipelines of a plan share the network, and when executors end for it."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline beside the others."""

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """The operations and messages of the pipeline `number` of those that it `priced`, in the order in which they
        end."""

    def orders(self, placed: Sequence[PlacedPipeline]) -> list[StageOrders]:
        """What the executors of each stage run, in the order in which they were priced [pipelines][stages]."""

    def forget(self) -> None:
        """Give back what is remembered of pipelines."""


class StaticShares:
    """A network whose resources are shared all the time by all messages that ever use them."""

    def __init__(self) -> None:
        self._ends = Memo(_ends_s, _KEPT)  # pipelines that are equal but for their devices end alike
        self._clock = Clock()  # of split backwards

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        message_s = shared_message_s(placed)
        return pipeline_costs(placed, message_s, self._runs(placed, message_s))

    def _runs(self, placed: Sequence[PlacedPipeline], message_s: Sequence[tuple[float, ...]]) -> list[Run]:
        each = zip([line.graph for line in placed], message_s, strict=True)
        return [self._clock.alone(graph, s) if graph.split else Run(self._ends[graph, s]) for graph, s in each]

    def orders(self, placed: Sequence[PlacedPipeline]) -> list[StageOrders]:
        """As of `NetworkModel`."""
        return stage_orders(placed, self._runs(placed, shared_message_s(placed)))

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`: a message always takes as long."""
        line, cost = placed[number], priced[number]
        links = [
            link_of(number, message, seconds, len(cost.stages))
            for message, seconds in zip(cost.messages, cost.message_s, strict=True)
        ]
        pipelines = {number: (line.num_micro_batches, stage_times(line))}
        orders = {number: self.orders(placed)[number]} if line.schedule.splits else None
        return Step(pipelines, line.schedule, links, orders).spans()

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._ends.clear()
        self._clock.forget()


def shared_message_s(placed: Sequence[PlacedPipeline]) -> list[tuple[float, ...]]:
    """Seconds of each message of each pipeline [pipelines][messages] where all of them share the network throughout."""
    load_s = total_load([item for line in placed for item in line.network_load])
    return [tuple([message.seconds(load_s) for message in line.messages]) for line in placed]


def pipeline_costs(
    placed: Sequence[PlacedPipeline], message_s: Sequence[tuple[float, ...]], runs: Sequence[Run]
) -> tuple[PipelineCost, ...]:
    """The costs of pipelines from seconds of their messages [pipelines][messages] and their steps."""
    costs = []
    for line, seconds, (ends_s, orders) in zip(placed, message_s, runs, strict=True):
        stages = with_late_bytes(line.stages, line.graph.split, orders) if orders else line.stages
        costs.append(PipelineCost(stages, line.plain_messages, seconds, ends_s, max(ends_s)))
    return tuple(costs)


def stage_orders(placed: Sequence[PlacedPipeline], runs: Sequence[Run]) -> list[StageOrders]:
    """What the executors of each stage run, in order [pipelines][stages]."""
    found = []
    for line, run in zip(placed, runs, strict=True):
        graph, chunks = line.graph, len(line.graph.chunk_s[0])
        if run.orders:
            firsts = [graph.stages.index(stage) for stage in range(graph.num_stages)]
            turns = [Turn(kind, chunk) for chunk in range(chunks) for kind in line.schedule.kinds]
            own = [
                late_operations([turns[k] if k >= 0 else None for k in run.orders[e]], graph.split[e]) for e in firsts
            ]
        else:
            own = [operations(line.schedule, at) for at in positions(graph.num_stages, line.num_micro_batches, chunks)]
        found.append(tuple(map(tuple, own)))
    return found


def stage_times(line: PlacedPipeline) -> list[StageTimes]:
    """What the executors of each stage of a pipeline take, as the simulation asks for it."""
    each = iter(line.graph.operation_s())
    return [tuple([next(each) for _ in stage.executors]) for stage in line.stages]


def _ends_s(key: tuple[PipelineGraph, tuple[float, ...]]) -> tuple[float, ...]:
    graph, message_s = key
    return graph.ends_s(message_s)
