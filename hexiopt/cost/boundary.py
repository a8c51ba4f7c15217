"""Messages between consecutive stages, and how they share network interfaces.

Activations at a boundary are split along the sequence over the TP ranks (sequence parallelism), so receiver j
needs the part [j/n, (j+1)/n) and takes it from the senders whose parts overlap it: one copy crosses in all.
A sequence layout says which tokens each of its devices has; each token goes from its owner to its owner.
Replicas of a stage take consecutive samples of a micro-batch: each sends to those of the next stage whose samples
overlap its own. Interleaved, the last stage also sends to the first.

Whatever crosses an interface, an uplink or a stated link at once shares it: the load of a resource is the sum
over replicas of the seconds their messages need it alone; forward and backward messages of one replica alternate,
so the larger counts. A message takes as long as the most loaded resource on its way, plus the latency.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hexiopt.plan.plan import Ends, Pipeline, SequenceLayout
from hexiopt.plan.token_layout import token_ranges
from hexiopt.problem.cluster import Cluster

Load = dict[int, float]  # shared resource → seconds (per byte of the message, or in all)


@dataclass(frozen=True, slots=True)
class Hop:
    """One direction of a boundary, per byte of the whole message."""

    shared: tuple[tuple[int, float], ...]  # (resource of the network, seconds a byte needs it alone)
    port_s_per_byte: float  # the busiest sender inside a machine; with sequence layouts, receiver too
    latency_s: float

    def seconds(self, num_bytes: float, load_s: Load) -> float:
        """Seconds of a message of `num_bytes` while the resources are loaded with `load_s` (its own included)."""
        slowest = self.port_s_per_byte * num_bytes
        for resource, _ in self.shared:
            if load_s[resource] > slowest:
                slowest = load_s[resource]
        return slowest + self.latency_s

    def alone_s(self, num_bytes: float) -> float:
        """Seconds of a message of `num_bytes` when nothing else uses the network."""
        slowest = max((s for _, s in self.shared), default=0.0)
        return max(slowest, self.port_s_per_byte) * num_bytes + self.latency_s


def overlaps(senders: int, receivers: int) -> Iterable[tuple[int, int, float]]:
    """(sender, receiver, share of the message) for parts of equal length at both ends, in rank order."""
    i = j = 0
    at = 0  # in units of 1 / (senders · receivers)
    while i < senders and j < receivers:
        end = min((i + 1) * receivers, (j + 1) * senders)
        yield i, j, (end - at) / (senders * receivers)
        i, j, at = i + (end == (i + 1) * receivers), j + (end == (j + 1) * senders), end


def shared_tokens(senders: Ends, receivers: Ends) -> Iterable[tuple[int, int, float]]:
    """(sending device, receiving device, share of the message)."""
    if not isinstance(senders, SequenceLayout) and not isinstance(receivers, SequenceLayout):
        return [(senders[i], receivers[j], share) for i, j, share in overlaps(len(senders), len(receivers))]
    layout = senders if isinstance(senders, SequenceLayout) else receivers
    assert isinstance(layout, SequenceLayout)
    seq_len = sum(tokens for group in layout.groups for tokens in group.tokens)
    found: dict[tuple[int, int], Fraction | int] = {}
    here, there = _owners(senders, seq_len), _owners(receivers, seq_len)
    i = j = 0
    at: Fraction | int = 0
    while at < seq_len:
        end = min(here[i][0], there[j][0])
        pair = here[i][1], there[j][1]
        found[pair] = found.get(pair, 0) + end - at
        i, j, at = i + (here[i][0] == end), j + (there[j][0] == end), end
    return [(a, b, float(tokens / seq_len)) for (a, b), tokens in found.items()]


def _owners(ends: Ends, seq_len: int) -> list[tuple[Fraction | int, int]]:
    """(end of a run of tokens, who has it), along the sequence."""
    if not isinstance(ends, SequenceLayout):
        return [(Fraction(seq_len * (k + 1), len(ends)), device) for k, device in enumerate(ends)]
    runs = [
        (run, device)
        for group, shards in zip(ends.groups, token_ranges(ends), strict=True)
        for device, own in zip(group.devices, shards, strict=True)
        for run in own
    ]
    return [(end, device) for (_, end), device in sorted(runs)]


def hop(cluster: Cluster, senders: Ends, receivers: Ends) -> Hop:
    """The way from one stage to the next."""
    network, machine_of = cluster.network, cluster.machine_of
    shared: Load = {}
    ports: dict[tuple[bool, int], float] = {}
    ragged = isinstance(senders, SequenceLayout) or isinstance(receivers, SequenceLayout)
    latency_s = 0.0
    for a, b, share in shared_tokens(senders, receivers):
        latency_s = max(latency_s, network.pair_latency(a, b))
        if machine_of[a] == machine_of[b]:
            # Between equal parts the sender's port alone is charged; ragged ones may crowd at one receiver.
            for port in ((False, a), (True, b)) if ragged else ((False, a),):
                ports[port] = ports.get(port, 0.0) + share / network.pair_bandwidth(a, b)
        else:
            for resource in network.route(a, b):
                shared[resource] = shared.get(resource, 0.0) + share / float(network.capacity[resource])
    return Hop(tuple(shared.items()), max(ports.values(), default=0.0), latency_s)


def sender_load(ahead: Iterable[tuple[Hop, float]], back: Iterable[tuple[Hop, float]]) -> Load:
    """Seconds that one replica's messages (hop, bytes) need each shared resource: the larger of its directions."""
    load = _sent(ahead)
    for resource, seconds in _sent(back).items():
        if seconds >= load.get(resource, 0.0):
            load[resource] = seconds
    return load


def _sent(sends: Iterable[tuple[Hop, float]]) -> Load:
    return summed((resource, s_per_byte * num_bytes) for way, num_bytes in sends for resource, s_per_byte in way.shared)


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
    hop: Hop
    num_bytes: float  # of a message


def pipeline_ways(pipeline: Pipeline, hop_of: Callable[[Ends, Ends], Hop], sample_bytes: float) -> list[Way]:
    """All ways of messages in a pipeline; `sample_bytes` are one sequence's hidden states."""
    samples = [stage.samples(pipeline.micro_batch_size) for stage in pipeline.stages]
    return ways([stage.ends for stage in pipeline.stages], samples, hop_of, sample_bytes, pipeline.num_chunks > 1)


def ways(
    ends: Sequence[Sequence[Ends]],
    samples: Sequence[Sequence[int]],
    hop_of: Callable[[Ends, Ends], Hop],
    sample_bytes: float,
    wraps: bool,
) -> list[Way]:
    """As `pipeline_ways`: replica r of stage s is `ends[s][r]` and takes `samples[s][r]` of a micro-batch; where the
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
    sends: dict[tuple[int, int], tuple[list[tuple[Hop, float]], list[tuple[Hop, float]]]] = {}
    for way in found:
        sends.setdefault((way.stage, way.sender), ([], []))[way.backward].append((way.hop, way.num_bytes))
    return [item for ahead, back in sends.values() for item in sender_load(ahead, back).items()]


def round_trips_s(found: Sequence[Way], num_stages: int, load_s: Load) -> list[float]:
    """Seconds at each boundary of a pipeline [stages − 1]: the longest message ahead and the longest back, together.

    `load_s`: the seconds for which all messages need each shared resource, those of `found` included.
    """
    ahead, back = longest_s(
        [(way.backward, way.stage, way.hop.seconds(way.num_bytes, load_s)) for way in found], num_stages
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


def summed(parts: Iterable[tuple[int, float]]) -> Load:
    """The load of all parts (shared resource, seconds) together."""
    load: Load = {}
    for resource, seconds in parts:
        load[resource] = load.get(resource, 0.0) + seconds
    return load
