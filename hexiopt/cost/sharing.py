"""How the messages between stages share the network.

Whatever crosses an interface, an uplink or a stated link at once shares it: the load of a resource is the sum over
executors of the seconds for which their messages need it alone. Forward and backward messages of one executor
alternate, so the larger counts. A message takes as long as the most loaded resource on its route, plus the latency.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hexiopt.cost.executors.routes import NetworkLoad, Route
from hexiopt.plan.messages import Message, longest_s
from hexiopt.plan.messages import messages as messages_in
from hexiopt.plan.plan import Ends, Pipeline


class PlacedMessage(NamedTuple):
    """A message of a pipeline, its route, and its size in bytes."""

    message: Message
    route: Route
    num_bytes: float

    def seconds(self, load_s: NetworkLoad) -> float:
        """Seconds from its start to its end while the resources are loaded with `load_s`, its own part included."""
        _, route, num_bytes = self
        slowest = route.port_s_per_byte * num_bytes
        for resource, _ in route.shared:
            if load_s[resource] > slowest:
                slowest = load_s[resource]
        return slowest + route.latency_s


def placed_messages(
    messages: Iterable[Message],
    ends: Sequence[Sequence[Ends]],
    route_of: Callable[[Ends, Ends], Route],
    sample_bytes: float,
) -> tuple[PlacedMessage, ...]:
    """`messages` of a pipeline whose executor r of stage s is `ends[s][r]`.

    `sample_bytes` are the hidden states of one sequence.
    """
    count = len(ends)
    return tuple(
        [
            PlacedMessage(
                one,
                route_of(ends[one.stage][one.sender], ends[one.target(count)][one.receiver]),
                one.samples * sample_bytes,
            )
            for one in messages
        ]
    )


def pipeline_messages(
    pipeline: Pipeline, route_of: Callable[[Ends, Ends], Route], sample_bytes: float
) -> tuple[PlacedMessage, ...]:
    """As `placed_messages`, all of a pipeline of a plan."""
    return placed_messages(messages_in(pipeline), [stage.ends for stage in pipeline.stages], route_of, sample_bytes)


def network_load(messages: Iterable[PlacedMessage]) -> tuple[tuple[int, float], ...]:
    """(network resource, seconds per micro-batch) for which the messages of every executor occupy it.

    Forward and backward messages of an executor alternate, so the slower direction counts.
    """
    load_s: dict[tuple[int, int, int], list[float]] = {}
    for message, route, num_bytes in messages:
        for resource, s_per_byte in route.shared:
            both = load_s.setdefault((message.stage, message.sender, resource), [0.0, 0.0])
            both[message.backward] += s_per_byte * num_bytes
    return tuple([(resource, max(both)) for (_, _, resource), both in load_s.items()])


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
