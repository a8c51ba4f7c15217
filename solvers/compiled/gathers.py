"""Weights gathered beside the next forwards, as `after_gathers_by_part` of `hexiopt/cost/step.py` has them."""

from typing import Any

import numpy as np

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
def gather_beside(
    tables: Any, pipelines: Any, members: Any, stages: Any, times: Any, ring: Any, synced_s: float
) -> Any:
    """When the next step begins, if no forward in it is to wait for the weights of a ring, gathered once all sums have
    ended, at `synced_s`."""
    problem = tables.problem[0]
    seconds = ring.s_per_byte * problem.weight_bytes + ring.latency_s
    layer = problem.layer_params
    first = embedding_params(problem, pipelines, members, ring) + layer + ring.degree * BUCKET_PARAMS
    first = ring.params if ring.last >= ring.params else min(first, ring.params)
    optimizer_s, lead = 0.0, -np.inf
    for k in range(ring.first, ring.end):
        p, s = members[k].pipeline, members[k].stage
        optimizer_s = max(optimizer_s, times[p, s].optimizer_s)
        begin = 0.0
        for earlier in range(s):
            begin += stages[p, earlier].forward_s
        layers = min((ring.params - first) / layer, stages[p, s].layers)
        beside = layers * tables.costs[stages[p, s].group, pipelines[p].size].forward_s
        lead = max(lead, max(first / ring.params * seconds, seconds - beside) - begin)
    return synced_s + optimizer_s + lead
