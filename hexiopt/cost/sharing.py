"""How the messages of all pipelines of a plan share the network, and when executors end for it.

Whatever crosses an interface, an uplink or a stated link at once shares it: the load of a resource is the sum over
executors of the seconds for which their messages need it alone. A message takes as long as the most loaded resource on
its route, plus the latency.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.routes import NetworkLoad
from hexiopt.cost.place import PlacedMessage, PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.plan.messages import longest_s
from hexiopt.schedules.recurrence import PipelineGraph
from hexiopt.simulation.engine import Span, StageTimes, simulate_pipeline

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
        load_s = total_load([item for one in placed for item in one.network_load])
        found = []
        for one in placed:
            message_s = tuple([message.seconds(load_s) for message in one.messages])
            ends = self._ends[one.graph, message_s]
            found.append(PipelineCost(one.stages, one.plain_messages, message_s, ends, max(ends)))
        return tuple(found)

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`: a message always takes as long."""
        schedule, batches, cost = placed[number].schedule, placed[number].num_micro_batches, priced[number]
        return simulate_pipeline(number, schedule, batches, stage_times(cost.stages), cost.messages, cost.message_s)

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._ends.clear()


def stage_times(stages: Sequence[StageCost]) -> list[StageTimes]:
    """What the executors of each stage take, as the simulation asks for it."""
    return [tuple([executor.chunk_s for executor in stage.executors]) for stage in stages]


def _ends_s(key: tuple[PipelineGraph, tuple[float, ...]]) -> tuple[float, ...]:
    graph, message_s = key
    return graph.ends_s(message_s)


def total_load(parts: Iterable[tuple[int, float]]) -> NetworkLoad:
    """The load of all parts (network resource, seconds) together."""
    load: NetworkLoad = {}
    for resource, seconds in parts:
        load[resource] = load.get(resource, 0.0) + seconds
    return load


def round_trips_s(messages: Sequence[PlacedMessage], num_stages: int, load_s: NetworkLoad) -> list[float]:
    """Seconds at each boundary of a pipeline [stages − 1]: the longest message ahead and the longest back, together.

    `load_s`: the seconds for which all messages need each network resource, those of `messages` included.
    """
    ahead, back = longest_s([one.message for one in messages], [one.seconds(load_s) for one in messages], num_stages)
    return [a + b for a, b in zip(ahead, back, strict=True)]
