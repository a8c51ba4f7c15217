"""Step times that no plan of the space can beat, whatever the solver.

`lower_bound_s` answers at once with the compute bound; with time to spend, `programme` raises it by a linear
program over the chains of stages that pipelines are made of. Both hold for every schedule, sharding and replica; the
compute bound also for sequence layouts, of which the program knows nothing.
"""

import time

from hexiopt.bounds.compute import compute_bound_s
from hexiopt.cost.pricer import PlanPricer

__all__ = ["compute_bound_s", "lower_bound_s"]


def lower_bound_s(model: PlanPricer, time_limit_s: float = 0.0) -> float:
    """Seconds that every step takes at least; better with more time, never wrong with less."""
    best = compute_bound_s(model)
    if time_limit_s > 0.0 and not model.problem.space.sequence:
        from hexiopt.bounds.programme import chain_bound_s  # only here, as numba takes a second to start

        best = max(best, chain_bound_s(model, best, time.perf_counter() + time_limit_s))
    return best
