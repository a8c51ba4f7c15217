"""A large cluster is planned by a part of it. Of every class of interchangeable machines the part has an equal share,
and of the batch too; what is found for it stands on all other shares as well, and is where the search of the whole
begins. A move of a walk changes one or two pipelines, which is little of a step that hundreds of pipelines share."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from hexiopt.cost.cost import Cost
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving.naming import renumber
from solvers.core.search import Search
from solvers.frame.starts import machine_classes

_PART = 1024  # GPUs of a part, or more; smaller ones are searched faster, and more machines are left over
_SEARCHED = 0.5  # of the budget, for the part
_GAIN = 0.99  # of the last plan that was copied: a better one is copied at once; pricing the whole takes long
_COVERED = 0.9  # least share of the GPUs that parts must have


class PartSearch(Search):
    """A search of a part of another's problem, which copies to the whole what it finds."""

    def __init__(self, whole: Search, part: Problem, copies: list[dict[int, int]]) -> None:
        budget = whole.budget.part(_SEARCHED)
        super().__init__(whole.name, part, budget, whole.seed, on_progress=lambda _: whole.should_continue())
        self._whole, self._copies, self._copied_s = whole, copies, math.inf

    def offer(self, plan: Plan, cost: Cost | None = None) -> Cost:
        """As of any search; a plan that gains enough over the last one that was copied is offered to the whole."""
        cost = super().offer(plan, cost)
        if self.best_s < _GAIN * self._copied_s:
            self.copy_best()
        return cost

    def copy_best(self) -> None:
        """Offer copies of the best plan to the whole."""
        if self.plan is None or self.best_s == self._copied_s:
            return
        self._copied_s = self.best_s
        plan = with_copies(self.plan, self._copies)
        if not check(self._whole.problem, plan):
            self._whole.offer(plan)


def begin_by_parts(run: Search, find: Callable[[Search], None]) -> None:
    """Begin `run` at copies of the best plan that `find` has for a part, where the cluster is large enough for two."""
    if run.start is not None or run.our_model is None or (split := split_problem(run.problem)) is None:
        return
    inner = PartSearch(run, *split)
    find(inner)
    run.steps += inner.steps
    inner.copy_best()
    run.start = run.plan


def split_problem(problem: Problem) -> tuple[Problem, list[dict[int, int]]] | None:
    """A part of a problem, and for every other part the number of the device that stands there for each of this one;
    None where the cluster is too small, has too few machines alike, or the batch and stated pipelines cannot be
    divided."""
    devices, workload, space = problem.usable_devices, problem.workload, problem.space
    pipelines = space.num_pipelines or 0
    most = len(devices) // _PART
    numbers = [n for n in range(2, most + 1) if workload.global_batch % n == 0 and pipelines % n == 0]
    if not numbers:
        return None
    number, places = numbers[-1], problem.usable_by_machine
    kept, copies = set[int](), [dict[int, int]() for _ in range(number - 1)]
    for members in machine_classes(problem):
        share = len(members) // number
        kept.update(members[:share])
        for k, copy in enumerate(copies, start=1):
            for ours, theirs in zip(members[:share], members[k * share : (k + 1) * share], strict=True):
                copy |= zip(places[ours], places[theirs], strict=True)
    if number * len(copies[0]) < _COVERED * len(devices):
        return None
    others = tuple(problem.cluster.machines[m].name for m in places if m not in kept)
    part = problem.replace(
        workload=workload.replace(global_batch=workload.global_batch // number),
        space=space.replace(exclude=(*space.exclude, *others), num_pipelines=pipelines // number or None),
    )
    return part, copies


def with_copies(plan: Plan, copies: list[dict[int, int]]) -> Plan:
    """One plan of `plan` and its copies; `copies` [other parts]: the device that stands there for each of the plan."""
    plans = [plan, *(renumber(plan, copy) for copy in copies)]
    sharding, groups = plan.sharding, list[tuple[int, ...]]()
    for each in plans:
        if not isinstance(each.sharding.groups, str):
            groups += each.sharding.groups
    if groups:
        sharding = replace(sharding, groups=tuple(groups))
    return replace(plan, pipelines=tuple(chain.from_iterable(each.pipelines for each in plans)), sharding=sharding)
