"""The network as searches estimate it: the compiled one (`solvers/compiled/messages.py`), and that of partitions."""

from collections.abc import Sequence
from dataclasses import replace

from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.executors.network_load import NetworkLoad, PlacedMessage, executor_loads, total_load
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.sharing import FairShares


class Estimate(FairShares):
    """A message meets the others in proportion to how much of a period its resource is busy: with messages in both
    directions of an executor at once, or with those of the slower one."""

    def __init__(self, *, both_ways: bool = False) -> None:
        super().__init__()
        self._loads = _message_loads if both_ways else executor_loads

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        load_s = total_load(item for line in placed for item in self._loads(line.messages))
        lines = []
        for line in placed:
            period_s = max(sum(map(sum, chunk_s)) for chunk_s in line.graph.chunk_s)
            lanes = PipelineLanes.constant([message_s(message, load_s, period_s) for message in line.messages])
            lines.append(replace(line, lanes=lanes))
        return super().__call__(lines)


class Static(FairShares):
    """All messages of a step share the network all the time."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        load_s = total_load(item for line in placed for item in executor_loads(line.messages))
        lanes = [PipelineLanes.constant([message.seconds(load_s) for message in line.messages]) for line in placed]
        return super().__call__(
            [replace(line, lanes=pipeline_lanes) for line, pipeline_lanes in zip(placed, lanes, strict=True)]
        )


def _message_loads(messages: Sequence[PlacedMessage]) -> list[tuple[int, float]]:
    return [(resource, s_per_byte * size) for _, route, size in messages for resource, s_per_byte in route.shared]


def message_s(message: PlacedMessage, load_s: NetworkLoad, period_s: float) -> float:
    """Seconds of a message of a pipeline whose slowest stage takes `period_s` for a micro-batch."""
    _, route, num_bytes = message
    slowest = route.port_s_per_byte * num_bytes
    for resource, s_per_byte in route.shared:
        others_s = max(0.0, load_s[resource] - s_per_byte * num_bytes)
        slowest = max(slowest, s_per_byte * num_bytes + others_s * min(1.0, load_s[resource] / period_s))
    return slowest + route.latency_s
