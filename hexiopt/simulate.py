"""An event simulation of one training step: it replays a plan's operations and messages one by one.

It shares the stage times and the static shares of the network with the cost model, not its recurrences: the
timeline it makes must end when the cost model says.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.plan import Pipeline, Plan


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time on a stage: `kind` is forward, backward, send_forward or send_backward."""

    kind: str
    pipeline: int
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


def operations(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """What a stage runs, in order: (kind, micro-batch)."""
    forwards = [("forward", k) for k in range(num_micro_batches)]
    backwards = [("backward", k) for k in range(num_micro_batches)]
    if schedule == "gpipe":
        return forwards + backwards
    warm_up = min(num_micro_batches, num_stages - 1 - stage)
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[num_micro_batches - warm_up :]


def simulate_pipeline(index: int, pipeline: Pipeline, cost: PipelineCost, schedule: str) -> Iterator[Event]:
    """All events of one pipeline, in the order in which they end."""
    count, batches = len(pipeline.stages), pipeline.num_micro_batches
    todo = [operations(schedule, s, count, batches)[::-1] for s in range(count)]
    inbox: list[set[tuple[str, int]]] = [set() for _ in range(count)]
    inbox[0] = {("forward", k) for k in range(batches)}
    running = [False] * count
    link_free: dict[tuple[str, int], float] = {}
    events: list[tuple[float, int, Event]] = []
    counter = 0

    def push(event: Event) -> None:
        nonlocal counter
        heapq.heappush(events, (event.end_s, counter, event))
        counter += 1

    def begin(stage: int, now: float) -> None:
        """Start the stage's next operation if its input is there."""
        if running[stage] or not todo[stage]:
            return
        kind, batch = todo[stage][-1]
        own_output = kind == "backward" and stage == count - 1
        if not own_output and (kind, batch) not in inbox[stage]:
            return
        todo[stage].pop()
        running[stage] = True
        times = cost.stages[stage]
        seconds = times.forward_s if kind == "forward" else times.backward_s
        push(Event(kind, index, stage, batch, now, now + seconds))

    def send(kind: str, stage: int, batch: int, now: float) -> None:
        """Put a message on its link, behind those before it."""
        start = max(now, link_free.get((kind, stage), 0.0))
        seconds = cost.send_forward_s[stage] if kind == "forward" else cost.send_backward_s[stage - 1]
        link_free[kind, stage] = start + seconds
        push(Event(f"send_{kind}", index, stage, batch, start, start + seconds))

    for stage in range(count):
        begin(stage, 0.0)
    while events:
        now, _, event = heapq.heappop(events)
        yield event
        if event.kind in ("forward", "backward"):
            running[event.stage] = False
            if (event.kind == "forward" and event.stage < count - 1) or (event.kind == "backward" and event.stage > 0):
                send(event.kind, event.stage, event.micro_batch, now)
            begin(event.stage, now)
        else:
            kind = event.kind.removeprefix("send_")
            target = event.stage + (1 if kind == "forward" else -1)
            inbox[target].add((kind, event.micro_batch))
            begin(target, now)


def simulate(plan: Plan, cost: Cost) -> tuple[Event, ...]:
    """The events of all pipelines of one step, by end time within a pipeline."""
    return tuple(
        event
        for index, (pipeline, priced) in enumerate(zip(plan.pipelines, cost.pipelines, strict=True))
        for event in simulate_pipeline(index, pipeline, priced, plan.schedule)
    )
