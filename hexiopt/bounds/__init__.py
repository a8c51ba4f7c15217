"""Lower bounds on the step time of every plan in the space, independent of the solver.

`lower_bound_s` returns the compute bound at once; given more time, `programme` raises it by a linear program over the
chains of stages that form pipelines. Both hold for every schedule, sharding and number of replicas; only the compute
bound covers sequence layouts, uneven chunks, experts and layers of several kinds. All bounds and proofs are about the
prices of our own cost model: `our_model` decides, for everybody who uses one, whether a pricer is that.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hexiopt.bounds.compute import compute_bound_s, compute_shares
from hexiopt.cost.executors.group_model import framework_of
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.pricer import PlanPricer, PricerFeatures
from hexiopt.cost.sharing import FairShares
from hexiopt.problem.problem import Problem

__all__ = ["LowerBound", "bound_under_s", "compute_bound_s", "lower_bound", "lower_bound_s", "our_model"]


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
    """A lower bound on the step time: valid at any `time_limit_s`, by `clock`, and tighter with more."""
    best_s = compute_bound_s(model)
    space, shared = model.problem.space, model.problem.model.shares_experts
    if space.sequence or (space.uneven_experts and shared):
        return LowerBound(best_s, {})
    shares = None
    if time_limit_s > 0.0 and not space.uneven_chunks:
        from hexiopt.bounds.programme import chain_bound  # imported here, since numba takes a second to load

        best_s, shares = chain_bound(model, best_s, clock() + time_limit_s, clock)
    return LowerBound(best_s, compute_shares(model) if shares is None else shares)


def lower_bound_s(
    model: PlanPricer, time_limit_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The `lower_bound` in seconds."""
    return lower_bound(model, time_limit_s, clock).bound_s


class _HasFeatures(Protocol):
    """What bounds ask of a pricer (`hexiopt.solving.Pricer`)."""

    @property
    def features(self) -> PricerFeatures:
        """What the pricer tells searches."""


def our_model(pricer: object, problem: Problem) -> PlanPricer | None:
    """`pricer` where its prices are those of our cost model for `problem`, for which bounds and proofs hold; else None.

    What the pricer is decides, not what it says: a wrapper, a subclass, and ours over another framework, network or
    problem have prices of their own. Another framework is not ours even where bounds could hold for it, since searches
    that prove price parts of a problem by models that they make themselves.
    """
    if type(pricer) is not PlanPricer or not vars(pricer).keys().isdisjoint(vars(PlanPricer)):
        return None
    stages, framework = pricer.stages, framework_of(problem)
    plain = type(stages) is StageModel and stages.context is None and type(pricer.network) is FairShares
    same = all(other is problem or other == problem for other in (pricer.problem, stages.problem))
    executes = pricer.framework == stages.framework == framework and framework.is_bounded
    return pricer if plain and same and executes else None


def bound_under_s(
    pricer: _HasFeatures, problem: Problem, time_limit_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """A step time in seconds below which `pricer` prices no plan: our `lower_bound_s` where it is our cost model, else
    the bound that it brings (`PricerFeatures.bound_s`), 0 where it brings none."""
    ours = our_model(pricer, problem)
    return pricer.features.bound_s if ours is None else lower_bound_s(ours, time_limit_s, clock)
