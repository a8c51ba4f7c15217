"""Weights gathered beside the next forwards, as `late_starts` of `hexiopt/cost/gathers.py` has them."""

from typing import Any

from hexiopt.numbers.coefficients import BUCKET_PARAMS
from solvers.compiled.kernels import kernel


@kernel
def embedding_params(problem: Any, pipelines: Any, members: Any, ring: Any) -> Any:
    """Parameters of a ring that forwards need before its first layer: it is one of first stages, which hold them too
    where that makes its last part larger than a layer."""
    deep = 1
    for k in range(ring.first, ring.end):
        if members[k].stage > 0:
            return 0.0
        deep = max(deep, pipelines[members[k].pipeline].num_stages)
    tied = problem.tied_params if deep == 1 else 0.0
    if ring.last < max(problem.embedding_params, tied):
        return 0.0
    return problem.embedding_params + tied


@kernel
def delay_pipelines(tables: Any, work: Any, state: Any, count: int, num: int) -> None:
    """Let each of the active pipelines begin when no forward in it has to wait for weights, which the first `num` rings
    gather: its stages are ready later."""
    times, stages, pipelines, members = work.times, state.stages, state.pipelines, work.members
    problem = tables.problem[0]
    for k in range(count):
        p, begin_s, late_s = work.active[k], 0.0, 0.0
        for s in range(pipelines[p].num_stages):
            times[p, s].begin_s = begin_s
            late_s = max(late_s, times[p, s].optimizer_s - begin_s)
            begin_s += stages[p, s].forward_s
        times[p, 0].late_s = late_s
    layer = problem.layer_params
    for r in range(num):
        ring = work.rings[r]
        if ring.between:
            continue
        seconds, start_s = ring.s_per_byte * problem.weight_bytes + ring.latency_s, 0.0
        first = embedding_params(problem, pipelines, members, ring) + layer + ring.degree * BUCKET_PARAMS
        first = ring.params if ring.last >= ring.params else min(first, ring.params)
        for k in range(ring.first, ring.end):
            start_s = max(start_s, times[members[k].pipeline, members[k].stage].optimizer_s)
        for k in range(ring.first, ring.end):
            p, s = members[k].pipeline, members[k].stage
            layers = min((ring.params - first) / layer, stages[p, s].layers)
            beside_s = layers * tables.costs[stages[p, s].group, pipelines[p].size].forward_s
            lead_s = max(first / ring.params * seconds, seconds - beside_s)
            times[p, 0].late_s = max(times[p, 0].late_s, start_s + lead_s - times[p, s].begin_s)
    for k in range(count):
        p = work.active[k]
        for s in range(pipelines[p].num_stages):
            times[p, s].ready_s += times[p, 0].late_s
