"""An event simulation of one training step: it replays a plan's operations and messages one by one.

It shares stage times and the order of operations with the cost model, not its recurrence. With the static shares of
the network too, the timeline it makes must end when the cost model says; `network.py` has messages share it otherwise.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.schedules.schedule import Schedule, StagePosition, operations
from hexiopt.simulation.fair_shares import fair_rates


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time on a stage: `kind` is forward, backward, send_forward or send_backward.

    `replica` of the stage runs or sends it, `chunk` is the layer range, and a message goes to replica `receiver`.
    """

    kind: str
    pipeline: int
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    chunk: int = 0
    replica: int = 0
    receiver: int = 0


_Operation = tuple[str, int, int]  # forward or backward, layer range, micro-batch
Place = tuple[int, int, int]  # pipeline, stage, replica
_At = tuple[int, int]  # stage, replica


@dataclass(eq=False, slots=True)
class Way:
    """From one replica to another. Messages go one after another: `fixed_s` seconds, and then, where they share the
    network, as long as their share of it takes.

    `needs` has the seconds for which a message alone needs each shared resource, `most` is the most messages a second
    by all that is not shared.
    """

    sender: Place
    kind: str  # of the operation that sends: forward or backward
    receiver: Place
    fixed_s: float
    needs: Mapping[int, float] = field(default_factory=dict)
    most: float = inf
    waiting: deque[_Operation] = field(default_factory=deque)  # what the messages come from; the first is under way
    began_s: float = 0.0
    left: float = 0.0  # share of the first that has not gone over
    rate: float = 0.0  # share a second


class Step:
    """One step of some pipelines, event by event. `pipelines` are by their numbers in the plan."""

    def __init__(
        self, pipelines: Mapping[int, tuple[Pipeline, PipelineCost]], schedule: Schedule, ways: Iterable[Way]
    ) -> None:
        self._pipelines = pipelines
        self._ways = {(way.sender, way.kind, way.receiver[2]): way for way in ways}
        self._partners = {p: _partners(pipeline) for p, (pipeline, _) in pipelines.items()}
        self._now, self._events, self._count = 0.0, list[tuple[float, int, Event | Way]](), 0
        self._moving: list[Way] = []  # whose messages share the network now
        self._running: set[Place] = set()
        self._came: Counter[tuple[Place, _Operation]] = Counter()  # messages of an operation's input
        self._todo: dict[Place, list[_Operation]] = {}
        for p, (pipeline, _) in pipelines.items():
            count, batches, chunks = len(pipeline.stages), pipeline.num_micro_batches, pipeline.num_chunks
            for s, stage in enumerate(pipeline.stages):
                order = operations(schedule, StagePosition(s, count, batches, chunks))
                todo = [(kind.value, chunk, batch) for kind, chunk, batch in reversed(order)]
                self._todo |= {(p, s, r): todo.copy() for r in range(len(stage.executors))}

    def events(self) -> Iterator[Event]:
        """All events in the order in which they end."""
        for place in self._todo:
            self._begin(place)
        while self._events or self._moving:
            first = min(self._moving, key=lambda way: max(0.0, way.left) / way.rate, default=None)
            arrival_s = inf if first is None else self._now + max(0.0, first.left) / first.rate
            if first is not None and (not self._events or arrival_s <= self._events[0][0]):
                self._move_to(arrival_s)
                self._moving.remove(first)
                self._share()
                yield self._arrived(first)
                continue
            time_s, _, what = heapq.heappop(self._events)
            self._move_to(time_s)
            if isinstance(what, Event):
                yield what
                self._ended(what)
            elif what.needs:
                what.left = 1.0
                self._moving.append(what)
                self._share()
            else:
                yield self._arrived(what)

    def _at(self, time_s: float, what: Event | Way) -> None:
        heapq.heappush(self._events, (time_s, self._count, what))
        self._count += 1

    def _move_to(self, time_s: float) -> None:
        for way in self._moving:
            way.left -= way.rate * (time_s - self._now)
        self._now = time_s

    def _share(self) -> None:
        rates = fair_rates([way.needs for way in self._moving], [way.most for way in self._moving])
        for way, rate in zip(self._moving, rates, strict=True):
            way.rate = rate

    def _neighbour(self, place: Place, kind: str, chunk: int, step: int) -> tuple[int, int] | None:
        pipeline = self._pipelines[place[0]][0]
        return _neighbour(kind, place[1], chunk, len(pipeline.stages), pipeline.num_chunks, step)

    def _begin(self, place: Place) -> None:
        """Start the replica's next operation if its input is there."""
        if place in self._running or not self._todo[place]:
            return
        p, s, r = place
        kind, chunk, batch = operation = self._todo[place][-1]
        source = self._neighbour(place, kind, chunk, -1)
        if source is not None and self._came[place, operation] < len(self._partners[p][(s, r), source[0]]):
            return
        self._todo[place].pop()
        self._running.add(place)
        end_s = self._now + _seconds(self._pipelines[p][1], (s, r), kind)[chunk]
        self._at(end_s, Event(kind, p, s, batch, self._now, end_s, chunk, r))

    def _ended(self, event: Event) -> None:
        """Put an operation's messages on their ways, behind those before them, and go on."""
        place = p, s, r = event.pipeline, event.stage, event.replica
        self._running.discard(place)
        target = self._neighbour(place, event.kind, event.chunk, 1)
        for receiver in self._partners[p][(s, r), target[0]] if target is not None else ():
            way = self._ways[place, event.kind, receiver]
            way.waiting.append((event.kind, event.chunk, event.micro_batch))
            if len(way.waiting) == 1:
                self._send(way)
        self._begin(place)

    def _send(self, way: Way) -> None:
        way.began_s = self._now
        self._at(self._now + way.fixed_s, way)

    def _arrived(self, way: Way) -> Event:
        """The first message of a way is there."""
        kind, chunk, batch = way.waiting.popleft()
        p, s, r = way.sender
        sent = Event(f"send_{kind}", p, s, batch, way.began_s, self._now, chunk, r, way.receiver[2])
        target = self._neighbour(way.sender, kind, chunk, 1)
        assert target is not None, "a message was sent to a stage"
        self._came[way.receiver, (kind, target[1], batch)] += 1
        if way.waiting:
            self._send(way)
        self._begin(way.receiver)
        return sent


def simulate_pipeline(index: int, pipeline: Pipeline, cost: PipelineCost, schedule: Schedule) -> Iterator[Event]:
    """All events of one pipeline, in the order in which they end; messages take as long as `cost` says."""
    count, ways = len(pipeline.stages), []
    for link in cost.each_link:
        kind, step = ("backward", -1) if link.backward else ("forward", 1)
        receiver = index, (link.stage + step) % count, link.receiver
        ways.append(Way((index, link.stage, link.sender), kind, receiver, link.seconds))
    return Step({index: (pipeline, cost)}, schedule, ways).events()


def _seconds(cost: PipelineCost, at: _At, kind: str) -> list[float]:
    """Seconds of a replica's forwards or backwards, by layer range."""
    return [chunk[kind == "backward"] for chunk in cost.stages[at[0]].each[at[1]].each_chunk_s]


def _partners(pipeline: Pipeline) -> dict[tuple[_At, int], list[int]]:
    """Per replica and other stage, the replicas there with samples that it has too."""
    shares = []
    for stage in pipeline.stages:
        ends = list(accumulate(stage.samples(pipeline.micro_batch_size), initial=0))
        shares.append([set(range(first, end)) for first, end in pairwise(ends)])
    count = len(shares)
    return {
        ((s, r), t): [q for q, other in enumerate(shares[t]) if own & other]
        for s in range(count)
        for t in {(s - 1) % count, (s + 1) % count}
        for r, own in enumerate(shares[s])
    }


def _neighbour(
    kind: str, stage: int, chunk: int, num_stages: int, num_chunks: int, step: int
) -> tuple[int, int] | None:
    """(stage, layer range) where an operation's output goes (`step` 1) or its input comes from (-1), if anywhere."""
    at = chunk * num_stages + stage + (step if kind == "forward" else -step)
    if not 0 <= at < num_stages * num_chunks:
        return None
    return at % num_stages, at // num_stages


def simulate(plan: Plan, cost: Cost) -> tuple[Event, ...]:
    """The events of all pipelines of one step, by end time within a pipeline."""
    return tuple(
        event
        for index, (pipeline, priced) in enumerate(zip(plan.pipelines, cost.pipelines, strict=True))
        for event in simulate_pipeline(index, pipeline, priced, plan.schedule)
    )
