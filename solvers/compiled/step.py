"""A candidate's objective: pipelines beside each other, then gradients, optimiser and weights, as
`hexiopt/cost/step.py` has them."""

from typing import Any

import numpy as np

from solvers.compiled.batches import divide_batch, last_end
from solvers.compiled.gathers import delay_pipelines
from solvers.compiled.kernels import entry, kernel
from solvers.compiled.layers import RESERVED, split, stage_step_s, tied_step_s
from solvers.compiled.messages import forget_messages, send_messages
from solvers.compiled.pipelines import clear_added, steady_after, time_pipeline
from solvers.compiled.rings import make_rings
from solvers.compiled.state import forget_touched, touch, touch_all

FAR = 1e5  # objectives from here on are of candidates that are no plans
_NO_PIPELINE, _NO_BATCH, _NO_ROOM = 1e6, 9e5, 8e5
_SLOPE = 0.03  # of the relaxed batch split: steps jump by micro-batches, this falls with every gain
_FILL = 0.9  # of a pipeline's time to fill, at least, where layers suit messages
_MISSING = 1e-4  # for a layer that does not fit, seconds
_MANY, _GRID = 8, 8  # of more pipelines, states are taken as spread over a multiple, so that few changes matter
_DRIFT = 0.12  # share by which micro-batches may differ from those a pipeline was timed with
_TIMINGS = 3  # again with other micro-batches, at most
_TRIES = 4  # of layers, until groups that sum gradients have room
_ROOM_STEP = 4  # groups
SUMS_AFTER, SUMS_BESIDE, SUMS_BY_PART = 0, 1, 2
GATHERS_BY_PART = 2


@kernel
def begin_step(
    groups: Any, pipelines: Any, stages: Any, times: Any, active: Any, batches: Any, count: int, spread: Any
) -> Any:
    """When the stages of the active pipelines are ready, and the last pipeline ends. `spread`: over how many devices
    states are, and those of a tied matrix; 0 if `step_s` and `tied_s` say so."""
    pipeline_s = 0.0
    for k in range(count):
        p = active[k]
        pipeline = pipelines[p]
        end = pipeline.end_s + (batches[k] - pipeline.timed) * pipeline.period_s
        pipeline_s = max(pipeline_s, end)
        for s in range(pipeline.num_stages):
            stage, own = stages[p, s], times[p, s]
            group = groups[stage.group, pipeline.size]
            if spread[0]:
                first, last = s == 0, s == pipeline.num_stages - 1
                tied_s = tied_step_s(group, first, last)
                own.step_s = (stage_step_s(group, stage.layers, first, last) - tied_s) / spread[0]
                own.tied_s = tied_s / spread[1]
            own.ready_s, own.converts = end - stage.early_s, 0
            own.optimizer_s = max(group.launch_s, own.step_s + own.tied_s) + stage.layers * group.layer_products_s
    return pipeline_s


@kernel
def sum_within(problem: Any, members: Any, stages: Any, times: Any, ring: Any, passes: int) -> None:
    """Sum gradients in a ring of a sharding group."""
    seconds = passes * (ring.s_per_byte * problem.sum_bytes + ring.latency_s)
    ready, began, beside = 0.0, 0.0, np.inf
    for k in range(ring.first, ring.end):
        p, s = members[k].pipeline, members[k].stage
        stage = stages[p, s]
        ready = max(ready, times[p, s].ready_s)
        began = max(began, times[p, s].ready_s - (stage.late_s if stage.late_s > 0.0 else stage.backward_s))
        beside = min(beside, stages[p, s].backward_s)
    if problem.sums == SUMS_BY_PART:
        done = max(began + seconds, ready + ring.last / ring.params * seconds)
    elif problem.sums == SUMS_BESIDE:
        done = ready + max(seconds - beside, problem.last_bucket * seconds)
    else:
        done = ready + seconds
    for k in range(ring.first, ring.end):
        p, s = members[k].pipeline, members[k].stage
        own = times[p, s]
        own.summed_s = max(own.summed_s, done)
        own.left_s = min(own.left_s, max(0.0, stages[p, s].backward_s - seconds))


@kernel
def sum_between(problem: Any, members: Any, times: Any, ring: Any) -> None:
    """Sum gradients in a ring between sharding groups."""
    seconds = 2 * (ring.s_per_byte * problem.sum_bytes + ring.latency_s)
    start, beside = 0.0, np.inf
    for k in range(ring.first, ring.end):
        own = times[members[k].pipeline, members[k].stage]
        start, beside = max(start, own.summed_s), min(beside, own.left_s)
    if problem.sums == SUMS_BESIDE:
        seconds = max(seconds - beside, problem.last_bucket * seconds)
    for k in range(ring.first, ring.end):
        own = times[members[k].pipeline, members[k].stage]
        own.ended_s = max(own.ended_s, start + seconds)


@kernel
def return_sums(problem: Any, members: Any, times: Any, ring: Any) -> None:
    """Give the members of a ring the sums of its gradients, once all have been made."""
    start = 0.0
    for k in range(ring.first, ring.end):
        start = max(start, times[members[k].pipeline, members[k].stage].summed_s)
    for k in range(ring.first, ring.end):
        own = times[members[k].pipeline, members[k].stage]
        own.ended_s = max(own.ended_s, start + ring.s_per_byte * problem.sum_bytes + ring.latency_s)


@kernel
def convert_gradients(tables: Any, work: Any, state: Any, num: int) -> None:
    """Let stages convert the gradients that the first `num` rings sum: they are ready later."""
    problem, members = tables.problem[0], work.members
    share = problem.converted_sharded if state.plan[0].zero_stage else problem.converted
    if share == 0.0:
        return
    for r in range(num):
        for k in range(work.rings[r].first, work.rings[r].end):
            p, s = members[k].pipeline, members[k].stage
            own, stage = work.times[p, s], state.stages[p, s]
            if own.converts:
                continue
            own.converts = 1
            pipeline = state.pipelines[p]
            group = tables.groups[stage.group, pipeline.size]
            step_s = stage_step_s(group, stage.layers, s == 0, s == pipeline.num_stages - 1)
            own.ready_s += max(group.launch_s, share * step_s)


@kernel
def gather(problem: Any, members: Any, stages: Any, times: Any, ring: Any) -> Any:
    """When the weights of a ring's members are gathered after their optimisers."""
    seconds = ring.s_per_byte * problem.weight_bytes + ring.latency_s
    start, beside = 0.0, np.inf
    for k in range(ring.first, ring.end):
        p, s = members[k].pipeline, members[k].stage
        own = times[p, s]
        start, beside = max(start, own.ended_s + own.optimizer_s), min(beside, stages[p, s].forward_s)
    if problem.gathers_beside > 0.0:
        seconds = max(seconds - beside, problem.last_bucket * seconds)
    return start + seconds


@kernel
def sum_gradients(tables: Any, work: Any, state: Any, count: int, num: int) -> Any:
    """Sum gradients in the first `num` rings, when stages are ready; when the last sum of the active pipelines has
    ended."""
    problem, stages, times, rings, members = tables.problem[0], state.stages, work.times, work.rings, work.members
    zero_stage, synced_s = state.plan[0].zero_stage, 0.0
    passes = 1 if zero_stage or problem.converted else 2
    for k in range(count):
        p = work.active[k]
        for s in range(state.pipelines[p].num_stages):
            times[p, s].summed_s, times[p, s].left_s = times[p, s].ready_s, stages[p, s].backward_s
    for r in range(num):
        if not rings[r].between:
            sum_within(problem, members, stages, times, rings[r], passes)
    for k in range(count):
        p = work.active[k]
        for s in range(state.pipelines[p].num_stages):
            times[p, s].ended_s = times[p, s].summed_s
    for r in range(num):
        if rings[r].between:
            sum_between(problem, members, times, rings[r])
        elif passes == 1 and not zero_stage:
            return_sums(problem, members, times, rings[r])
    for k in range(count):
        p = work.active[k]
        for s in range(state.pipelines[p].num_stages):
            synced_s = max(synced_s, times[p, s].ended_s)
    return synced_s


@kernel
def step_s(tables: Any, work: Any, state: Any, count: int) -> Any:
    """Seconds of the step of the active pipelines."""
    problem, stages, times, rings = tables.problem[0], state.stages, work.times, work.rings
    zero_stage, active, pipelines = state.plan[0].zero_stage, work.active, state.pipelines
    num = make_rings(tables, work, state, count)
    devices = 0 if state.plan[0].by_machine else (count if zero_stage else 1)
    spread = devices, devices + (count_apart(work, state, count) if zero_stage else 0)
    pipeline_s = begin_step(tables.groups, pipelines, stages, times, active, work.batches, count, spread)
    state.plan[0].pipeline_s = pipeline_s
    convert_gradients(tables, work, state, num)
    latest = max(pipeline_s, sum_gradients(tables, work, state, count, num))
    for k in range(count):
        for s in range(pipelines[active[k]].num_stages):
            own = times[active[k], s]
            latest = max(latest, own.ended_s + own.optimizer_s)
    if zero_stage and problem.gathers_beside == GATHERS_BY_PART:
        delay_pipelines(tables, work, state, count, num)
        latest = max(latest, sum_gradients(tables, work, state, count, num))
    elif zero_stage:
        for r in range(num):
            if not rings[r].between:
                latest = max(latest, gather(problem, work.members, stages, times, rings[r]))
    if zero_stage and problem.holder_s > 0.0:
        longest = 0
        for r in range(num):
            if not rings[r].between:
                longest = max(longest, rings[r].end - rings[r].first)
        latest += problem.holder_s * longest
    return latest


@kernel
def least_s(tables: Any, work: Any, state: Any) -> Any:
    """Seconds that hardly any batch split beats, from the layers of touched pipelines and the times of the others."""
    rate, base = 0.0, 0.0
    for p in range(state.plan[0].num_pipelines):
        pipeline = state.pipelines[p]
        if not pipeline.fits:
            continue
        if work.touched[p]:
            period, total, ahead = 0.0, 0.0, 0.0
            for s in range(pipeline.num_stages):
                stage = state.stages[p, s]
                now = stage.forward_s + stage.backward_s
                total += now
                total -= stage.late_s
                if now > period:  # beside what comes back, it runs a forward for every stage after it
                    period, ahead = now, stage.forward_s * (pipeline.num_stages - 1 - s)
                    ahead -= stage.late_s
            fill = _FILL * max(0.0, total - period - ahead)
        else:
            period = pipeline.period_s
            fill = pipeline.end_s - pipeline.timed * period
        share = tables.sizes[pipeline.size] / period
        rate += share
        base += share * fill
    return (tables.problem[0].global_batch + base) / rate if rate > 0.0 else FAR


@kernel
def shape_of(machines: Any, state: Any, p: int) -> Any:
    """A number for the micro-batch size, kinds and degrees of a pipeline's stages, in order."""
    found = state.pipelines[p].size + 7
    for s in range(state.pipelines[p].num_stages):
        stage = state.stages[p, s]
        found = (found * 1000003 + machines[stage.machine].kind * 64 + stage.degree + 1) & 0xFFFFFFFFFFFF
    return found


@kernel
def count_holders(state: Any, p: int) -> None:
    """Over how many stages the states of each stage of p are spread inside its machine, if like pipelines have like
    layers."""
    for s in range(state.pipelines[p].num_stages):
        count = 0
        for q in range(state.plan[0].num_pipelines):
            alike = state.pipelines[q].shape == state.pipelines[p].shape
            if alike and state.stages[q, s].machine == state.stages[p, s].machine:
                count += 1
        state.stages[p, s].holders = max(1, count)


@kernel
def split_touched(tables: Any, work: Any, state: Any) -> None:
    """Layers of the touched pipelines; where sharding groups are machines, of those like them too."""
    plan, pipelines, listed = state.plan[0], state.pipelines, work.listed
    num_pipelines = plan.num_pipelines
    if plan.by_machine:
        changed = listed[0]
        for k in range(changed):
            p = listed[1 + k]
            if p >= num_pipelines:
                continue
            before = pipelines[p].shape
            for s in range(pipelines[p].num_stages):
                stage, degree, left = state.stages[p, s], 0, state.stages[p, s].mask
                while left:
                    left &= left - 1
                    degree += 1
                stage.degree = degree
            pipelines[p].shape = shape_of(tables.machines, state, p)
            for q in range(num_pipelines):
                if pipelines[q].shape == before or pipelines[q].shape == pipelines[p].shape:
                    touch(work, q)
        for k in range(listed[0]):
            if listed[1 + k] < num_pipelines:
                count_holders(state, listed[1 + k])
    expected = max(1, -(-tables.problem[0].global_batch // max(1, plan.holders)))
    for k in range(listed[0]):
        p = listed[1 + k]
        if p < num_pipelines:
            pipelines[p].in_flight = max(1, expected // tables.sizes[pipelines[p].size])
            split(tables, work, state, p)
            pipelines[p].layer_sum = sum_layers(state, p)


@kernel
def sum_layers(state: Any, p: int) -> float:
    """A number that differs where the layers or the seconds of a pipeline's stages do."""
    found = 0.0
    for s in range(state.pipelines[p].num_stages):
        stage = state.stages[p, s]
        found += (stage.layers + stage.forward_s + 2.0 * stage.backward_s) * (s + 1)
    return found


@kernel
def split_again(tables: Any, work: Any, state: Any, p: int) -> None:
    """Layers of a pipeline after the number of holders has changed; it is touched where that changes them."""
    pipeline, stages, columns = state.pipelines[p], state.stages, work.columns
    if work.touched[p]:
        split(tables, work, state, p)
        pipeline.layer_sum = sum_layers(state, p)
        return
    fits, before = pipeline.fits, pipeline.layer_sum
    for s in range(pipeline.num_stages):
        stage, column = stages[p, s], columns[s]
        column.kept, column.kept_forward_s, column.kept_backward_s = stage.layers, stage.forward_s, stage.backward_s
    split(tables, work, state, p)
    pipeline.layer_sum = sum_layers(state, p)
    if fits != pipeline.fits or (fits and pipeline.layer_sum != before):
        touch(work, p)
    elif fits:
        for s in range(pipeline.num_stages):
            stage, column = stages[p, s], columns[s]
            stage.layers, stage.forward_s, stage.backward_s = column.kept, column.kept_forward_s, column.kept_backward_s


@kernel
def count_fitting(work: Any, state: Any) -> int:
    """List the pipelines that fit in `active`; how many."""
    count = 0
    for p in range(state.plan[0].num_pipelines):
        if state.pipelines[p].fits:
            work.active[count] = p
            count += 1
    return count


@kernel
def count_apart(work: Any, state: Any, count: int) -> int:
    """How many of the active pipelines have a first and a last stage that differ."""
    found = 0
    for k in range(count):
        found += 1 if state.pipelines[work.active[k]].num_stages > 1 else 0
    return found


@kernel
def spread_states(tables: Any, work: Any, state: Any) -> None:
    """Spread states over as many holders as there are pipelines that fit, or a little fewer; layers follow. Those of a
    tied matrix are spread over twice as many where all pipelines have several stages."""
    plan = state.plan[0]
    for _ in range(3):
        fitting = count_fitting(work, state)
        count, apart = max(1, fitting), 0
        if plan.zero_stage == 1 and not plan.by_machine and fitting and count_apart(work, state, fitting) == fitting:
            apart = 1
        if count > _MANY:
            grid = 1
            while grid * _GRID <= count:
                grid *= 2
            count = count // grid * grid
        if count == plan.holders and apart == plan.apart:
            return
        plan.holders, plan.apart = count, apart
        if plan.zero_stage != 1 or plan.by_machine:
            return
        for p in range(plan.num_pipelines):
            split_again(tables, work, state, p)


@kernel
def time_again(tables: Any, work: Any, state: Any, count: int, drift: float) -> bool:
    """Time pipelines whose micro-batches differ from those that they were timed with, by more than a share `drift`
    where these are many; whether there was one."""
    pipelines, batches, again = state.pipelines, work.batches, False
    for k in range(count):
        p = work.active[k]
        pipeline = pipelines[p]
        change = abs(batches[k] - pipeline.timed)
        few = min(batches[k], pipeline.timed) < steady_after(pipeline.num_stages)
        if change > drift * pipeline.timed or (change and few):
            touch(work, p)
            pipeline.batches = batches[k]
            time_pipeline(tables, work, state, p)
            again = True
    return again


@kernel
def time_touched(tables: Any, work: Any, state: Any, count: int, drift: float) -> Any:
    """Times of the touched pipelines and micro-batches of all; when the last ends, infinite where the batch cannot be
    divided. `drift` as of `time_again`."""
    pipelines, active, batches = state.pipelines, work.active, work.batches
    problem = tables.problem[0]
    for k in range(count):
        p = active[k]
        if work.touched[p] == 2:
            if pipelines[p].batches <= 0:
                share = count * tables.sizes[pipelines[p].size]
                pipelines[p].batches = max(1, problem.global_batch // share)
            time_pipeline(tables, work, state, p)
            work.touched[p] = 1
    longest = divide_batch(tables, work, state, count)
    for k in range(_TIMINGS):
        if longest == np.inf or not time_again(tables, work, state, count, drift):
            return longest
        if k < _TIMINGS - 1:
            longest = divide_batch(tables, work, state, count)
    return last_end(pipelines, active, batches, count)


@kernel
def make_room(groups: Any, work: Any, state: Any, count: int) -> bool:
    """Whether a stage has more groups that sum gradients or micro-batches in flight, or fewer holders, than its layers
    leave room for; then they shall, and its pipeline is touched."""
    short, by_machine, forwards_first = False, state.plan[0].by_machine, state.plan[0].forwards_first
    for k in range(count):
        p = work.active[k]
        pipeline, num_stages = state.pipelines[p], state.pipelines[p].num_stages
        if work.batches[k] > pipeline.in_flight and (forwards_first or pipeline.in_flight < num_stages):
            pipeline.in_flight = work.batches[k]
            short = True
            touch(work, p)
        for s in range(num_stages):
            stage = state.stages[p, s]
            more, tight = stage.sums - RESERVED, False
            if more > stage.room:
                stage.room = (more + _ROOM_STEP - 1) // _ROOM_STEP * _ROOM_STEP
                tight = True
            if by_machine:
                group, first, last = groups[stage.group, pipeline.size], s == 0, s == num_stages - 1
                own, whole_s = work.times[p, s], stage_step_s(group, stage.layers, first, last)
                mean = (whole_s - (tied_step_s(group, first, last) if own.tied_s > 0.0 else 0.0)) / own.step_s
                if stage.holders > mean + 1e-6:
                    stage.holders = max(1, int(mean + 1e-6))
                    tight = True
            if tight:
                short = True
                touch(work, p)
    return short


@kernel
def assess(tables: Any, work: Any, state: Any, limit: float, drift: float) -> Any:
    """As `evaluate`; `drift` as of `time_again`."""
    plan, problem = state.plan[0], tables.problem[0]
    split_touched(tables, work, state)
    if limit < FAR and (1.0 + _SLOPE) * least_s(tables, work, state) > limit:
        return np.inf
    missing, relaxed = 0.0, 0.0
    for _ in range(_TRIES):
        spread_states(tables, work, state)
        count = count_fitting(work, state)
        missing = 0.0
        for p in range(plan.num_pipelines):
            if not state.pipelines[p].fits:
                missing += state.pipelines[p].missing
        if problem.num_pipelines:
            missing += 100.0 * abs(count - problem.num_pipelines)
        if count == 0 or (problem.num_pipelines and count != problem.num_pipelines):
            return _NO_PIPELINE + missing
        send_messages(tables, work, state)
        longest = time_touched(tables, work, state, count, drift)
        if longest == np.inf:
            return _NO_BATCH
        relaxed = _SLOPE * plan.relaxed_s
        if longest + relaxed > limit:
            return np.inf
        plan.step_s = step_s(tables, work, state, count)
        if not make_room(tables.groups, work, state, count):
            return plan.step_s + relaxed + _MISSING * missing
        for k in range(work.listed[0]):
            p = work.listed[1 + k]
            if p < plan.num_pipelines:
                split(tables, work, state, p)
                state.pipelines[p].layer_sum = sum_layers(state, p)
    return _NO_ROOM


@entry
def evaluate(tables: Any, work: Any, state: Any, limit: float) -> Any:
    """The objective of a candidate of which the touched pipelines are new; infinite where it is certainly above
    `limit`. See the package."""
    return assess(tables, work, state, limit, _DRIFT)


@entry
def refresh(tables: Any, work: Any, state: Any) -> Any:
    """The objective from nothing: no message is stale, no pipeline timed with other micro-batches than it has."""
    forget_touched(work)
    clear_added(work.columns)
    plan = state.plan[0]
    plan.holders, plan.apart = max(1, plan.num_pipelines), 0
    for p in range(plan.num_pipelines):
        state.pipelines[p].batches = 0
        for s in range(state.pipelines[p].num_stages):
            state.stages[p, s].room = 0
    found = np.inf
    for _ in range(3):
        forget_messages(state)
        touch_all(work, state)
        found = assess(tables, work, state, np.inf, 0.0)
    return found
