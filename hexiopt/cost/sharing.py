"""How the messages between stages share the network.

Whatever crosses an interface, an uplink or a stated link at once shares it: the load of a resource is the sum over
executors of the seconds for which their messages need it alone. Forward and backward messages of one executor
alternate, so the larger counts. A message takes as long as the most loaded resource on its route, plus the latency.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hexiopt.cost.executors.routes import NetworkLoad, Route
from hexiopt.plan.messages import Message, messages_of
from hexiopt.plan.parallelism import TokenLayout
from hexiopt.plan.plan import Pipeline


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """A message of a pipeline, its route, and its size in bytes."""

    message: Message
    route: Route
    num_bytes: float

    def seconds(self, load_s: NetworkLoad) -> float:
        """Seconds from its start to its end while the resources are loaded with `load_s`, its own part included."""
        return self.route.seconds(self.num_bytes, load_s)


def placed_messages(
    layouts: Sequence[Sequence[TokenLayout]],
    samples: tuple[tuple[int, ...], ...],
    route_of: Callable[[TokenLayout, TokenLayout], Route],
    sample_bytes: float,
    wraps: bool,
) -> tuple[PlacedMessage, ...]:
    """The messages of a pipeline. Executor r of stage s is `layouts[s][r]` and takes `samples[s][r]` of a micro-batch.

    `sample_bytes` are the hidden states of one sequence. If the pipeline `wraps`, its last stage sends to the first.
    """
    count = len(layouts)
    found = []
    for one in messages_of(samples, wraps):
        route = route_of(layouts[one.stage][one.sender], layouts[one.target(count)][one.receiver])
        found.append(PlacedMessage(one, route, one.samples * sample_bytes))
    return tuple(found)


def pipeline_messages(
    pipeline: Pipeline, route_of: Callable[[TokenLayout, TokenLayout], Route], sample_bytes: float
) -> tuple[PlacedMessage, ...]:
    """As `placed_messages`, of a pipeline of a plan."""
    samples = tuple([stage.samples(pipeline.micro_batch_size) for stage in pipeline.stages])
    layouts = [stage.token_layouts for stage in pipeline.stages]
    return placed_messages(layouts, samples, route_of, sample_bytes, pipeline.num_chunks > 1)


def executor_loads(messages: Iterable[PlacedMessage]) -> list[tuple[int, float]]:
    """(network resource, seconds per micro-batch) of every executor of a pipeline that sends."""
    sends: dict[tuple[int, int], tuple[list[tuple[Route, float]], list[tuple[Route, float]]]] = {}
    for one in messages:
        sender = one.message.stage, one.message.sender
        sends.setdefault(sender, ([], []))[one.message.backward].append((one.route, one.num_bytes))
    return [item for ahead, back in sends.values() for item in executor_load(ahead, back).items()]


def executor_load(ahead: Iterable[tuple[Route, float]], back: Iterable[tuple[Route, float]]) -> NetworkLoad:
    """Seconds per micro-batch for which one executor's messages (route, bytes) occupy each network resource.

    Forward and backward messages alternate, so the slower direction counts.
    """
    load = _sent(ahead)
    for resource, seconds in _sent(back).items():
        if seconds >= load.get(resource, 0.0):
            load[resource] = seconds
    return load


def _sent(sends: Iterable[tuple[Route, float]]) -> NetworkLoad:
    return total_load(
        (resource, s_per_byte * num_bytes) for route, num_bytes in sends for resource, s_per_byte in route.shared
    )


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


def longest_s(
    messages: Sequence[Message], message_s: Sequence[float], num_stages: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The longest message ahead and the longest back at each boundary [stages − 1], in seconds.

    Messages between the last stage and the first are left out.
    """
    ahead, back = [0.0] * num_stages, [0.0] * num_stages
    for one, seconds in zip(messages, message_s, strict=True):
        longest, boundary = (back, one.stage - 1) if one.backward else (ahead, one.stage)
        if seconds > longest[boundary]:
            longest[boundary] = seconds
    return tuple(ahead[: num_stages - 1]), tuple(back[: num_stages - 1])
