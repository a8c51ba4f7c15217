"""An event simulation of a layer on a sequence stage: it plays compute and messages of single devices one by one.

It shares what compute and messages take with `hexiopt/cost/executors/sequence/stage.py`, not its recurrence over
groups and steps: both must end at the same time.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hexiopt.cost.executors.sequence.phases import Phase, RingSteps, Work
from hexiopt.cost.executors.sequence.stage import SequenceStage


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """Something that takes time: `kind` is work (outside attention), attention, exchange (a message of an all-to-all)
    or ring (a message of a sub-ring, whose number is `ring`).

    `place` and `receiver` are places among the devices of the layout, `phase` counts phases, `step` the steps of one.
    """

    kind: str
    place: int
    receiver: int
    phase: int
    step: int
    ring: int
    start_s: float
    end_s: float


def simulate_layer(stage: SequenceStage, phases: Iterable[Phase]) -> tuple[SequenceEvent, ...]:
    """All events of `phases`, such as `stage.forward()`, begun together at 0, in the order in which they end."""
    return tuple(_Simulation(stage, list(phases)).events())


class _Simulation:
    def __init__(self, stage: SequenceStage, phases: list[Phase]) -> None:
        self._phases = phases
        self._group: list[int] = stage.members.group.tolist()
        self._size = Counter(self._group)
        self._pairs: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # of a group: message, sender, receiver
        for k, (a, b) in enumerate(zip(stage.peers.senders.tolist(), stage.peers.receivers.tolist(), strict=True)):
            self._pairs[self._group[a]].append((k, a, b))
        self._places: list[list[int]] = stage.peers.rings.place.tolist()
        self._rings: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a device: group and number of its rings
        for g, row in enumerate(self._places):
            for ring, place in enumerate(row):
                self._rings[place].append((g, ring))
        self._queue: list[tuple[float, int, SequenceEvent]] = []
        self._pushed = 0
        self._ready: Counter[tuple[int, int]] = Counter()  # devices of a group at an all-to-all, by phase
        self._open: Counter[tuple[int, int, int]] = Counter()  # what the step of a device still waits for
        self._begun: set[tuple[int, int, int]] = set()
        self._left: Counter[tuple[int, int]] = Counter()  # messages of an all-to-all under way

    def events(self) -> Iterator[SequenceEvent]:
        """Play, event by event."""
        for place in range(len(self._group)):
            self._enter(place, 0, 0, 0.0)
        while self._queue:
            now, _, event = heapq.heappop(self._queue)
            yield event
            if event.kind == "work":
                self._enter(event.place, event.phase + 1, 0, now)
            elif event.kind == "exchange":
                group = self._group[event.place]
                self._left[event.phase, group] -= 1
                if not self._left[event.phase, group]:
                    for place in [k for k, other in enumerate(self._group) if other == group]:
                        self._enter(place, event.phase + 1, 0, now)
            else:
                for place in {event.place, event.receiver}:
                    at = place, event.phase, event.step
                    self._open[at] -= 1
                    if not self._open[at]:
                        self._enter(place, event.phase, event.step + 1, now)

    def _push(self, kind: str, place: int, receiver: int, at: tuple[int, int], ring: int, now: float, s: float) -> None:
        event = SequenceEvent(kind, place, receiver, *at, ring, now, now + s)
        self._pushed += 1
        heapq.heappush(self._queue, (event.end_s, self._pushed, event))

    def _enter(self, place: int, phase: int, step: int, now: float) -> None:
        """A device begins a phase, or a step of one."""
        if phase == len(self._phases):
            return
        what = self._phases[phase]
        if isinstance(what, Work):
            self._push("work", place, place, (phase, 0), 0, now, float(what.seconds[place]))
        elif isinstance(what, RingSteps):
            if step == len(what.compute_s):
                self._enter(place, phase + 1, 0, now)
            else:
                self._begin_step(what, place, phase, step, now)
        elif self._size[self._group[place]] == 1:
            self._enter(place, phase + 1, 0, now)
        else:
            group = self._group[place]
            self._ready[phase, group] += 1
            if self._ready[phase, group] == self._size[group]:
                self._left[phase, group] = len(self._pairs[group])
                for message, sender, receiver in self._pairs[group]:
                    self._push("exchange", sender, receiver, (phase, 0), 0, now, float(what.message_s[message]))

    def _begin_step(self, steps: RingSteps, place: int, phase: int, step: int, now: float) -> None:
        """Compute begins, and those messages whose other end has begun the step before."""
        self._begun.add((place, phase, step))
        count, rings = len(self._places), len(self._places[0])
        self._open[place, phase, step] = 1
        starting = []
        for group, ring in self._rings[place]:
            for sender in (group, (group - 1) % count):
                seconds = float(steps.message_s[step, steps.message_kind[sender * rings + ring]])
                if seconds < 0.0:
                    continue
                self._open[place, phase, step] += 1
                a, b = self._places[sender][ring], self._places[(sender + 1) % count][ring]
                if (a if b == place else b, phase, step) in self._begun:
                    starting.append((a, b, ring, seconds))
        compute_s = float(steps.compute_s[step, steps.device_class[place]])
        self._push("attention", place, place, (phase, step), 0, now, compute_s)
        for a, b, ring, seconds in starting:
            self._push("ring", a, b, (phase, step), ring, now, seconds)
