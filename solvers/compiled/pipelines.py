"""When a pipeline ends: the recurrences of 1F1B and GPipe, and layers that suit messages where stages wait for them."""

from typing import Any

import numba

from solvers.compiled.layers import set_seconds, split

_WAITS = 1.0005  # a period beyond the slowest stage by this factor: the pipeline waits for messages
_TIGHT = 1.01  # beyond this one, single layers are moved too, in pipelines of
_FEW_STAGES = 8  # stages at most: each try takes stages² steps
_MOVES = 5  # layers moved at most
_STEADY = 3, 8  # a pipeline of p stages is steady after 3 p + 8 micro-batches


@numba.njit(cache=True, nogil=True, error_model="numpy")
def clear_added(columns: Any) -> None:
    """No seconds beside layers."""
    for s in range(len(columns)):
        columns[s].added_s = 0.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def cycle_s(stages: Any, p: int, count: int) -> float:
    """The period of 1F1B: the largest cycle mean of its event graph (`largest_cycle_mean_s`)."""
    best = 0.0
    for i in range(count):
        length, rounds = 0.0, 1.0
        for j in range(i, count):
            stage = stages[p, j]
            length += stage.forward_s + stage.backward_s
            if length > best * rounds:
                best = length / rounds
            length += stage.send_s + stage.return_s
            rounds += 1.0
    return best


@numba.njit(cache=True, nogil=True, error_model="numpy")
def end_1f1b_s(columns: Any, stages: Any, p: int, count: int, batches: int) -> float:
    """The end of a 1F1B pipeline; `early_s` of its stages. Exact, for one executor a stage."""
    for s in range(count):
        column = columns[s]
        column.busy_s = column.came_s = column.ahead_s = column.back_s = 0.0
    # In round m stage s runs the backward of micro-batch m - count + s, then the forward of micro-batch m.
    for m in range(batches + count):
        came_s = 0.0
        for s in range(count):
            column, stage = columns[s], stages[p, s]
            backward = m - count + s
            now = column.busy_s
            if 0 <= backward < batches:
                if s < count - 1 and column.came_s > now:
                    now = column.came_s
                now += stage.backward_s
                if s > 0:
                    through = max(now, column.back_s) + stages[p, s - 1].return_s
                    column.back_s = through
                    columns[s - 1].came_s = through  # taken in the next round
            if m < batches:
                if came_s > now:
                    now = came_s
                now += stage.forward_s
                if s < count - 1:
                    came_s = max(now, column.ahead_s) + stage.send_s
                    column.ahead_s = came_s
            column.busy_s = now
    end = 0.0
    for s in range(count):
        end = max(end, columns[s].busy_s)
    for s in range(count):
        stages[p, s].early_s = end - columns[s].busy_s
    return end


@numba.njit(cache=True, nogil=True, error_model="numpy")
def end_gpipe_s(stages: Any, p: int, count: int, batches: int) -> float:
    """The end of a GPipe pipeline; `early_s` of its stages: two lines of queues, one after the other. Exact."""
    now, slowest = 0.0, 0.0
    for s in range(count):
        stage = stages[p, s]
        now += stage.forward_s
        slowest = max(slowest, stage.forward_s)
        if s < count - 1:
            now += stage.send_s
            slowest = max(slowest, stage.send_s)
    now += (batches - 1) * slowest
    slowest = 0.0
    for s in range(count - 1, -1, -1):
        stage = stages[p, s]
        if s < count - 1:
            now += stage.return_s
            slowest = max(slowest, stage.return_s)
        now += stage.backward_s
        slowest = max(slowest, stage.backward_s)
        stage.early_s = -(now + (batches - 1) * slowest)
    end = 0.0
    for s in range(count):
        end = max(end, -stages[p, s].early_s)
    for s in range(count):
        stages[p, s].early_s += end
    return end


@numba.njit(cache=True, nogil=True, error_model="numpy")
def period_gpipe_s(stages: Any, p: int, count: int) -> float:
    """Seconds that another micro-batch adds to a GPipe pipeline."""
    forward, backward = 0.0, 0.0
    for s in range(count):
        stage = stages[p, s]
        forward, backward = max(forward, stage.forward_s), max(backward, stage.backward_s)
        if s < count - 1:
            forward, backward = max(forward, stage.send_s), max(backward, stage.return_s)
    return forward + backward


@numba.njit(cache=True, nogil=True, error_model="numpy")
def critical_run(stages: Any, p: int, count: int) -> Any:
    """The first and the last stage of the cycle that bounds the period of 1F1B."""
    best, first, last = 0.0, 0, 0
    for i in range(count):
        length, rounds = 0.0, 1.0
        for j in range(i, count):
            stage = stages[p, j]
            length += stage.forward_s + stage.backward_s
            if length > best * rounds:
                best, first, last = length / rounds, i, j
            length += stage.send_s + stage.return_s
            rounds += 1.0
    return first, last


@numba.njit(cache=True, nogil=True, error_model="numpy")
def move_layer(tables: Any, work: Any, state: Any, p: int, giver: int, taker: int) -> None:
    """Give a layer of one stage to another."""
    state.stages[p, giver].layers -= 1
    state.stages[p, taker].layers += 1
    set_seconds(tables, work, state, p, giver)
    set_seconds(tables, work, state, p, taker)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def move_layers(tables: Any, work: Any, state: Any, p: int, period: float) -> float:
    """Move single layers out of the critical run while that shortens the period; the period."""
    stages, count, columns = state.stages, state.pipelines[p].num_stages, work.columns
    for _ in range(_MOVES):
        first, last = critical_run(stages, p, count)
        least, giver, taker = period * (1 - 1e-9), -1, -1
        for s in range(first, last + 1):
            if stages[p, s].layers < 2:
                continue
            for r in range(count):
                if r == s or stages[p, r].layers >= columns[r].most:
                    continue
                move_layer(tables, work, state, p, s, r)
                now = cycle_s(stages, p, count)
                if now < least:
                    least, giver, taker = now, s, r
                move_layer(tables, work, state, p, r, s)
        if giver < 0:
            break
        move_layer(tables, work, state, p, giver, taker)
        period = least
    return period


@numba.njit(cache=True, nogil=True, error_model="numpy")
def split_beside_messages(tables: Any, work: Any, state: Any, p: int, slowest: float) -> float:
    """Layers of a pipeline that waits: stages with long messages get fewer, where that shortens the period, which it
    returns. `slowest`: seconds of its slowest stage."""
    stages, columns, count = state.stages, work.columns, state.pipelines[p].num_stages
    period = cycle_s(stages, p, count)
    for s in range(count):
        column, trip_s = columns[s], 0.0
        if s > 0:
            trip_s += stages[p, s - 1].send_s + stages[p, s - 1].return_s
        if s < count - 1:
            trip_s += stages[p, s].send_s + stages[p, s].return_s
        column.added_s = 0.5 * trip_s
        column.kept = stages[p, s].layers
    split(tables, work, state, p)
    clear_added(columns)
    now = cycle_s(stages, p, count)
    if now > period:
        for s in range(count):
            stages[p, s].layers = columns[s].kept
            set_seconds(tables, work, state, p, s)
        now = period
    if count <= _FEW_STAGES and now > slowest * _TIGHT:
        now = move_layers(tables, work, state, p, now)
    return now


@numba.njit(cache=True, nogil=True, error_model="numpy")
def time_pipeline(tables: Any, work: Any, state: Any, p: int) -> None:
    """Period and end of a pipeline of `batches` micro-batches whose layers and messages are known; other layers where
    it waits for messages."""
    pipeline, stages = state.pipelines[p], state.stages
    count, batches = pipeline.num_stages, max(1, pipeline.batches)
    pipeline.timed = batches
    if state.plan[0].gpipe:
        pipeline.period_s = period_gpipe_s(stages, p, count)
        pipeline.end_s = end_gpipe_s(stages, p, count, batches)
        return
    period, slowest = cycle_s(stages, p, count), 0.0
    for s in range(count):
        slowest = max(slowest, stages[p, s].forward_s + stages[p, s].backward_s)
    if period > slowest * _WAITS and not tables.problem[0].even_layers:
        period = split_beside_messages(tables, work, state, p, slowest)
    few = min(batches, _STEADY[0] * count + _STEADY[1])
    pipeline.period_s = period
    pipeline.end_s = end_1f1b_s(work.columns, stages, p, count, few) + (batches - few) * period
