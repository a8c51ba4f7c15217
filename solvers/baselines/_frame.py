"""The frame of a baseline: its published search, with its own estimate, behind the contract of a solver.

A baseline enumerates the plans of its published space and ranks them by its own estimate of the step time. It is not
beaten for a poor estimate, though: beyond the plan that it would pick, the next best by its estimate are priced by our
cost model too, and the best that fits is its answer. What it cannot express stays its own limit. `top_k` takes this
back: only the first plans of its own ranking are priced, and the first alone is what the system would run.
"""

import math
import random
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import ClassVar, TypeVar

from hexiopt.errors import InputError, quoted
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.solving import MAX_TIME_LIMIT_S, Capabilities
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver

Skeleton = TypeVar("Skeleton")
Node = TypeVar("Node")


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan of a baseline's space, made only when it is wanted, and the baseline's own estimate of its step time.

    `make` returns None where it comes to nothing, or to nothing new. Candidates of an earlier `turn` are priced first,
    where a baseline compares its estimates only among some of its plans. `neighbours` are plans of the space that
    differ in one choice: the best plan priced is replaced by a better neighbour while there is one. `published` is
    False for what the system itself does not rank: another estimate, or a choice that we make for it.
    """

    estimate_s: float
    make: Callable[[], Plan | None]
    turn: int = 0
    neighbours: "Callable[[], Iterator[PlanCandidate]]" = field(default=lambda: iter(()))
    published: bool = True


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Where the search of a baseline ends. No paper states these; they are so wide that they seldom decide.

    `slack`: skeletons whose bound exceeds the best estimate by this factor are skipped. `max_candidates`: no skeleton
    is opened after more. `max_without_improvement`: plans that fit and are priced without a better one, before those
    left, worse by the estimate, are dropped. `enumeration_share`: of the time limit, for finding candidates.
    """

    slack: float = math.inf
    max_candidates: float = math.inf
    max_without_improvement: int = 500
    enumeration_share: float = 0.6


def climb(
    start: Node,
    neighbours: Callable[[Node], Iterable[Node]],
    is_better: Callable[[Node], bool],
    should_continue: Callable[[], bool],
) -> Iterator[Node]:
    """The nodes that a climb from `start` visits after it: each is the first of the last one's `neighbours` that
    `is_better`. It ends where there is none, or once `should_continue` returns False."""
    node: Node | None = start
    while node is not None:
        around = takewhile(lambda _: should_continue(), neighbours(node))
        node = next(filter(is_better, around), None)
        if node is not None:
            yield node


class BestEstimate:
    """The least estimate of an enumeration so far, and the number of candidates estimated."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds, self.count = seconds, 0

    def note(self, seconds: float) -> None:
        """Take a further estimate into account."""
        self.seconds, self.count = min(self.seconds, seconds), self.count + 1


def best_first(
    run: Search,
    skeletons: Iterable[tuple[float, Skeleton]],
    expand: Callable[[Skeleton], Iterable[PlanCandidate]],
    limits: SearchLimits,
    best: BestEstimate,
) -> Iterator[PlanCandidate]:
    """The candidates of `skeletons`, which come with lower bounds of their estimates, the least bound first.

    `best` includes every candidate yielded before `expand` resumes.
    """
    for bound, skeleton in skeletons:
        if bound > limits.slack * best.seconds:
            continue
        if best.count > limits.max_candidates or not run.should_continue():
            return
        for candidate in expand(skeleton):
            best.note(candidate.estimate_s)
            yield candidate


@dataclass(frozen=True)
class Baseline(SearchSolver):
    """A published planner as a `Solver`: a subclass states its space, and enumerates it with its own estimate.

    The options of a baseline are the fields of a frozen dataclass, from which the registry and the command line know
    them. `top_k`: how many plans are priced, the first by the system's own estimate; None: all, by turns, and then the
    neighbours of the best. Raises InputError for a `top_k` that is no whole number from 1 on.
    """

    top_k: int | None = field(default=None, kw_only=True)

    capabilities = Capabilities(kind="baseline")
    limits: ClassVar[SearchLimits] = SearchLimits()

    def __post_init__(self) -> None:
        k = self.top_k
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise InputError(
                f"solver.top_k: {quoted(k)} is out of range; state a whole number from 1 on, or null for all"
            )

    @abstractmethod
    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """The search of the baseline.

        Estimates are in seconds (or in money, by the objective); infinite ones are dropped. Work of more than some
        milliseconds between two candidates must ask `run.should_continue()` itself.
        """

    def pricing(self, run: Search) -> "CandidatePricing":
        """How candidates are priced and compared."""
        return CandidatePricing(run, self.limits.max_without_improvement)

    def search(self, run: Search, rng: random.Random) -> None:
        """Price candidates in the order of their estimates; each plan priced is a step. May raise InputError.

        Where steps are counted, the time limit ends only the pricing, and that only once there is a plan: enumeration
        takes no steps, and on a busy machine it could use up the time and leave none for pricing.
        """
        pricing, budget = self.pricing(run), run.budget
        if budget.max_steps is not None:
            run.budget = replace(budget, time_limit_s=MAX_TIME_LIMIT_S)
        for candidate in rank_candidates(self, run):
            if run.plan is not None:
                run.budget = budget
            if pricing.ended or pricing.priced == self.top_k or not run.should_continue():
                break
            pricing.price(candidate)
        run.budget = budget
        run.reason = pricing.finish()


def rank_candidates(baseline: Baseline, run: Search) -> list[PlanCandidate]:
    """All candidates enumerated in time, by turn and then by estimate; with `top_k` the published ones, by estimate
    alone, without neighbours. Ties keep the order of enumeration."""
    estimated = []
    for candidate in baseline.candidates(run, random.Random(run.seed)):
        if candidate.estimate_s < math.inf:
            estimated.append(candidate)
        if not run.should_continue(baseline.limits.enumeration_share):
            break
    if baseline.top_k is None:
        return sorted(estimated, key=lambda candidate: (candidate.turn, candidate.estimate_s))
    published = (PlanCandidate(candidate.estimate_s, candidate.make) for candidate in estimated if candidate.published)
    return sorted(published, key=lambda candidate: candidate.estimate_s)


class CandidatePricing:
    """Prices candidates by the time of a step.

    It holds the best candidate, the violation of the first invalid plan, the number of plans priced, and of those that
    have fitted since the best.
    """

    def __init__(self, run: Search, max_without_improvement: int) -> None:
        self.run, self._max_without_improvement = run, max_without_improvement
        self.best: PlanCandidate | None = None
        self.priced = self.without_improvement = 0
        self._invalid = ""
        self._seen: set[Plan] = set()

    @property
    def ended(self) -> bool:
        """Whether too many plans in a row have not been better."""
        return self.without_improvement >= self._max_without_improvement

    def price(self, candidate: PlanCandidate) -> bool:
        """Price the plan of a candidate if it is new and valid; returns whether it is the best so far."""
        plan = candidate.make()
        if plan is None or plan in self._seen:
            return False
        self._seen.add(plan)
        violations = check(self.run.problem, plan)
        if violations:
            self._invalid = self._invalid or str(violations[0])
            return False
        self.run.step()
        self.priced += 1
        fits, improves = self._evaluate(plan)
        if improves:
            self.best, self.without_improvement = candidate, 0
        elif fits:
            self.without_improvement += 1
        return improves

    def _evaluate(self, plan: Plan) -> tuple[bool, bool]:
        """Price a plan, and offer it if it may be the best; returns whether it fits and whether it is the best."""
        run = self.run
        before_s, pipelines = run.best_s, run.pricer.pipelines(plan)
        if max(pipeline.end_s for pipeline in pipelines) < before_s:
            run.offer(plan, run.pricer.price(plan, pipelines))
        fits = all(stage.excess_bytes <= 0 for pipeline in pipelines for stage in pipeline.stages)
        return fits, run.best_s < before_s

    def finish(self) -> str:
        """Replace the best candidate by its first better neighbour while there is one.

        Returns why there is no plan, if known.
        """
        if self.best is not None:
            better = climb(self.best, lambda candidate: candidate.neighbours(), self.price, self.run.should_continue)
            deque(better, maxlen=0)
        if self.run.plan is None and self.run.closest_to_fitting is None and self._invalid:
            return (
                f"no plan of {self.run.name}'s space obeys the plan space asked for: {self._invalid}; "
                "choose solver=portfolio"
            )
        return ""
