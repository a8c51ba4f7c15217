"""An event simulation of one training step: it replays operations and messages of pipelines one by one.

It shares stage times and the order of operations with the cost model, not its kernels. Network models
(`cost/sharing.py`) take their spans from it, which must end when the kernels say.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from hexiopt.plan.messages import Message
from hexiopt.schedules.operation import Operation, OperationKind, next_place
from hexiopt.schedules.schedule import Schedule
from hexiopt.simulation.fair_shares import Need, fair_rates


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time on an executor of a stage, from `start_s` to `end_s` of the step.

    `kind` is forward, backward, send_forward or send_backward; reports add kinds of their own. `micro_batch` is -1
    where there is none; `chunk` is the layer range; a message goes to executor `receiver` of its stage.
    """

    kind: str
    pipeline: int
    stage: int
    executor: int
    start_s: float
    end_s: float
    micro_batch: int = -1
    chunk: int = 0
    receiver: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it is a message from the stage to a neighbour."""
        return self.kind.startswith("send")


# Of each executor and layer range, seconds by kind of operation; of weight gradients, those of a layer.
StageTimes = Sequence[tuple[tuple[float, ...], ...]]
ExecutorId = tuple[int, int, int]  # pipeline, stage, executor


@dataclass(eq=False, slots=True)
class SimulatedLink:
    """From one executor to another. Messages go one after another: `fixed_s` seconds, and then, where they share the
    network, as long as their share of it takes.

    A message takes `fixed_s` seconds and then, if it shares the network, the time that its share takes. `needs` is
    what a message needs of each; `most` is the most messages a second that everything else lets pass.
    """

    sender: ExecutorId
    kind: OperationKind  # of the operation that sends
    receiver: ExecutorId
    fixed_s: float
    needs: Sequence[Need] = ()
    most: float = inf
    waiting: deque[Operation] = field(default_factory=deque)  # that the messages come from; the first is in transit
    began_s: float = 0.0
    remaining: float = 0.0  # share of the first message that had not arrived at `since_s`
    since_s: float = 0.0
    rate: float = 0.0  # share of a message a second, since then
    arrival_s: float = inf  # at that rate


class Step:
    """One step, event by event; `pipelines` has the stages of each by its number in the plan, whose executors run
    `orders` [pipelines][stages]."""

    def __init__(
        self,
        pipelines: Mapping[int, Sequence[StageTimes]],
        schedule: Schedule,
        links: Iterable[SimulatedLink],
        orders: Mapping[int, Sequence[Sequence[Operation]]],
    ) -> None:
        self._stages = pipelines
        self._kinds = schedule.kinds
        self._kind_of = {kind.value: kind for kind in schedule.kinds}
        self._outgoing: dict[tuple[ExecutorId, OperationKind], list[SimulatedLink]] = {}
        self._incoming: Counter[tuple[ExecutorId, OperationKind]] = Counter()
        for link in links:
            self._outgoing.setdefault((link.sender, link.kind), []).append(link)
            self._incoming[link.receiver, link.kind] += 1
        self._now, self._events, self._count = 0.0, list[tuple[float, int, Span | SimulatedLink]](), 0
        self._moving: list[SimulatedLink] = []  # whose messages share the network now
        self._users: defaultdict[int, list[SimulatedLink]] = defaultdict(list)  # of these, by resource
        self._running: set[ExecutorId] = set()
        self._arrivals: Counter[tuple[ExecutorId, Operation]] = Counter()  # messages of an operation's input
        self._todo: dict[ExecutorId, list[Operation]] = {}
        for p, stages in pipelines.items():
            for s, (stage, order) in enumerate(zip(stages, orders[p], strict=True)):
                self._todo |= {(p, s, r): [*reversed(order)] for r in range(len(stage))}

    def spans(self) -> Iterator[Span]:
        """All spans in the order in which they end."""
        for place in self._todo:
            self._begin(place)
        while self._events or self._moving:
            first = min(self._moving, key=lambda link: link.arrival_s, default=None)
            if first is not None and (not self._events or first.arrival_s <= self._events[0][0]):
                self._now = first.arrival_s
                self._leave(first)
                yield self._arrive(first)
                continue
            time_s, _, what = heapq.heappop(self._events)
            self._now = time_s
            if isinstance(what, Span):
                yield what
                self._end(what)
            elif what.needs:
                self._join(what)
            else:
                yield self._arrive(what)

    def _plan_event(self, time_s: float, what: Span | SimulatedLink) -> None:
        heapq.heappush(self._events, (time_s, self._count, what))
        self._count += 1

    def _join(self, link: SimulatedLink) -> None:
        """The first message of a link begins to share the network."""
        link.remaining, link.since_s, link.rate = 1.0, self._now, 0.0
        self._moving.append(link)
        for need in link.needs:
            self._users[need.resource].append(link)
        self._share(link)

    def _leave(self, link: SimulatedLink) -> None:
        """The first message of a link has passed what it shares of the network."""
        self._moving.remove(link)
        for need in link.needs:
            self._users[need.resource].remove(link)
        self._share(link)

    def _share(self, changed: SimulatedLink) -> None:
        """Renew the rates of the messages that share with that of `changed`, or with others that do."""
        links, resources, seen = dict[SimulatedLink, None](), [need.resource for need in changed.needs], set[int]()
        while resources:
            if (resource := resources.pop()) not in seen:
                seen.add(resource)
                for link in self._users[resource]:
                    links[link] = None
                    resources += [need.resource for need in link.needs]
        rates = fair_rates([link.needs for link in links], [link.most for link in links])
        for link, rate in zip(links, rates, strict=True):
            if rate != link.rate:
                link.remaining -= link.rate * (self._now - link.since_s)
                link.since_s, link.rate = self._now, rate
                link.arrival_s = self._now + max(0.0, link.remaining) / rate

    def _next(self, place: ExecutorId, kind: OperationKind, chunk: int, steps: int = 1) -> tuple[int, int] | None:
        stages = self._stages[place[0]]
        return next_place(kind, place[1], chunk, len(stages), len(stages[0][0]), steps)

    def _begin(self, place: ExecutorId) -> None:
        """Start the executor's next operation if its input is there."""
        if place in self._running or not self._todo[place]:
            return
        p, s, r = place
        kind, chunk, batch = operation = self._todo[place][-1]
        source = self._next(place, kind, chunk, -1)
        if source is not None and self._arrivals[place, operation] < self._incoming[place, kind]:
            return
        self._todo[place].pop()
        self._running.add(place)
        end_s = self._now + self._stages[p][s][r][chunk][self._kinds.index(kind)]
        self._plan_event(end_s, Span(kind.value, p, s, r, self._now, end_s, batch, chunk))

    def _end(self, span: Span) -> None:
        """Put an operation's messages on their links, behind those before them, and go on."""
        place = span.pipeline, span.stage, span.executor
        self._running.discard(place)
        kind = self._kind_of[span.kind]
        for link in self._outgoing[place, kind] if self._next(place, kind, span.chunk) else ():
            link.waiting.append(Operation(kind, span.chunk, span.micro_batch))
            if len(link.waiting) == 1:
                self._send(link)
        self._begin(place)

    def _send(self, link: SimulatedLink) -> None:
        link.began_s = self._now
        self._plan_event(self._now + link.fixed_s, link)

    def _arrive(self, link: SimulatedLink) -> Span:
        """The first message of a link is there."""
        kind, chunk, batch = link.waiting.popleft()
        p, s, r = link.sender
        sent = Span(f"send_{kind.value}", p, s, r, link.began_s, self._now, batch, chunk, link.receiver[2])
        target = self._next(link.sender, kind, chunk)
        assert target is not None, "a message was sent to a stage"
        self._arrivals[link.receiver, Operation(kind, target[1], batch)] += 1
        if link.waiting:
            self._send(link)
        self._begin(link.receiver)
        return sent


def link_of(
    pipeline: int, message: Message, fixed_s: float, num_stages: int, needs: Sequence[Need] = (), most: float = inf
) -> SimulatedLink:
    """The link on which messages like `message` go in the pipeline of that number; the rest as of `SimulatedLink`."""
    sender = pipeline, message.stage, message.sender
    receiver = pipeline, message.target(num_stages), message.receiver
    kind = OperationKind.BACKWARD if message.backward else OperationKind.FORWARD
    return SimulatedLink(sender, kind, receiver, fixed_s, needs, most)
