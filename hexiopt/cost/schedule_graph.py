"""The exact recurrence of a schedule over stages of several replicas or several layer ranges.

Every replica is an executor that runs its stage's operations in the schedule's order, each when the executor is
free and all its messages have come. Every pair of replicas that exchange samples has a link in each direction; a
message starts when its operation ends and the messages before it on the link are through. Interleaved, layer range
c of stage s is virtual stage c·p + s of p stages, so that the last stage sends to the first as well.

Executors that wait for each other, directly or not, form a max-plus linear system in the steady part of the
schedule: once its whole state has moved by one constant over some rounds it does so for ever (Baccelli et al.,
"Synchronization and Linearity", theorem 3.109), and the remaining rounds are extrapolated. Times are whole numbers
of a common unit, so that a repetition is seen exactly.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import frexp

from hexiopt.cost.schedule import PipelineTimes, gpipe, one_f_one_b
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import OperationKind, Schedule, StagePosition, Turn

_MANTISSA_BITS = 44  # of a time in seconds; equal stages whose rounding differs stay equal
_RANGE_BITS = 200  # between the largest time and the least one that counts
_REMEMBERED = 64  # rounds that a new one is compared with
_Operation = tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]]  # time, links in, (link out, its time)
_State = list[int]


@dataclass(frozen=True, slots=True)
class Executor:
    """One replica of a stage: forward and backward seconds of each of its layer ranges."""

    stage: int
    chunk_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Messages of one direction between two executors (by index), seconds each."""

    backward: bool
    sender: int
    receiver: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Programme:
    """A stage's operations in order: `start`, `rounds` times `round`, `rest`. Twice the range, plus 1 if backward."""

    start: list[int]
    round: list[int]
    rounds: int
    rest: list[int]

    def __len__(self) -> int:
        return len(self.start) + self.rounds * len(self.round) + len(self.rest)


_CHAIN_TIMES = {GPIPE: gpipe, ONE_F_ONE_B: one_f_one_b, INTERLEAVED: one_f_one_b}


def chain_times(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
    num_micro_batches: int,
) -> PipelineTimes:
    """The times of a pipeline of stages that are one replica and hold one layer range each."""
    if schedule in _CHAIN_TIMES:
        return _CHAIN_TIMES[schedule](forward_s, backward_s, send_forward_s, send_backward_s, num_micro_batches)
    executors = [Executor(s, (pair,)) for s, pair in enumerate(zip(forward_s, backward_s, strict=True))]
    links = [Link(False, s, s + 1, seconds) for s, seconds in enumerate(send_forward_s)]
    links += [Link(True, s + 1, s, seconds) for s, seconds in enumerate(send_backward_s)]
    ends = executor_ends_s(schedule, len(executors), num_micro_batches, executors, links)
    return PipelineTimes(ends, max(ends))


def executor_ends_s(
    schedule: Schedule, num_stages: int, num_micro_batches: int, executors: Sequence[Executor], links: Sequence[Link]
) -> tuple[float, ...]:
    """When each executor ends its last operation, in seconds from the step's start.

    With several layer ranges, the micro-batches must be a multiple of the stages, which must be two at least.
    """
    return _ends_s(schedule, num_stages, num_micro_batches, tuple(executors), tuple(links))


@lru_cache(maxsize=4096)  # equal pipelines of a plan, and of the plans of a search
def _ends_s(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    executors: tuple[Executor, ...],
    links: tuple[Link, ...],
) -> tuple[float, ...]:
    chunks = len(executors[0].chunk_s)
    orders = [
        _programme(schedule, StagePosition(s, num_stages, num_micro_batches, chunks)) for s in range(num_stages)
    ]
    seconds = [s for executor in executors for chunk in executor.chunk_s for s in chunk]
    whole, unit_s = _whole([*seconds, *(link.seconds for link in links)])
    operations = _operations(executors, links, whole, num_stages, chunks)
    programmes = [orders[executor.stage] for executor in executors]
    ends = [0.0] * len(executors)
    for members in _components(len(executors), links):
        own = [k for k, link in enumerate(links) if link.sender in members]
        for executor, end in _run(members, own, programmes, operations).items():
            ends[executor] = end * unit_s
    return tuple(ends)


def _programme(schedule: Schedule, at: StagePosition) -> _Programme:
    def numbers(turns: Sequence[Turn]) -> list[int]:
        return [2 * chunk + (kind is OperationKind.BACKWARD) for kind, chunk in turns]

    blocks = schedule.programme(at)
    if len(blocks) != 3:
        return _Programme(numbers([turn for turns, repeats in blocks for turn in turns * repeats]), [0], 0, [])
    start, steady, rest = blocks
    return _Programme(
        numbers(start.turns * start.repeats), numbers(steady.turns), steady.repeats, numbers(rest.turns * rest.repeats)
    )


def _whole(seconds: Sequence[float]) -> tuple[list[int], float]:
    """Times as whole numbers of a unit, which comes second, each within 2^-44 of itself, if it counts at all."""
    parts = [frexp(s) for s in seconds]
    exponents = [exponent for mantissa, exponent in parts if mantissa] or [0]
    least = max(min(exponents), max(exponents) - _RANGE_BITS)
    scale = 1 << _MANTISSA_BITS
    whole = [round(m * scale) << e - least if e >= least else 0 for m, e in parts]
    return whole, 2.0 ** (least - _MANTISSA_BITS)


def _operations(
    executors: Sequence[Executor], links: Sequence[Link], whole: list[int], num_stages: int, chunks: int
) -> list[list[_Operation]]:
    """Per executor, its operations by their numbers in a programme; `whole` are times of executors, then of links."""
    incoming: list[tuple[list[int], list[int]]] = [([], []) for _ in executors]
    outgoing: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = [([], []) for _ in executors]
    first = 2 * chunks * len(executors)
    for k, link in enumerate(links):
        incoming[link.receiver][link.backward].append(k)
        outgoing[link.sender][link.backward].append((k, whole[first + k]))
    found = []
    for e, executor in enumerate(executors):
        own: list[_Operation] = []
        for chunk in range(chunks):
            begins = executor.stage == 0 and chunk == 0  # of the virtual stages, the first
            ends = executor.stage == num_stages - 1 and chunk == chunks - 1
            for backward in (False, True):
                comes = () if (ends if backward else begins) else tuple(incoming[e][backward])
                goes = () if (begins if backward else ends) else tuple(outgoing[e][backward])
                own.append((whole[2 * chunks * e + len(own)], comes, goes))
        found.append(own)
    return found


def _components(num_executors: int, links: Iterable[Link]) -> Iterator[list[int]]:
    """Executors that links connect, in ascending order."""
    neighbours: list[set[int]] = [set() for _ in range(num_executors)]
    for link in links:
        neighbours[link.sender].add(link.receiver)
        neighbours[link.receiver].add(link.sender)
    left = set(range(num_executors))
    while left:
        reached, found = [left.pop()], []
        while reached:
            at = reached.pop()
            found.append(at)
            new = neighbours[at] & left
            left -= new
            reached += new
        yield sorted(found)


def _run(
    members: list[int], links: list[int], programmes: Sequence[_Programme], operations: Sequence[list[_Operation]]
) -> dict[int, int]:
    """When each of `members`, connected by `links`, ends: its operations run as their messages come."""
    busy, at = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
    free = dict.fromkeys(links, 0)  # when a link's latest message is through
    came: dict[int, deque[int]] = {k: deque() for k in links}  # messages through and not yet taken
    begin = {e: len(programmes[e].start) for e in members}
    end = {e: begin[e] + programmes[e].rounds * len(programmes[e].round) for e in members}
    lead = members[0]
    period = len(programmes[lead].round)
    history: deque[tuple[tuple[int, ...], int, _State]] = deque(maxlen=_REMEMBERED)
    repeats, next_round = True, 0
    left = sum(len(programmes[e]) for e in members)
    path = (*members, *members[-2::-1])
    while left:
        before = left
        for e in path:
            programme, own, i = programmes[e], operations[e], at[e]
            stop = min(len(programme), i + period)
            while i < stop:
                if i < begin[e]:
                    op = programme.start[i]
                elif i < end[e]:
                    op = programme.round[(i - begin[e]) % period]
                else:
                    op = programme.rest[i - end[e]]
                time, comes, goes = own[op]
                if not all(map(came.get, comes)):
                    break
                now = busy[e]
                for k in comes:
                    arrived = came[k].popleft()
                    if arrived > now:
                        now = arrived
                busy[e] = now = now + time
                for k, link_time in goes:
                    free[k] = through = (now if now > free[k] else free[k]) + link_time
                    came[k].append(through)
                i += 1
            left -= i - at[e]
            at[e] = i
        assert left < before, "no order of operations waits for itself"
        if repeats and at[lead] >= next_round and all(begin[e] <= at[e] < end[e] for e in members):
            next_round = at[lead] + period
            shape = (at[lead] % period, *(at[e] - at[lead] for e in members))
            state = [*busy.values(), *free.values(), *(time for queue in came.values() for time in queue)]
            found = _repeated(shape, state, history)
            if found is None:
                history.append((shape, at[lead], state))
                continue
            then, shift = found
            moved = at[lead] - then
            times = min((end[e] - at[e]) // moved for e in members)
            for e in members:
                at[e] += times * moved
                busy[e] += times * shift
            free = {k: time + times * shift for k, time in free.items()}
            came = {k: deque(time + times * shift for time in queue) for k, queue in came.items()}
            left -= times * moved * len(members)
            repeats = False
    return busy


def _repeated(
    shape: tuple[int, ...], state: _State, history: Iterable[tuple[tuple[int, ...], int, _State]]
) -> tuple[int, int] | None:
    """(operations of the first member then, time moved since) of an earlier state that only the time tells apart."""
    for earlier, then, before in history:
        shift = state[0] - before[0]
        if earlier == shape and [time - shift for time in state] == before:
            return then, shift
    return None
