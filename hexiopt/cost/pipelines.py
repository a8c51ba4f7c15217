"""When the executors of all pipelines of a plan end: a network model, and ours with static shares of the network."""

from collections.abc import Sequence
from typing import Protocol

from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.sharing import total_load
from hexiopt.memo import Memo
from hexiopt.schedules.recurrence import PipelineGraph

_KEPT = 50_000  # pipelines with the seconds of their messages


class NetworkModel(Protocol):
    """How the messages of all pipelines of a plan share the network, and when executors end for it."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline beside the others."""

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

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._ends.clear()


def _ends_s(key: tuple[PipelineGraph, tuple[float, ...]]) -> tuple[float, ...]:
    graph, message_s = key
    return graph.ends_s(message_s)
