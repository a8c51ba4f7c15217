"""Lower bounds on the step time of every plan in the space, independent of the solver.

`lower_bound_s` returns the compute bound at once; given more time, `programme` raises it by a linear program over the
chains of stages that form pipelines. Both hold for every schedule, sharding and number of replicas; only the compute
bound covers sequence layouts and uneven chunks.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hexiopt.bounds.compute import compute_bound_s, compute_shares
from hexiopt.cost.pricer import PlanPricer

__all__ = ["LowerBound", "compute_bound_s", "lower_bound", "lower_bound_s"]


@dataclass(frozen=True)
class LowerBound:
    """A step time in seconds that no plan can beat, and the dual values of the machines in its proof.

    `machine_shares`, by machine, are shares of the cluster's throughput in the bound: one more machine like it would
    raise that by about this share. Empty where plans may have sequence layouts.
    """

    bound_s: float
    machine_shares: Mapping[int, float]


def lower_bound(
    model: PlanPricer, time_limit_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> LowerBound:
    """A lower bound on the step time; it is valid at any time limit, and tighter with more time.

    `clock` counts the seconds of the limit.
    """
    best_s = compute_bound_s(model)
    if model.problem.space.sequence:
        return LowerBound(best_s, {})
    shares = None
    if time_limit_s > 0.0 and not model.problem.space.uneven_chunks:
        from hexiopt.bounds.programme import chain_bound  # imported here, since numba takes a second to load

        best_s, shares = chain_bound(model, best_s, clock() + time_limit_s, clock)
    return LowerBound(best_s, compute_shares(model) if shares is None else shares)


def lower_bound_s(
    model: PlanPricer, time_limit_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The `lower_bound` in seconds."""
    return lower_bound(model, time_limit_s, clock).bound_s
