"""Micro-batches of each pipeline, so that the last one ends soonest, as `solvers/completion/batches.py` has it."""

from typing import Any

import numpy as np

from solvers.compiled.kernels import kernel

_BISECTIONS = 14
_GROWTHS = 60


@kernel
def end_s(pipeline: Any, batches: int) -> Any:
    """When a pipeline ends that has so many micro-batches."""
    return pipeline.end_s + (batches - pipeline.timed) * pipeline.period_s


@kernel
def batches_until(pipeline: Any, until_s: float) -> int:
    """The most micro-batches, at least 1, that a pipeline ends by then."""
    fill_s = pipeline.end_s - pipeline.timed * pipeline.period_s
    return max(1, int((until_s - fill_s) / pipeline.period_s + 1e-9))


@kernel
def sequences_until(pipelines: Any, sizes: Any, active: Any, count: int, until_s: float) -> int:
    """Sequences that all active pipelines end by then."""
    total = 0
    for k in range(count):
        pipeline = pipelines[active[k]]
        total += sizes[pipeline.size] * batches_until(pipeline, until_s)
    return total


@kernel
def last_to_end(pipelines: Any, sizes: Any, active: Any, batches: Any, count: int, at_least: int, at_most: int) -> int:
    """The number among the active pipelines of the one that ends last, of those with more than one micro-batch, of a
    size between the two; -1 if there is none."""
    latest, found = -1.0, -1
    for k in range(count):
        pipeline = pipelines[active[k]]
        if batches[k] > 1 and at_least <= sizes[pipeline.size] <= at_most:
            now = end_s(pipeline, batches[k])
            if now > latest:
                latest, found = now, k
    return found


@kernel
def fill_up(pipelines: Any, sizes: Any, active: Any, batches: Any, count: int, missing: int) -> bool:
    """Give micro-batches for `missing` sequences to the pipelines that end first; whether that works out."""
    while missing > 0:
        soonest, found = np.inf, -1
        for k in range(count):
            pipeline = pipelines[active[k]]
            if sizes[pipeline.size] <= missing:
                now = end_s(pipeline, batches[k] + 1)
                if now < soonest:
                    soonest, found = now, k
        if found < 0:
            return False
        batches[found] += 1
        missing -= sizes[pipelines[active[found]].size]
    return True


@kernel
def even_batches(problem: Any, pipelines: Any, sizes: Any, active: Any, batches: Any, count: int) -> bool:
    """Equally many micro-batches for all, within one; whether that is possible."""
    first = pipelines[active[0]].size
    for k in range(count):
        if pipelines[active[k]].size != first:
            return False
    size, batch = sizes[first], problem.global_batch
    if batch % size or batch // size < count:
        return False
    low, more = batch // size // count, batch // size % count
    if more and problem.exact_batch:
        return False
    for k in range(count):
        batches[k] = low + (1 if k < more else 0)
    return True


@kernel
def relaxed_s(pipelines: Any, sizes: Any, active: Any, count: int, batch: int) -> Any:
    """When all pipelines end together if micro-batches could be cut."""
    rate, fill = 0.0, 0.0
    for k in range(count):
        pipeline = pipelines[active[k]]
        rate += sizes[pipeline.size] / pipeline.period_s
        fill += sizes[pipeline.size] * (pipeline.end_s / pipeline.period_s - pipeline.timed)
    return (batch + fill) / rate


@kernel
def uneven_batches(
    pipelines: Any, sizes: Any, active: Any, batches: Any, count: int, batch: int, soon_s: float
) -> bool:
    """Micro-batches so that the last pipeline ends soonest, beyond `soon_s`; whether sizes add up."""
    total = 0
    for k in range(count):
        total += sizes[pipelines[active[k]].size]
    if total > batch:
        return False
    low, high = soon_s, soon_s * 1.02
    for _ in range(_GROWTHS):
        if sequences_until(pipelines, sizes, active, count, high) >= batch:
            break
        low, high = high, high * 1.05
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        done = sequences_until(pipelines, sizes, active, count, middle)
        if done >= batch:
            high = middle
            if done == batch:
                break
        else:
            low = middle
    surplus = -batch
    for k in range(count):
        pipeline = pipelines[active[k]]
        batches[k] = batches_until(pipeline, high)
        surplus += sizes[pipeline.size] * batches[k]
    while surplus > 0:
        k = last_to_end(pipelines, sizes, active, batches, count, 1, surplus)
        if k < 0:  # one that is too large is taken back, and smaller ones fill up
            k = last_to_end(pipelines, sizes, active, batches, count, surplus + 1, batch)
            if k < 0:
                return False
        batches[k] -= 1
        surplus -= sizes[pipelines[active[k]].size]
    return fill_up(pipelines, sizes, active, batches, count, -surplus)


@kernel
def last_end(pipelines: Any, active: Any, batches: Any, count: int) -> Any:
    """When the last of the active pipelines ends."""
    longest = 0.0
    for k in range(count):
        longest = max(longest, end_s(pipelines[active[k]], batches[k]))
    return longest


@kernel
def divide_batch(tables: Any, work: Any, state: Any, count: int) -> Any:
    """Micro-batches of the `count` active pipelines, and when the last of them ends; infinite where they cannot have
    the whole batch."""
    problem, pipelines, sizes, active = tables.problem[0], state.pipelines, tables.sizes, work.active
    batches = work.batches
    soon_s = relaxed_s(pipelines, sizes, active, count, problem.global_batch)
    state.plan[0].relaxed_s = soon_s
    if problem.even_batch:
        if not even_batches(problem, pipelines, sizes, active, batches, count):
            return np.inf
    elif not uneven_batches(pipelines, sizes, active, batches, count, problem.global_batch, soon_s):
        return np.inf
    return last_end(pipelines, active, batches, count)
