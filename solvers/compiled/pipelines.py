"""When a pipeline ends: the recurrences of 1F1B and GPipe (`late.py` has that of split backwards), and layers that suit
messages where stages wait for them."""

from typing import Any

from solvers.compiled.kernels import kernel
from solvers.compiled.late import end_late_s, set_orders
from solvers.compiled.layers import set_seconds, split
from solvers.compiled.messages import measure_messages, set_messages

_WAITS = 1.0005  # a period beyond the slowest stage by this factor: the pipeline waits for messages
_TIGHT = 1.01  # beyond this one, single layers are moved too, in pipelines of
_FEW_STAGES = 8  # stages at most: each try takes stages² steps
_MOVES = 5  # layers moved at most
_ALIKE = 1e-7  # of a period: times that differ by less are equal
_STEADY = 3  # with fewer micro-batches a stage, another one adds more or less than a period


@kernel
def clear_added(columns: Any) -> None:
    """No seconds beside layers."""
    for s in range(len(columns)):
        columns[s].added_s = 0.0


@kernel
def cycle_s(stages: Any, p: int, count: int) -> float:
    """The period of 1F1B: the largest cycle mean of its event graph (`largest_cycle_mean_s`), in which nobody waits for
    what is put off, over as many rounds as a stage holds micro-batches more than another; or the slowest stage with all
    that it computes, or the slowest message, of which a link carries one at a time."""
    best = 0.0
    for i in range(count):
        best = max(best, stages[p, i].forward_s + stages[p, i].backward_s)
        if i < count - 1:
            best = max(best, stages[p, i].send_s, stages[p, i].return_s)
        length = 0.0
        for j in range(i, count):
            stage = stages[p, j]
            length += stage.forward_s + stage.backward_s - stage.late_s
            rounds = stages[p, i].depth - stage.depth + 1
            if length > best * rounds:
                best = length / rounds
            length += stage.send_s + stage.return_s
    return best


@kernel
def note_round(columns: Any, count: int, round_s: float) -> bool:
    """Whether all times have moved by `round_s` since they were noted last; note them."""
    same, near = True, round_s * _ALIKE
    for s in range(count):
        column = columns[s]
        if same:
            same = abs(column.busy_s - column.was_busy_s - round_s) < near
            same = same and (s == count - 1 or abs(column.came_s - column.was_came_s - round_s) < near)
            same = same and (s == count - 1 or abs(column.ahead_s - column.was_ahead_s - round_s) < near)
            same = same and (s == 0 or abs(column.back_s - column.was_back_s - round_s) < near)
        column.was_busy_s, column.was_came_s = column.busy_s, column.came_s
        column.was_ahead_s, column.was_back_s = column.ahead_s, column.back_s
    return same


@kernel
def end_1f1b_s(columns: Any, stages: Any, p: int, count: int, batches: int, period: float, rounds: int) -> float:
    """The end of a 1F1B pipeline; `early_s` of its stages. Exact, for one executor a stage.

    Sooner or later all times move by `rounds` periods every so many micro-batches, those of the critical cycle: then
    whole rounds are skipped."""
    for s in range(count):
        column = columns[s]
        column.busy_s = column.came_s = column.ahead_s = column.back_s = column.was_busy_s = 0.0
    # In round m stage s runs the backward of micro-batch m - count + s, then the forward of micro-batch m.
    m, check, skipped_s = 0, count + 1, 0.0
    while m < batches + count:
        if m == check and m + rounds < batches:
            check += rounds
            if note_round(columns, count, rounds * period):
                skipped = (batches - 1 - m) // rounds
                skipped_s += skipped * rounds * period
                batches -= skipped * rounds
                check = -1
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
        m += 1
    end = 0.0
    for s in range(count):
        end = max(end, columns[s].busy_s)
    for s in range(count):
        stages[p, s].early_s = end - columns[s].busy_s
    return end + skipped_s


@kernel
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


@kernel
def period_gpipe_s(stages: Any, p: int, count: int) -> float:
    """Seconds that another micro-batch adds to a GPipe pipeline."""
    forward, backward = 0.0, 0.0
    for s in range(count):
        stage = stages[p, s]
        forward, backward = max(forward, stage.forward_s), max(backward, stage.backward_s)
        if s < count - 1:
            forward, backward = max(forward, stage.send_s), max(backward, stage.return_s)
    return forward + backward


@kernel
def critical_run(stages: Any, p: int, count: int) -> Any:
    """The first and the last stage of the cycle that bounds the period of 1F1B (`cycle_s`); twice the same where a
    single stage or the message that it sends on or gets back does."""
    best, first, last = 0.0, 0, 0
    for i in range(count):
        whole_s = stages[p, i].forward_s + stages[p, i].backward_s
        if i < count - 1:
            whole_s = max(whole_s, stages[p, i].send_s, stages[p, i].return_s)
        if whole_s > best:
            best, first, last = whole_s, i, i
        length = 0.0
        for j in range(i, count):
            stage = stages[p, j]
            length += stage.forward_s + stage.backward_s - stage.late_s
            rounds = stages[p, i].depth - stage.depth + 1
            if length > best * rounds:
                best, first, last = length / rounds, i, j
            length += stage.send_s + stage.return_s
    return first, last


@kernel
def move_layers(costs: Any, seconds: Any, columns: Any, stages: Any, pipeline: Any, p: int, period: float) -> None:
    """Move single layers out of the critical run while that shortens the period."""
    count = pipeline.num_stages
    for _ in range(_MOVES):
        first, last = critical_run(stages, p, count)
        least, giver, taker = period * (1 - 1e-9), -1, -1
        for s in range(first, last + 1):
            if stages[p, s].layers < 2:
                continue
            stages[p, s].layers -= 1
            set_seconds(costs, seconds, columns, stages, pipeline, p, s)
            for r in range(count):
                if r == s or stages[p, r].layers >= columns[r].most:
                    continue
                stages[p, r].layers += 1
                set_seconds(costs, seconds, columns, stages, pipeline, p, r)
                now = cycle_s(stages, p, count)
                if now < least:
                    least, giver, taker = now, s, r
                stages[p, r].layers -= 1
                set_seconds(costs, seconds, columns, stages, pipeline, p, r)
            stages[p, s].layers += 1
            set_seconds(costs, seconds, columns, stages, pipeline, p, s)
        if giver < 0:
            break
        stages[p, giver].layers -= 1
        stages[p, taker].layers += 1
        set_seconds(costs, seconds, columns, stages, pipeline, p, giver)
        set_seconds(costs, seconds, columns, stages, pipeline, p, taker)
        period = least


@kernel
def split_beside_messages(tables: Any, work: Any, state: Any, p: int, slowest: float) -> None:
    """Layers of a pipeline that waits: stages with long messages get fewer, where that shortens the period. `slowest`:
    seconds of its slowest stage."""
    pipeline, stages, columns, costs, seconds = (
        state.pipelines[p],
        state.stages,
        work.columns,
        tables.costs,
        work.option_s,
    )
    count = pipeline.num_stages
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
    set_orders(tables, work, state, p)
    now = cycle_s(stages, p, count)
    if now >= period:
        for s in range(count):
            stages[p, s].layers = columns[s].kept
            set_seconds(costs, seconds, columns, stages, pipeline, p, s)
        set_orders(tables, work, state, p)
        now = period
    if count <= _FEW_STAGES and now > slowest * _TIGHT:
        move_layers(costs, seconds, columns, stages, pipeline, p, now)


@kernel
def steady_after(count: int) -> int:
    """Micro-batches from which on another one adds about a period to a pipeline of so many stages."""
    return _STEADY * count


@kernel
def time_pipeline(tables: Any, work: Any, state: Any, p: int) -> None:
    """Period and end of a pipeline of `batches` micro-batches whose layers and messages are known; other layers where
    it waits for messages."""
    pipeline, stages = state.pipelines[p], state.stages
    count, batches = pipeline.num_stages, max(1, pipeline.batches)
    pipeline.timed = batches
    if state.plan[0].forwards_first:
        pipeline.period_s = period_gpipe_s(stages, p, count)
        pipeline.end_s = end_gpipe_s(stages, p, count, batches)
        return
    set_orders(tables, work, state, p)
    period, slowest = cycle_s(stages, p, count), 0.0
    for s in range(count):
        slowest = max(slowest, stages[p, s].forward_s + stages[p, s].backward_s)
    if period > slowest * _WAITS and not tables.problem[0].even_layers:
        split_beside_messages(tables, work, state, p, slowest)
        measure_messages(tables, work, state, p)  # stages are slower now, so that messages meet less
        set_messages(work, state, p)
        set_orders(tables, work, state, p)
        period = cycle_s(stages, p, count)
    pipeline.period_s = period
    if tables.problem[0].splits or tables.problem[0].deep:
        pipeline.end_s = end_late_s(work.columns, work.arrivals, stages, p, count, batches, period)
        return
    first, last = critical_run(stages, p, count)
    pipeline.end_s = end_1f1b_s(work.columns, stages, p, count, batches, period, last - first + 1)
