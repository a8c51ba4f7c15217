"""When a pipeline ends whose stages hold any number of micro-batches in flight and put weight gradients off: the rules
of `hexiopt/schedules/depth.py` and `hexiopt/schedules/split.py`."""

from typing import Any

import numpy as np

from solvers.compiled.kernels import kernel
from solvers.compiled.layers import choose_policies, position, room_bytes, working_bytes
from solvers.compiled.state import MOST_ARRIVALS

_SAME = 1e-9  # share of a layer's seconds, and of its bytes, that rounding may make
_CLOSE = 0.01  # share of a period to which memory brackets it
_TIMED = 4  # micro-batches for every stage that are timed one by one


@kernel
def set_room(tables: Any, work: Any, state: Any, p: int, s: int) -> None:
    """Into the column of stage s of pipeline p: what a micro-batch in flight stores, what a backward works with beside,
    and what its memory has room for."""
    problem, plan, pipeline, stage = tables.problem[0], state.plan[0], state.pipelines[p], state.stages[p, s]
    column, cost, policies = (
        work.columns[s],
        tables.costs[stage.group, pipeline.size],
        tables.policies[stage.group, pipeline.size],
    )
    at = position(plan, pipeline, state.stages, p, s)
    room, layer_bytes = room_bytes(problem, tables.groups[stage.group, pipeline.size], cost, stage, at)
    count, first, last, n = at[0], at[1], at[2], stage.layers
    room -= n * layer_bytes
    mixed = problem.mixed and plan.policy < 0
    _, smaller, faster, lean = choose_policies(policies, n, count, last, room, plan.policy, mixed)
    stored = lean * policies[smaller].stored_bytes + (n - lean) * policies[faster].stored_bytes
    begin = working_bytes(policies[faster], last)
    if lean:
        begin = max(begin, working_bytes(policies[smaller], last))
    if first:
        stored += cost.token_bytes
        room += count * cost.token_bytes
    if last:
        stored += cost.head_bytes
        room += count * cost.head_bytes
    column.layer_s, column.layer_bytes = cost.late_s, cost.late_bytes
    column.stored_bytes, column.room_bytes = stored, room
    column.begin_bytes, column.last_bytes = begin, max(0.0, begin - cost.read_bytes)


@kernel
def put_off(column: Any, stage: Any, batches: int) -> None:
    """How many layers a backward puts off beside the most micro-batches in flight, and the stage's `late_s`."""
    held = (min(batches, stage.depth) - 1) * column.stored_bytes
    column.late_layers = 0
    if column.layer_s > 0.0:
        room = column.room_bytes - held - column.last_bytes
        column.late_layers = min(stage.layers, max(0, int(room / column.layer_bytes)))
    if column.late_layers == 0:
        column.last_bytes = column.begin_bytes
    stage.late_s = column.late_layers * column.layer_s


@kernel
def hold(columns: Any, stages: Any, p: int, count: int, batches: int, period: float) -> bool:
    """The depths of stages, none less than 1F1B's, with which no round trip takes longer than `period` (as
    `round_trip_depths`); whether memory has room for them."""
    fits = True
    for i in range(count - 1, -1, -1):
        column, stage = columns[i], stages[p, i]
        depth, trip_s = count - i, stage.forward_s + stage.backward_s - stage.late_s
        for j in range(i + 1, count):
            other, link = stages[p, j], stages[p, j - 1]
            trip_s += link.send_s + link.return_s + other.forward_s + other.backward_s - other.late_s
            depth = max(depth, other.depth - 1 + int(np.ceil(trip_s / period - _SAME)))
        stage.depth = min(batches, depth)
        held = stage.depth * column.stored_bytes + column.begin_bytes
        fits = fits and held <= column.room_bytes * (1 + _SAME)
        fits = fits and (i == count - 1 or stage.depth - stages[p, i + 1].depth < MOST_ARRIVALS)
    return fits


@kernel
def deepen(columns: Any, stages: Any, p: int, count: int, batches: int) -> None:
    """The depths of the least period for which memory has room."""
    low, high = 0.0, 0.0
    for s in range(count):
        stage = stages[p, s]
        low = max(low, stage.forward_s + stage.backward_s)
        high += stage.forward_s + stage.backward_s
        if s < count - 1:
            low = max(low, stage.send_s, stage.return_s)
            high += stage.send_s + stage.return_s
    if hold(columns, stages, p, count, batches, low):
        return
    while high > low * (1 + _CLOSE):
        middle = np.sqrt(low * high)
        if hold(columns, stages, p, count, batches, middle):
            high = middle
        else:
            low = middle
    if not hold(columns, stages, p, count, batches, high):
        for s in range(count):  # 1F1B's have room
            stages[p, s].depth = count - s


@kernel
def set_orders(tables: Any, work: Any, state: Any, p: int) -> None:
    """What the stages of pipeline p have in flight and put off, for the layers and the messages that they have."""
    problem, pipeline, stages = tables.problem[0], state.pipelines[p], state.stages
    if problem.splits or problem.deep:
        for s in range(pipeline.num_stages):
            set_room(tables, work, state, p, s)
        if problem.deep:
            deepen(work.columns, stages, p, pipeline.num_stages, pipeline.in_flight)
        for s in range(pipeline.num_stages):
            put_off(work.columns[s], stages[p, s], pipeline.in_flight)


@kernel
def begin_s(column: Any, ready_s: float, over_bytes: float) -> Any:
    """When a stage begins an operation whose input is there at `ready_s`, after the layers put off that it computes
    until then, or whose memory the operation needs: `over_bytes` more than there is room for."""
    now_s, layers = column.busy_s, 0
    if column.waiting:
        if ready_s > now_s:
            layers = int(np.ceil((ready_s - now_s) / column.layer_s - _SAME))
        if over_bytes > 0.0:
            layers = max(layers, int(np.ceil(over_bytes / column.layer_bytes - _SAME)))
        layers = min(layers, column.waiting)
        column.waiting -= layers
        now_s += layers * column.layer_s
    return max(now_s, ready_s)


@kernel
def run_forward(column: Any, stage: Any, ready_s: float) -> None:
    """A forward of a stage."""
    held = (column.holding + 1) * column.stored_bytes
    over = held + column.waiting * column.layer_bytes - column.room_bytes
    column.busy_s = begin_s(column, ready_s, over) + stage.forward_s
    column.holding += 1


@kernel
def run_backward(column: Any, stage: Any, ready_s: float) -> None:
    """A backward of a stage, which puts layers off."""
    held = column.holding * column.stored_bytes + column.waiting * column.layer_bytes - column.room_bytes
    after = held - column.stored_bytes + column.late_layers * column.layer_bytes
    over = max(held + column.begin_bytes, after + column.last_bytes)
    column.busy_s = begin_s(column, ready_s, over) + stage.backward_s - stage.late_s
    column.holding -= 1
    column.waiting += column.late_layers


@kernel
def end_late_s(columns: Any, arrivals: Any, stages: Any, p: int, count: int, batches: int, period: float) -> Any:
    """The end of a pipeline of forwards and backwards in turns whose stages have `depth` micro-batches in flight at
    most; `early_s` of its stages. Exact, for one executor a stage, up to `_TIMED` micro-batches a stage; each further
    one takes a `period`. `arrivals` [stages, `MOST_ARRIVALS`]: scratch."""
    timed = min(batches, stages[p, 0].depth + _TIMED * count)
    for s in range(count):
        column = columns[s]
        column.busy_s = column.came_s = column.ahead_s = column.back_s = 0.0
        column.waiting = column.holding = 0
    for k in range(timed):  # all forwards that a backward k follows, from the first stage on, then the backwards
        for s in range(count):
            column, stage = columns[s], stages[p, s]
            last = k + min(timed, stage.depth) - 1
            for m in range(last if k else 0, min(timed, last + 1)):
                run_forward(column, stage, arrivals[s, m % MOST_ARRIVALS] if s else 0.0)
                if s < count - 1:
                    column.ahead_s = max(column.busy_s, column.ahead_s) + stage.send_s
                    arrivals[s + 1, m % MOST_ARRIVALS] = column.ahead_s
        for s in range(count - 1, -1, -1):
            column = columns[s]
            run_backward(column, stages[p, s], column.came_s)
            if s:
                column.back_s = max(column.busy_s, column.back_s) + stages[p, s - 1].return_s
                columns[s - 1].came_s = column.back_s
    end = 0.0
    for s in range(count):
        columns[s].busy_s += columns[s].waiting * columns[s].layer_s
        end = max(end, columns[s].busy_s)
    for s in range(count):
        stages[p, s].early_s = end - columns[s].busy_s
    return end + (batches - timed) * period
