"""An event simulation of one training step: it replays a plan's operations and messages one by one.

It shares the stage times and the static shares of the network with the cost model, not its recurrences: the
timeline it makes must end when the cost model says.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.plan import Pipeline, Plan


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


Operation = tuple[str, int, int]  # forward or backward, layer range, micro-batch


def operations(
    schedule: str, stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> list[Operation]:
    """What a replica of a stage runs, in order.

    Interleaved, micro-batches go through all layer ranges in groups as large as the number of stages.
    """
    groups = [
        range(start, min(start + num_stages, num_micro_batches)) for start in range(0, num_micro_batches, num_stages)
    ]
    turns = range(num_chunks)
    forwards = [("forward", c, k) for group in groups for c in turns for k in group]
    backwards = [("backward", c, k) for group in groups for c in reversed(turns) for k in group]
    if schedule == "gpipe":
        return forwards + backwards
    warm_up = num_stages - 1 - stage
    if num_chunks > 1:
        warm_up = 2 * warm_up + (num_chunks - 1) * num_stages
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(backwards) - warm_up :]


At = tuple[int, int]  # stage, replica


def simulate_pipeline(index: int, pipeline: Pipeline, cost: PipelineCost, schedule: str) -> Iterator[Event]:
    """All events of one pipeline, in the order in which they end."""
    count, batches, chunks = len(pipeline.stages), pipeline.num_micro_batches, pipeline.num_chunks
    orders = [operations(schedule, s, count, batches, chunks)[::-1] for s in range(count)]
    places = [(s, r) for s, stage in enumerate(pipeline.stages) for r in range(len(stage.executors))]
    todo = {at: orders[at[0]].copy() for at in places}
    seconds_of = {(at, kind): operation_s(cost, at, kind) for at in places for kind in ("forward", "backward")}
    link_s = _link_seconds(cost)
    partners = partners_of(pipeline)
    came: Counter[tuple[At, Operation]] = Counter()  # messages of an operation's input
    running: set[At] = set()
    link_free: dict[tuple[str, At, At], float] = {}
    events: list[tuple[float, int, Event]] = []
    counter = 0

    def push(event: Event) -> None:
        nonlocal counter
        heapq.heappush(events, (event.end_s, counter, event))
        counter += 1

    def begin(at: At, now: float) -> None:
        """Start the replica's next operation if its input is there."""
        if at in running or not todo[at]:
            return
        kind, chunk, batch = operation = todo[at][-1]
        source = neighbour(kind, at[0], chunk, count, chunks, -1)
        if source is not None and came[at, operation] < len(partners[at, source[0]]):
            return
        todo[at].pop()
        running.add(at)
        seconds = seconds_of[at, kind][chunk]
        push(Event(kind, index, at[0], batch, now, now + seconds, chunk, at[1]))

    def send(event: Event, now: float) -> None:
        """Put an operation's messages on their links, behind those before them."""
        at = event.stage, event.replica
        target = neighbour(event.kind, event.stage, event.chunk, count, chunks, 1)
        if target is None:
            return
        for replica in partners[at, target[0]]:
            way = event.kind, at, (target[0], replica)
            start = max(now, link_free.get(way, 0.0))
            link_free[way] = end = start + link_s[event.kind, *at, replica]
            kind = f"send_{event.kind}"
            push(Event(kind, index, event.stage, event.micro_batch, start, end, event.chunk, event.replica, replica))

    for at in places:
        begin(at, 0.0)
    while events:
        now, _, event = heapq.heappop(events)
        yield event
        if event.kind in ("forward", "backward"):
            running.discard((event.stage, event.replica))
            send(event, now)
            begin((event.stage, event.replica), now)
        else:
            kind = event.kind.removeprefix("send_")
            target = neighbour(kind, event.stage, event.chunk, count, chunks, 1)
            assert target is not None, "a message was sent to a stage"
            at = target[0], event.receiver
            came[at, (kind, target[1], event.micro_batch)] += 1
            begin(at, now)


def operation_s(cost: PipelineCost, at: At, kind: str) -> list[float]:
    """Seconds of a replica's forwards or backwards, by layer range."""
    return [chunk[kind == "backward"] for chunk in cost.stages[at[0]].each[at[1]].each_chunk_s]


def _link_seconds(cost: PipelineCost) -> dict[tuple[str, int, int, int], float]:
    """Seconds of a message by kind, stage and replica of the sender, and replica of the receiver."""
    kinds = ("forward", "backward")
    return {(kinds[link.backward], link.stage, link.sender, link.receiver): link.seconds for link in cost.each_link}


def partners_of(pipeline: Pipeline) -> dict[tuple[At, int], list[int]]:
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


def neighbour(kind: str, stage: int, chunk: int, num_stages: int, num_chunks: int, step: int) -> tuple[int, int] | None:
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
