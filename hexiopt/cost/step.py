"""One training step from the ends of its pipelines on: gradient synchronisation, optimiser, all-gather of weights.

It is a step of many: where weights are gathered beside the next forwards, what these hide is no part of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.rings import GradientRings, RingTimes
from hexiopt.numbers.coefficients import BUCKET_PARAMS, LAST_BUCKET
from hexiopt.numbers.frameworks import Framework
from hexiopt.plan.holdings import Floats, Ints
from hexiopt.problem.problem import Problem


def step_cost(
    zero_stage: int, pipelines: Sequence[PipelineCost], rings: GradientRings, problem: Problem, framework: Framework
) -> Cost:
    """The cost of a step with the pipelines `pipelines` and the gradient rings `rings`, its states sharded by ZeRO
    stage `zero_stage`."""
    workload = problem.workload
    pipeline_s = max([pipeline.end_s for pipeline in pipelines])
    executors = [
        (executor, end_s)
        for pipeline in pipelines
        for executor, end_s in zip(
            [executor for stage in pipeline.stages for executor in stage.executors],
            pipeline.executor_end_s,
            strict=True,
        )
    ]
    copies = [copy for executor, _ in executors for copy in executor.copies]
    # All copies of an executor (the devices of a sequence layout) end together.
    ready = np.array([end_s for executor, end_s in executors for _ in executor.copies])
    optimizer_s = np.array([copy.optimizer_s for copy in copies])
    within, copy_of, gradient_bytes = rings.within_group, rings.copy_of, workload.states.gradient
    # All-reduced whole, scattered at the end of the step, or scattered before; then groups all-reduce their shards.
    passes = (2, 1, 0, 0)[zero_stage]
    left = None  # [copies]: seconds of compute that sums between groups may still overlap
    if framework.gradient_sums == "by_part":
        last_s = np.array([executor.last_backward_s for executor, _ in executors for _ in executor.copies])
        ended = after_sums_by_part(within, copy_of, ready - last_s, ready, gradient_bytes, passes)
    else:
        backward_s = None
        if framework.gradient_sums == "beside":
            backward_s = np.array([executor.backward_s for executor, _ in executors for _ in executor.copies])
        ended, left = after_all_reduce(within, copy_of, ready, gradient_bytes, passes, backward_s)
    ended, _ = after_all_reduce(rings.between_groups, copy_of, ended, gradient_bytes, 2, left)
    synced_s = max(pipeline_s, float(ended.max()))
    finished = ended + optimizer_s
    step_s = max(synced_s, float(finished.max()))
    if zero_stage in (1, 2):
        if framework.weight_gathers == "by_part":
            # Clipping waits for the norm of all gradients, and with it every optimiser for all sums.
            finished, ahead = synced_s + optimizer_s, forwards(pipelines)
            step_s = max(step_s, after_gathers_by_part(within, copy_of, finished, workload.element_bytes, ahead))
        else:
            forward_s = None  # [copies]: seconds of compute that the all-gather of weights may overlap
            if framework.weight_gathers == "beside":
                forward_s = np.array([executor.forward_s for executor, _ in executors for _ in executor.copies])
            finished, _ = after_all_reduce(within, copy_of, finished, workload.element_bytes, 1, forward_s)
            step_s = max(step_s, float(finished.max()))
    if zero_stage == 1:
        sizes = [holders.shape[1] for holders in within.groups.holders]
        step_s += framework.holder_s * max(sizes, default=0)
    return Cost(
        step_time_s=step_s,
        pipeline_s=pipeline_s,
        gradient_sync_s=synced_s - pipeline_s,
        optimizer_s=step_s - synced_s,
        tokens_per_s=workload.tokens / step_s,
        mfu=problem.mfu(step_s),
        excess_bytes=max([copy.excess_bytes for copy in copies]),
        pipelines=tuple(pipelines),
    )


class Forwards(NamedTuple):
    """Of the executor of each parameter copy [copies]: seconds from a step's start that its first forward begins after
    at least; seconds of a layer in it; and its layers."""

    begin_s: Floats
    layer_s: Floats
    num_layers: Floats


def forwards(pipelines: Sequence[PipelineCost]) -> Forwards:
    """The first forwards of a step, in the order of all parameter copies. Messages are left out of what goes before."""
    rows = []
    for pipeline in pipelines:
        begin_s = 0.0
        for stage in pipeline.stages:
            for executor in stage.executors:
                rows += [(begin_s, executor.layer_forward_s, executor.num_layers)] * len(executor.copies)
            begin_s += min([executor.chunk_s[0][0] for executor in stage.executors])
    return Forwards(*np.array(rows, np.float64).T)


def after_gathers_by_part(within: RingTimes, copy_of: Ints, start: Floats, num_bytes: float, ahead: Forwards) -> float:
    """When the next step begins, in seconds from this one's start, if no forward in it is to wait for weights.

    A ring gathers from the time `start` [copies] of its last member on, those parameters first that forwards need
    first. While they come, a member waits for its first forward as it would anyway, and then runs it layer by layer.
    The first layer needs its own parameters, those of the embedding, and at most a bucket beside them, in which a later
    layer begins; each other layer, one layer's more. As compute and gather both go on evenly, the first of them decides
    and the last that something comes for. Other rings' layers, and what is no layer, only come between. A step that
    begins then is no shorter than one whose stages begin as soon as each can. Messages are taken to be as fast as
    without gathers beside them, as they are beside sums.
    """
    begin_s, groups = 0.0, within.groups
    for holders, params, layer, embedding, whole_s in zip(
        groups.holders, groups.params, groups.layer, groups.embedding, within.ring_pass_s(num_bytes), strict=True
    ):
        at = copy_of[holders]
        layer = np.where(layer > 0.0, layer, params)  # a head or a tied matrix alone comes whole
        first = embedding + layer + BUCKET_PARAMS
        beside_s = np.clip(((params - first) / layer)[:, None], 0.0, ahead.num_layers[at]) * ahead.layer_s[at]
        lead_s = np.maximum(whole_s[:, None] - beside_s, (np.minimum(first / params, 1.0) * whole_s)[:, None])
        begin_s = max(begin_s, float((start[at].max(axis=1) + (lead_s - ahead.begin_s[at]).max(axis=1)).max()))
    return begin_s


def after_sums_by_part(
    sync: RingTimes, copy_of: Ints, began: Floats, ended: Floats, num_bytes: float, passes: int
) -> Floats:
    """When each parameter copy has finished all its ring collectives [copies], in seconds from the step's start, where
    gradients are summed as the last backward, from `began` to `ended` [copies], makes them.

    A ring starts when the last of its members begins that backward; the gradients that the backward makes last go
    around when the last member has ended it. Otherwise as `after_all_reduce`.
    """
    if not passes or not sync.groups.count:
        return ended
    done, groups = ended.copy(), sync.groups
    for holders, duration, last in zip(groups.holders, sync.ring_pass_s(num_bytes), groups.last_shares, strict=True):
        at, seconds = copy_of[holders], passes * duration
        end = np.maximum(began[at].max(axis=1) + seconds, ended[at].max(axis=1) + last * seconds)
        np.maximum.at(done, at, end[:, None])
    return done


def after_all_reduce(
    sync: RingTimes, copy_of: Ints, start: Floats, num_bytes: float, passes: int, overlap_s: Floats | None = None
) -> tuple[Floats, Floats | None]:
    """When each parameter copy has finished all its ring collectives [copies], in seconds from the step's start, and
    what is left of `overlap_s`.

    Copies are ready at `start` [copies]; a ring starts when its last member is ready and makes `passes` passes over
    `num_bytes` per parameter. `copy_of` [devices] numbers the copy that a device holds. Compute hides up to `overlap_s`
    seconds [copies] of each ring, except its last bucket.
    """
    if not passes or not sync.groups.count:
        return start, overlap_s
    ended = start.copy()
    left = None if overlap_s is None else overlap_s.copy()
    for holders, duration in zip(sync.groups.holders, sync.ring_pass_s(num_bytes), strict=True):
        at = copy_of[holders]
        seconds = passes * duration
        if overlap_s is not None and left is not None:
            np.minimum.at(left, at, np.maximum(overlap_s[at] - seconds[:, None], 0.0))
            seconds = np.maximum(seconds - overlap_s[at].min(axis=1), LAST_BUCKET * seconds)
        done = start[at].max(axis=1) + seconds
        np.maximum.at(ended, at, done[:, None])
    return ended, left
