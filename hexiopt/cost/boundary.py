"""Messages between consecutive stages, and how they share network interfaces.

Replicas of a stage take consecutive samples of a micro-batch: each sends to those of the next stage whose samples
overlap its own. Interleaved, the last stage also sends to the first.

Whatever crosses an interface, an uplink or a stated link at once shares it: the load of a resource is the sum
over replicas of the seconds their messages need it alone; forward and backward messages of one replica alternate,
so the larger counts. A message takes as long as the most loaded resource on its way, plus the latency.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hexiopt.cost.executors.routes import NetworkLoad, Route
from hexiopt.plan.plan import Ends, Pipeline


def executor_load(ahead: Iterable[tuple[Route, float]], back: Iterable[tuple[Route, float]]) -> NetworkLoad:
    """Seconds that one replica's messages (hop, bytes) need each shared resource: the larger of its directions."""
    load = _sent(ahead)
    for resource, seconds in _sent(back).items():
        if seconds >= load.get(resource, 0.0):
            load[resource] = seconds
    return load


def _sent(sends: Iterable[tuple[Route, float]]) -> NetworkLoad:
    return total_load(
        (resource, s_per_byte * num_bytes) for way, num_bytes in sends for resource, s_per_byte in way.shared
    )


def sample_overlaps(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, samples that both have), a micro-batch's samples dealt to either side in order."""
    i = j = 0
    here, there = senders[0], receivers[0]  # samples not yet sent, not yet received
    while True:
        common = min(here, there)
        yield i, j, common
        here, there = here - common, there - common
        if not here:
            i += 1
            if i == len(senders):
                return
            here = senders[i]
        if not there:
            j += 1
            there = receivers[j]


@dataclass(frozen=True, slots=True)
class Way:
    """The messages of one direction from a replica of `stage` to a replica of the next stage (before, if backward)."""

    backward: bool
    stage: int
    sender: int
    receiver: int
    route: Route
    num_bytes: float  # of a message


def pipeline_messages(pipeline: Pipeline, hop_of: Callable[[Ends, Ends], Route], sample_bytes: float) -> list[Way]:
    """All ways of messages in a pipeline; `sample_bytes` are one sequence's hidden states."""
    samples = [stage.samples(pipeline.micro_batch_size) for stage in pipeline.stages]
    return ways([stage.ends for stage in pipeline.stages], samples, hop_of, sample_bytes, pipeline.num_chunks > 1)


def ways(
    ends: Sequence[Sequence[Ends]],
    samples: Sequence[Sequence[int]],
    hop_of: Callable[[Ends, Ends], Route],
    sample_bytes: float,
    wraps: bool,
) -> list[Way]:
    """As `pipeline_messages`: replica r of stage s is `ends[s][r]` and takes `samples[s][r]` of a micro-batch; if the
    pipeline `wraps`, its last stage sends to the first too."""
    count = len(ends)
    found = []
    for s in range(count if wraps else count - 1):
        t = (s + 1) % count
        for a, b, common in sample_overlaps(samples[s], samples[t]):
            here, there = ends[s][a], ends[t][b]
            num_bytes = common * sample_bytes
            found.append(Way(False, s, a, b, hop_of(here, there), num_bytes))
            found.append(Way(True, t, b, a, hop_of(there, here), num_bytes))
    return found


def ways_load(found: Sequence[Way]) -> list[tuple[int, float]]:
    """(shared resource, seconds) of every sending replica of a pipeline."""
    sends: dict[tuple[int, int], tuple[list[tuple[Route, float]], list[tuple[Route, float]]]] = {}
    for way in found:
        sends.setdefault((way.stage, way.sender), ([], []))[way.backward].append((way.route, way.num_bytes))
    return [item for ahead, back in sends.values() for item in executor_load(ahead, back).items()]


def round_trips_s(found: Sequence[Way], num_stages: int, load_s: NetworkLoad) -> list[float]:
    """Seconds at each boundary of a pipeline [stages − 1]: the longest message ahead and the longest back, together.

    `load_s`: the seconds for which all messages need each shared resource, those of `found` included.
    """
    ahead, back = longest_s(
        [(way.backward, way.stage, way.route.seconds(way.num_bytes, load_s)) for way in found], num_stages
    )
    return [a + b for a, b in zip(ahead, back, strict=True)]


def longest_s(messages: Iterable[tuple[bool, int, float]], num_stages: int) -> tuple[list[float], list[float]]:
    """The longest message ahead and the longest back at each boundary [stages − 1], in seconds.

    Of messages (backward, sending stage, seconds); those between the last stage and the first are left out.
    """
    ahead, back = [0.0] * num_stages, [0.0] * num_stages
    for backward, stage, seconds in messages:
        longest, boundary = (back, stage - 1) if backward else (ahead, stage)
        longest[boundary] = max(longest[boundary], seconds)
    return ahead[: num_stages - 1], back[: num_stages - 1]


def total_load(parts: Iterable[tuple[int, float]]) -> NetworkLoad:
    """The load of all parts (shared resource, seconds) together."""
    load: NetworkLoad = {}
    for resource, seconds in parts:
        load[resource] = load.get(resource, 0.0) + seconds
    return load
