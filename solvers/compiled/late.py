"""When a pipeline ends whose stages put weight gradients off: the rule of `hexiopt/schedules/split.py`, whatever is in
flight in a stage."""

from typing import Any

import numpy as np

from solvers.compiled.kernels import kernel
from solvers.compiled.layers import choose_policies, position, room_bytes, working_bytes
from solvers.compiled.state import MOST_ARRIVALS

_SAME = 1e-9  # share of a layer's seconds, and of its bytes, that rounding may make
_TIMED = 4  # micro-batches for every stage that are timed one by one


@kernel
def set_room(tables: Any, work: Any, state: Any, p: int, s: int) -> None:
    """Into the column of stage s of pipeline p: what a micro-batch in flight stores, how many layers a backward puts
    off, and what its memory has room for. Then the stage's `late_s`."""
    problem, plan, pipeline, stage = tables.problem[0], state.plan[0], state.pipelines[p], state.stages[p, s]
    column, cost, policies = (
        work.columns[s],
        tables.costs[stage.group, pipeline.size],
        tables.policies[stage.group, pipeline.size],
    )
    at = position(plan, pipeline, state.stages, p, s)
    room, layer_bytes = room_bytes(problem, tables.groups[stage.group], cost, stage, at)
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
    end = max(0.0, begin - cost.read_bytes)
    late = int((room - (count - 1) * stored - end) / cost.late_bytes) if cost.late_s > 0.0 else 0
    late = min(n, max(0, late))
    column.late_layers, column.layer_s, column.layer_bytes = late, cost.late_s, cost.late_bytes
    column.stored_bytes, column.room_bytes = stored, room
    column.begin_bytes, column.last_bytes = begin, end if late else begin
    stage.late_s = late * cost.late_s


@kernel
def begin_s(column: Any, ready_s: float, over_bytes: float) -> float:
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
def end_late_s(columns: Any, arrivals: Any, stages: Any, p: int, count: int, batches: int, period: float) -> float:
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
