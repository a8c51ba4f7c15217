"""The exact recurrence of a pipeline schedule with unequal stages, one after another; `schedule_graph.py` has replicas.

A stage runs its operations in the order of the schedule; a message to a neighbour starts when its operation
ends and the messages before it on the same link and direction are through; receives are posted early, so a
stage computes while messages travel. `simulate.py` replays the same rules event by event.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.schedules.schedule import largest_cycle_mean_s

_TOLERANCE = 1e-13
_PATIENCE = 256  # rounds until a matrix power is cheaper than waiting for a period


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """When each stage ends its last backward, and when the pipeline does. Seconds from the step's start."""

    stage_end_s: tuple[float, ...]
    end_s: float


def gpipe(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
    num_micro_batches: int,
) -> PipelineTimes:
    """All forwards, then all backwards.

    Equal jobs through servers in a row: the last leaves at Σ + (M−1)·max over stages and links (the makespan of
    a proportionate flow shop; Pinedo, "Scheduling", section 6.1), once forward and once back.
    `send_forward_s[i]` is stage i to i+1, `send_backward_s[i]` stage i+1 to i: one fewer than stages.
    """
    more = num_micro_batches - 1
    turn = sum(forward_s) + sum(send_forward_s) + more * max((*forward_s, *send_forward_s))
    ends = []
    total, slowest = turn, 0.0
    for i in range(len(backward_s) - 1, -1, -1):
        if i < len(send_backward_s):
            total += send_backward_s[i]
            slowest = max(slowest, send_backward_s[i])
        total += backward_s[i]
        slowest = max(slowest, backward_s[i])
        ends.append(total + more * slowest)
    ends.reverse()
    return PipelineTimes(tuple(ends), max(ends))


def one_f_one_b(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
    num_micro_batches: int,
) -> PipelineTimes:
    """1F1B (Narayanan et al., PipeDream-Flush): stage i of p warms up with p−1−i forwards, then alternates.

    In round j stage i runs forward p−1−i+j and backward j, where they exist. The steady rounds are a max-plus
    linear system: once the whole state has moved by one constant over c rounds it does so for ever (Baccelli et
    al., "Synchronization and Linearity", theorem 3.109), so the remaining rounds are extrapolated.
    """
    p, m = len(forward_s), num_micro_batches
    last = p - 1
    if last == 0:
        end = m * (forward_s[0] + backward_s[0])
        return PipelineTimes((end,), end)
    busy = [0.0] * p  # when a stage ends its latest operation
    arrived = [0.0] * p  # when the latest forward message reached stage i; also when link i−1 → i is free
    returned = [0.0] * p  # when the latest backward message left link i → i−1
    beat = max(
        largest_cycle_mean_s(
            [f + b for f, b in zip(forward_s, backward_s, strict=True)],
            [f + b for f, b in zip(send_forward_s, send_backward_s, strict=True)],
        ),
        *send_forward_s,
        *send_backward_s,
    )
    history: deque[list[float]] = deque(maxlen=p)
    steady_end = m - p  # the last round in which every stage runs both operations
    j = -last
    while j < m:
        ready = arrived[:]  # messages of the rounds before
        for i in range(max(0, last + j - m + 1), min(p, p + j)):
            start = busy[i] if busy[i] > ready[i] else ready[i]
            busy[i] = end = start + forward_s[i]
            if i < last:
                free = arrived[i + 1]
                arrived[i + 1] = (end if end > free else free) + send_forward_s[i]
        if j >= 0:
            came = 0.0
            for i in range(last, -1, -1):
                start = busy[i] if busy[i] > came else came
                busy[i] = end = start + backward_s[i]
                if i:
                    free = returned[i]
                    returned[i] = came = (end if end > free else free) + send_backward_s[i - 1]
            if j < steady_end:
                state = busy + arrived[1:] + returned[1:]
                skip = _skippable(state, history, beat, steady_end - j)
                if not skip and j >= _PATIENCE and steady_end - j >= _PATIENCE:
                    state = _after_rounds(state, steady_end - j, forward_s, backward_s, send_forward_s, send_backward_s)
                    busy, arrived, returned = (
                        state[:p],
                        [0.0, *state[p : 2 * p - 1]],
                        [0.0, *state[2 * p - 1 :]],
                    )
                    j, steady_end = steady_end, -1
                elif skip:
                    rounds, shift = skip
                    j += rounds
                    busy = [x + shift for x in busy]
                    arrived = [0.0, *(x + shift for x in arrived[1:])]
                    returned = [0.0, *(x + shift for x in returned[1:])]
                    steady_end = -1
                else:
                    history.append(state)
        j += 1
    return PipelineTimes(tuple(busy), max(busy))


def _after_rounds(
    state: list[float],
    rounds: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
) -> list[float]:
    """The state after `rounds` steady rounds, by repeated squaring of the round's max-plus matrix.

    For stages so nearly equal that the state takes thousands of rounds to become periodic.
    """
    p = len(forward_s)
    n = len(state)
    unit = np.full((n, n), -np.inf)
    np.fill_diagonal(unit, 0.0)
    busy, arrived, returned = unit[:p].copy(), unit[p - 1 : 2 * p - 1].copy(), unit[2 * p - 2 :].copy()
    arrived[0] = -np.inf
    ready = arrived.copy()
    for i in range(p):
        busy[i] = np.maximum(busy[i], ready[i]) + forward_s[i]
        if i < p - 1:
            arrived[i + 1] = np.maximum(busy[i], arrived[i + 1]) + send_forward_s[i]
    came = np.full(n, -np.inf)
    for i in range(p - 1, -1, -1):
        busy[i] = np.maximum(busy[i], came) + backward_s[i]
        if i:
            returned[i] = came = np.maximum(busy[i], returned[i]) + send_backward_s[i - 1]
    matrix = np.concatenate([busy, arrived[1:], returned[1:]])
    found = np.array(state)
    while rounds:
        if rounds & 1:
            found = (matrix + found).max(axis=1)
        rounds >>= 1
        if rounds:
            matrix = (matrix[:, :, None] + matrix[None, :, :]).max(axis=1)
    return [float(x) for x in found]


def _skippable(
    state: list[float], history: deque[list[float]], beat: float, remaining: int
) -> tuple[int, float] | None:
    """How many of the `remaining` rounds repeat an earlier period, and by how much time they move the state.

    `beat` is what a round takes in the steady state; it only spares comparisons.
    """
    tolerance = _TOLERANCE * state[0]
    last = 0  # where the state differed from the last one compared, and likely differs from the next
    for period, before in enumerate(reversed(history), start=1):
        shift = state[0] - before[0]
        if abs(shift - period * beat) > 10 * tolerance or abs(state[last] - before[last] - shift) > tolerance:
            continue
        differs = (k for k, (x, y) in enumerate(zip(state, before, strict=True)) if abs(x - y - shift) > tolerance)
        at = next(differs, None)
        if at is None:
            times = remaining // period
            return (times * period, times * shift) if times else None
        last = at
    return None
