"""Lower bounds on the step time of every plan in the space, independent of the solver.

`lower_bound_s` returns the compute bound at once; given more time, `programme` raises it by a linear program over the
chains of stages that form pipelines. Both hold for every schedule, sharding and number of replicas; only the compute
bound covers sequence layouts.
"""

import time

from hexiopt.bounds.compute import compute_bound_s
from hexiopt.cost.pricer import PlanPricer

__all__ = ["compute_bound_s", "lower_bound_s"]


def lower_bound_s(model: PlanPricer, time_limit_s: float = 0.0) -> float:
    """A lower bound on the step time in seconds; it is valid at any time limit, and tighter with more time."""
    best = compute_bound_s(model)
    if time_limit_s > 0.0 and not model.problem.space.sequence:
        from hexiopt.bounds.programme import chain_bound_s  # imported here, since numba takes a second to load

        best = max(best, chain_bound_s(model, best, time.perf_counter() + time_limit_s))
    return best
