"""One training step from the ends of its pipelines on: gradient synchronisation, optimiser, all-gather of weights.

It is a step of many. Clipping waits for the norm of all gradients, so all optimisers start together when these are
summed: from there to the next step's sums is what a step takes. Where weights are gathered beside the next forwards,
pipelines begin with them as soon as none has to wait (`late_starts`).
"""

from collections.abc import Sequence

import numpy as np

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.gathers import forwards, late_starts
from hexiopt.cost.rings import GradientRings, RingTimes
from hexiopt.numbers.coefficients import LAST_BUCKET
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
    within, copy_of, sum_bytes = rings.within_group, rings.copy_of, workload.sum_bytes
    # All-reduced whole, scattered at the end of the step, or scattered before; then groups all-reduce their shards.
    passes, gathers = (2, 1, 0, 0)[zero_stage], False
    if workload.sums_quantized:
        # Under ZeRO-0 sums come back when all have been made.
        passes, gathers = 1, zero_stage == 0
        rows = [row for times in (within, rings.between_groups) for row in times.groups.holders]
        shared = np.unique([copy_of[device] for row in rows for device in row.flat])
        ready[shared.astype(int)] += np.array([copies[k].quantization_s for k in shared])

    def sums_end_s(ready: Floats) -> Floats:
        """When all sums of each copy have ended whose last backward ends at `ready` [copies]."""
        left = None  # [copies]: seconds of compute that sums between groups may still overlap
        if framework.gradient_sums == "by_part":
            last_s = np.array([executor.last_backward_s for executor, _ in executors for _ in executor.copies])
            ended = after_sums_by_part(rings.scatter, copy_of, ready - last_s, ready, sum_bytes, passes)
        else:
            backward_s = None
            if framework.gradient_sums == "beside":
                backward_s = np.array([executor.backward_s for executor, _ in executors for _ in executor.copies])
            ended, left = after_all_reduce(rings.scatter, copy_of, ready, sum_bytes, passes, backward_s)
        if gathers:
            ended, _ = after_all_reduce(within, copy_of, ended, sum_bytes, 1)
        return after_all_reduce(rings.between_groups, copy_of, ended, sum_bytes, 2, left)[0]

    ended = sums_end_s(ready)
    synced_s = max(pipeline_s, float(ended.max()))
    finished = ended + optimizer_s
    step_s = max(synced_s, float(finished.max()))
    if zero_stage in (1, 2):
        if framework.weight_gathers == "by_part":
            late_s = late_starts(within, copy_of, optimizer_s, workload.states.weight, forwards(pipelines))
            step_s = max(step_s, float(sums_end_s(ready + late_s).max()))
        else:
            forward_s = None  # [copies]: seconds of compute that the all-gather of weights may overlap
            if framework.weight_gathers == "beside":
                forward_s = np.array([executor.forward_s for executor, _ in executors for _ in executor.copies])
            finished, _ = after_all_reduce(within, copy_of, finished, workload.states.weight, 1, forward_s)
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
