"""The route of a message from one stage to the next: what each of its bytes occupies, for how long.

Activations at a boundary are divided along the sequence over the TP ranks (sequence parallelism), so receiver j
needs the part [j/n, (j+1)/n) and takes it from the senders whose parts overlap it: one copy crosses in all. Without
sequence parallelism each receiver takes a whole copy from one sender, as in Megatron-LM
(`megatron/core/pipeline_parallel/schedules.py`, `get_tensor_shapes`).
A sequence layout says which tokens each of its devices has; each token goes from its owner to its owner.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from hexiopt.cost.executors.network_load import PlacedMessage, Route, load_of
from hexiopt.memo import Memo
from hexiopt.plan.messages import Message
from hexiopt.plan.parallelism import SequenceParallel, TokenLayout
from hexiopt.plan.token_layout import token_ranges
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem


def overlaps(senders: int, receivers: int) -> Iterable[tuple[int, int, float]]:
    """(sender, receiver, share of the message) for parts of equal length at both ends, in rank order."""
    i = j = 0
    at = 0  # in units of 1 / (senders · receivers)
    while i < senders and j < receivers:
        end = min((i + 1) * receivers, (j + 1) * senders)
        yield i, j, (end - at) / (senders * receivers)
        i, j, at = i + (end == (i + 1) * receivers), j + (end == (j + 1) * senders), end


def shared_tokens(
    senders: TokenLayout, receivers: TokenLayout, divided: bool = True
) -> Iterable[tuple[int, int, float]]:
    """(sending device, receiving device, share of the message); `divided`: TP groups have sequence parallelism."""
    if not isinstance(senders, SequenceParallel) and not isinstance(receivers, SequenceParallel):
        if not divided:
            return [(senders[j * len(senders) // len(receivers)], to, 1.0) for j, to in enumerate(receivers)]
        return [(senders[i], receivers[j], share) for i, j, share in overlaps(len(senders), len(receivers))]
    layout = senders if isinstance(senders, SequenceParallel) else receivers
    assert isinstance(layout, SequenceParallel)
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


def _owners(layout: TokenLayout, seq_len: int) -> list[tuple[Fraction | int, int]]:
    """(end of a run of tokens, who has it), along the sequence."""
    if not isinstance(layout, SequenceParallel):
        return [(Fraction(seq_len * (k + 1), len(layout)), device) for k, device in enumerate(layout)]
    runs = [
        (run, device)
        for group, shards in zip(layout.groups, token_ranges(layout), strict=True)
        for device, own in zip(group.devices, shards, strict=True)
        for run in own
    ]
    return [(end, device) for (_, end), device in sorted(runs)]


def route(cluster: Cluster, senders: TokenLayout, receivers: TokenLayout, *, divided: bool = True) -> Route:
    """The route from one stage to the next; `divided` as of `shared_tokens`."""
    # Between equal parts the sender's port alone is charged; ragged ones may crowd at one receiver.
    ragged = isinstance(senders, SequenceParallel) or isinstance(receivers, SequenceParallel)
    load, crossings = load_of(cluster.network, shared_tokens(senders, receivers, divided), receivers=ragged)
    shared = tuple([part for part in load.items() if part[0] >= 0])
    port_s_per_byte = max([seconds for resource, seconds in load.items() if resource < 0], default=0.0)
    return Route(shared, port_s_per_byte, max([latency_s for latency_s, _ in crossings], default=0.0))


def place_messages(
    messages: Iterable[Message],
    layouts: Sequence[Sequence[TokenLayout]],
    route_of: Callable[[TokenLayout, TokenLayout], Route],
    sample_bytes: float,
) -> tuple[PlacedMessage, ...]:
    """`messages` of a pipeline whose executor r of stage s is `layouts[s][r]`; a sequence has `sample_bytes`."""
    placed = []
    for one in messages:
        ends = layouts[one.stage][one.sender], layouts[one.target(len(layouts))][one.receiver]
        placed.append(PlacedMessage(one, route_of(*ends), one.samples * sample_bytes))
    return tuple(placed)


class Routes:
    """The routes of messages between the stages of a problem's plans, and what they carry."""

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
        """Bytes of a boundary's message: one micro-batch's hidden states."""
        workload = self._problem.workload
        return float(micro_batch_size * workload.seq_len * workload.message_bytes(self._problem.model.hidden_size))
