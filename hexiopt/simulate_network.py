"""A finer simulation of one training step: messages share the network while they are under way.

The cost model lets all messages of a step share an interface all the time, each taking as long as if all others of its
interface came along. Here a message shares it with those only that are under way at once, by max-min fairness
(`fair_shares.py`). Nothing searches with it, as it takes longer than a price; beside a price it says how much of it is
waiting for messages that never meet.
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from hexiopt.cost.boundary import pipeline_ways
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.model import CostModel
from hexiopt.fair_shares import fair_rates
from hexiopt.plan import Pipeline, Plan
from hexiopt.simulate import Operation, neighbour, operation_s, operations, partners_of

_MOST_MEETINGS = 1_000_000
_Place = tuple[int, int, int]  # pipeline, stage, replica


def simulate_network(model: CostModel, plan: Plan) -> Cost:
    """The cost of `plan`, its pipelines ending as simulated; `send_*_s` and `links` stay those of static shares.

    Gradient sync and optimiser follow as in `model`. Raises ValueError as `model.price`, and for sequence layouts.
    """
    if _has_layouts(plan):
        raise ValueError("messages of sequence layouts are not simulated")
    priced = model.pipelines(plan)
    ended = _Step(model, plan, priced).run()
    found = []
    for p, (pipeline, cost) in enumerate(zip(plan.pipelines, priced, strict=True)):
        ends = tuple(
            tuple(ended[p, s, r] for r in range(len(stage.replicas))) for s, stage in enumerate(pipeline.stages)
        )
        stage_end_s = tuple(map(max, ends))
        kept = ends if cost.replica_end_s else ()
        found.append(replace(cost, stage_end_s=stage_end_s, end_s=max(stage_end_s), replica_end_s=kept))
    return model.price(plan, found)


def is_simulated(plan: Plan) -> bool:
    """Whether `simulate_network` knows such plans and takes but seconds: no sequence layouts, not too many messages,
    each of which may meet one of every way."""
    ways = messages = 0
    for pipeline in plan.pipelines:
        replicas = [len(stage.replicas) for stage in pipeline.stages]
        own = 2 * sum(a + b - 1 for a, b in pairwise([*replicas, replicas[0]] if pipeline.num_chunks > 1 else replicas))
        ways, messages = ways + own, messages + own * pipeline.num_chunks * pipeline.num_micro_batches
    return messages * ways <= _MOST_MEETINGS and not _has_layouts(plan)


def _has_layouts(plan: Plan) -> bool:
    return any(stage.sequence is not None for pipeline in plan.pipelines for stage in pipeline.stages)


@dataclass(eq=False, slots=True)
class _Way:
    """From one replica to another: messages go one after another, each latency first."""

    stage: int  # of the sender
    target: _Place
    needs: dict[int, float]  # of the network: seconds for which a message alone needs a resource
    most: float  # messages a second by what is not shared
    latency_s: float
    waiting: deque[Operation] = field(default_factory=deque)  # what the messages come from
    left: float = 0.0  # of the first one
    rate: float = 0.0


class _Step:
    """One step of all pipelines, event by event."""

    def __init__(self, model: CostModel, plan: Plan, priced: tuple[PipelineCost, ...]) -> None:
        self._pipelines, self._priced = plan.pipelines, priced
        self._now, self._events, self._count = 0.0, list[tuple[float, int, _Place | _Way, Operation | None]](), 0
        self._todo: dict[_Place, list[Operation]] = {}
        self._ways: dict[tuple[_Place, str, int], _Way] = {}  # by sender, kind and replica of the receiver
        self._partners = [partners_of(pipeline) for pipeline in plan.pipelines]
        self._came: Counter[tuple[_Place, Operation]] = Counter()
        self._running: set[_Place] = set()
        self._moving: list[_Way] = []
        self._ended: dict[_Place, float] = {}
        for p, pipeline in enumerate(plan.pipelines):
            self._add_ways(model, p, pipeline)
            for s, stage in enumerate(pipeline.stages):
                order = operations(
                    plan.schedule, s, len(pipeline.stages), pipeline.num_micro_batches, pipeline.num_chunks
                )
                for r in range(len(stage.replicas)):
                    self._todo[p, s, r] = order[::-1]

    def run(self) -> dict[_Place, float]:
        """When the last operation of every replica ends, in seconds from the step's start."""
        for place in self._todo:
            self._begin(place)
        while self._events or self._moving:
            first = min(self._moving, key=lambda way: max(0.0, way.left) / way.rate, default=None)
            arrival_s = inf if first is None else self._now + max(0.0, first.left) / first.rate
            if first is not None and (not self._events or arrival_s <= self._events[0][0]):
                self._move_to(arrival_s)
                self._moving.remove(first)
                self._share()
                self._arrived(first)
                continue
            time_s, _, what, operation = heapq.heappop(self._events)
            self._move_to(time_s)
            if operation is not None:
                assert not isinstance(what, _Way), "operations run at places"
                self._ran(what, operation)
            elif isinstance(what, _Way) and what.needs:
                what.left = 1.0
                self._moving.append(what)
                self._share()
            elif isinstance(what, _Way):
                self._arrived(what)
        return self._ended

    def _add_ways(self, model: CostModel, p: int, pipeline: Pipeline) -> None:
        count = len(pipeline.stages)
        for way in pipeline_ways(pipeline, model.hop, model.message_bytes(1)):
            kind, step = ("backward", -1) if way.backward else ("forward", 1)
            target = p, (way.stage + step) % count, way.receiver
            needs = {resource: each * way.num_bytes for resource, each in way.hop.shared}
            port_s = way.hop.port_s_per_byte * way.num_bytes
            found = _Way(way.stage, target, needs, 1.0 / port_s if port_s else inf, way.hop.latency_s)
            self._ways[(p, way.stage, way.sender), kind, way.receiver] = found

    def _at(self, time_s: float, what: _Place | _Way, operation: Operation | None = None) -> None:
        heapq.heappush(self._events, (time_s, self._count, what, operation))
        self._count += 1

    def _move_to(self, time_s: float) -> None:
        for way in self._moving:
            way.left -= way.rate * (time_s - self._now)
        self._now = time_s

    def _share(self) -> None:
        rates = fair_rates([way.needs for way in self._moving], [way.most for way in self._moving])
        for way, rate in zip(self._moving, rates, strict=True):
            way.rate = rate

    def _begin(self, place: _Place) -> None:
        """Start a replica's next operation if its input is there."""
        if place in self._running or not self._todo[place]:
            return
        p, s, r = place
        kind, chunk, _ = operation = self._todo[place][-1]
        source = neighbour(kind, s, chunk, len(self._pipelines[p].stages), self._pipelines[p].num_chunks, -1)
        if source is not None and self._came[place, operation] < len(self._partners[p][(s, r), source[0]]):
            return
        self._todo[place].pop()
        self._running.add(place)
        self._at(self._now + operation_s(self._priced[p], (s, r), kind)[chunk], place, operation)

    def _ran(self, place: _Place, operation: Operation) -> None:
        """Send what an operation has made, and go on."""
        self._running.discard(place)
        self._ended[place] = self._now
        p, s, r = place
        kind, chunk, _ = operation
        target = neighbour(kind, s, chunk, len(self._pipelines[p].stages), self._pipelines[p].num_chunks, 1)
        for receiver in self._partners[p][(s, r), target[0]] if target is not None else ():
            way = self._ways[place, kind, receiver]
            way.waiting.append(operation)
            if len(way.waiting) == 1:
                self._start(way)
        self._begin(place)

    def _start(self, way: _Way) -> None:
        """The first message's latency, and all of one that crosses nothing that is shared."""
        self._at(self._now + way.latency_s + (0.0 if way.needs else 1.0 / way.most), way)

    def _arrived(self, way: _Way) -> None:
        """The first message of a way is there."""
        kind, chunk, batch = way.waiting.popleft()
        p = way.target[0]
        target = neighbour(kind, way.stage, chunk, len(self._pipelines[p].stages), self._pipelines[p].num_chunks, 1)
        assert target is not None, "a message was sent to a stage"
        self._came[way.target, (kind, target[1], batch)] += 1
        if way.waiting:
            self._start(way)
        self._begin(way.target)
