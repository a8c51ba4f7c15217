"""The route of a message from one stage to the next: the resources that a byte of it occupies, and for how long.

With sequence parallelism TP ranks divide the activations at a boundary along the sequence: receiver j needs the part
[j/n, (j+1)/n) and takes it from the senders whose parts overlap it, so that one copy crosses in all. Without sequence
parallelism each receiver takes a whole copy from one sender, as in Megatron-LM
(`megatron/core/pipeline_parallel/schedules.py`, `get_tensor_shapes`). With sequence layouts each token goes from the
device that has it in one stage to the device that has it in the next.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from hexiopt.cost.executors.network_load import PlacedMessage, Route, load_of
from hexiopt.memo import Memo
from hexiopt.plan.messages import Message
from hexiopt.plan.parallelism import Devices, ExpertParallel, SequenceParallel, TokenLayout
from hexiopt.plan.token_layout import token_ranges
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem


def overlaps(senders: int, receivers: int) -> Iterable[tuple[int, int, float]]:
    """(sender, receiver, share of the message) where both ends divide it equally, in rank order."""
    i = j = 0
    at = 0  # in units of 1 / (senders · receivers)
    while i < senders and j < receivers:
        end = min((i + 1) * receivers, (j + 1) * senders)
        yield i, j, (end - at) / (senders * receivers)
        i, j, at = i + (end == (i + 1) * receivers), j + (end == (j + 1) * senders), end


def token_transfers(
    senders: TokenLayout, receivers: TokenLayout, divided: bool = True
) -> Iterable[tuple[int, int, float]]:
    """(sending device, receiving device, share of the message); `divided` if TP groups have sequence parallelism."""
    if isinstance(senders, ExpertParallel) or isinstance(receivers, ExpertParallel):
        return _between_replicas(_parts(senders), _parts(receivers), divided)
    if not isinstance(senders, SequenceParallel) and not isinstance(receivers, SequenceParallel):
        if not divided:
            return [(senders[j * len(senders) // len(receivers)], to, 1.0) for j, to in enumerate(receivers)]
        return [(senders[i], receivers[j], share) for i, j, share in overlaps(len(senders), len(receivers))]
    layout = senders if isinstance(senders, SequenceParallel) else receivers
    assert isinstance(layout, SequenceParallel)
    seq_len = sum(tokens for group in layout.groups for tokens in group.tokens)
    shares: dict[tuple[int, int], Fraction | int] = {}
    here, there = _owners(senders, seq_len), _owners(receivers, seq_len)
    i = j = 0
    at: Fraction | int = 0
    while at < seq_len:
        end = min(here[i][0], there[j][0])
        pair = here[i][1], there[j][1]
        shares[pair] = shares.get(pair, 0) + end - at
        i, j, at = i + (here[i][0] == end), j + (there[j][0] == end), end
    return [(a, b, float(tokens / seq_len)) for (a, b), tokens in shares.items()]


_Parts = list[tuple[float, float, Sequence[int]]]


def _parts(layout: TokenLayout) -> _Parts:
    """[start, end) of the samples of a message, and the devices that divide each of them in rank order."""
    if not isinstance(layout, ExpertParallel):
        return [(0.0, 1.0, layout.devices if isinstance(layout, SequenceParallel) else layout)]
    ends = [0, *accumulate(layout.shares)]
    spans = zip(pairwise(ends), layout.members, strict=True)
    return [(a / ends[-1], b / ends[-1], member.devices) for (a, b), member in spans if b > a]


def _between_replicas(senders: _Parts, receivers: _Parts, divided: bool) -> Iterator[tuple[int, int, float]]:
    """As `token_transfers`, where replicas have samples of their own."""
    for first, end, here in senders:
        for low, high, there in receivers:
            if (common := min(end, high) - max(first, low)) > 0:
                for sender, receiver, share in token_transfers(tuple(here), tuple(there), divided):
                    yield sender, receiver, common * share


def _owners(layout: Devices | SequenceParallel, seq_len: int) -> list[tuple[Fraction | int, int]]:
    """(end of a run of tokens, device that has it), along the sequence."""
    if not isinstance(layout, SequenceParallel):
        return [(Fraction(seq_len * (k + 1), len(layout)), device) for k, device in enumerate(layout)]
    runs = [
        (run, device)
        for group, shards in zip(layout.groups, token_ranges(layout), strict=True)
        for device, ranges in zip(group.devices, shards, strict=True)
        for run in ranges
    ]
    return [(end, device) for (_, end), device in sorted(runs)]


def route(cluster: Cluster, senders: TokenLayout, receivers: TokenLayout, *, divided: bool = True) -> Route:
    """The route from one stage to the next; `divided` as of `token_transfers`."""
    # Between equal parts only the sender's port is charged; unequal ones may load one receiver more than any sender.
    unequal = not (isinstance(senders, tuple) and isinstance(receivers, tuple))
    load, crossings = load_of(cluster.network, token_transfers(senders, receivers, divided), receivers=unequal)
    shared = tuple([part for part in load.items() if part[0] >= 0])
    port_s_per_byte = max([seconds for resource, seconds in load.items() if resource < 0], default=0.0)
    return Route(shared, port_s_per_byte, max([latency_s for latency_s, _ in crossings], default=0.0))


def place_messages(
    messages: Iterable[Message],
    layouts: Sequence[Sequence[TokenLayout]],
    route_of: Callable[[TokenLayout, TokenLayout], Route],
    sample_bytes: float,
) -> tuple[PlacedMessage, ...]:
    """`messages` of a pipeline with routes and bytes: executor r of stage s has the tokens of `layouts[s][r]`, and a
    sequence is `sample_bytes`."""
    placed = []
    for message in messages:
        ends = layouts[message.stage][message.sender], layouts[message.target(len(layouts))][message.receiver]
        placed.append(PlacedMessage(message, route_of(*ends), message.samples * sample_bytes))
    return tuple(placed)


class Routes:
    """The routes and bytes of messages between the stages of a problem's plans."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        cluster, divided = problem.cluster, problem.workload.sequence_parallel
        self._routes = Memo[tuple[TokenLayout, TokenLayout], Route](lambda ends: route(cluster, *ends, divided=divided))

    def between(self, senders: TokenLayout, receivers: TokenLayout) -> Route:
        """The route of a message between two stages."""
        return self._routes[senders, receivers]

    def message_s(self, senders: TokenLayout, receivers: TokenLayout, micro_batch_size: int) -> float:
        """Seconds of one message between two stages, the network otherwise idle."""
        return self._routes[senders, receivers].alone_s(self.message_bytes(micro_batch_size))

    def message_bytes(self, micro_batch_size: int) -> float:
        """Bytes of a message between stages: the hidden states of one micro-batch."""
        workload = self._problem.workload
        return float(micro_batch_size * workload.seq_len * workload.message_bytes(self._problem.model.hidden_size))
