"""`portfolio`, the default: every way of finding a plan within one time limit, and the best of all.

Two lanes work side by side, on two cores where there are two: one starts from HexiScale's partition, the other
from the linear program over shapes; both try what people build by hand, and anneal. Large clusters keep to
structures that can be priced in time. What the lanes do does not depend on the cores, so with a budget in steps
the plan does not either.
"""

import multiprocessing
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from hexiopt.cost.cost import Cost
from hexiopt.plan import Plan
from hexiopt.problem import Problem
from hexiopt.result import Result
from solvers.base import Budget, Listener, Pricer, Search
from solvers.local_search import ANNEAL, hand_made, improve, own_grids
from solvers.metis import HierarchicalPartition
from solvers.polish import Polisher
from solvers.reason import explain
from solvers.shapes import shape_structures
from solvers.structure import Builder, Structure

_LANES = 2
_PARTITION = 0.2  # share of the time for HexiScale's partition, in the first lane
_GRACE_S = 0.2  # how long a lane may take to notice that time is up
_LARGE = 200  # GPUs beyond which a structure takes too long to price for annealing thousands


def starts(search: Search, builder: Builder, lane: int, rng: random.Random) -> Iterator[Structure]:
    """What a lane begins with."""
    problem = search.problem
    yield from own_grids(problem, builder)
    if lane == 0 and find_spec("pymetis") and len(problem.usable_devices) <= _LARGE:
        hierarchy = HierarchicalPartition(search, builder, rng)
        share = None if search.budget.max_steps is None else int(search.budget.max_steps * _PARTITION)
        while search.go_on(_PARTITION) and (share is None or search.steps < share):
            search.step()
            hierarchy.iterate()
        if hierarchy.best is not None:
            yield hierarchy.best
    if lane == 1:
        yield from shape_structures(search)
    yield from hand_made(problem, builder)


def run_lane(search: Search, lane: int, seed: int) -> Builder:
    """One lane, to the end of its budget."""
    builder, rng = Builder(search), random.Random(seed * _LANES + lane)
    improve(search, builder, starts(search, builder, lane, rng), rng, ANNEAL)
    Polisher(search, builder, rng).finish()
    return builder


def _second_lane(
    problem: Problem, budget: Budget, seed: int, pricer: Pricer | None, stop: Event, pipe: Connection
) -> None:
    """In another process: run lane 1 until `stop`, and send back what it found."""
    try:
        search = Search("portfolio", problem, budget, seed, pricer, lambda _: not stop.is_set())
        run_lane(search, 1, seed)
        pipe.send((search.plan, search.steps, search.nearest))
    except BaseException as error:
        pipe.send(error)
        raise
    finally:
        pipe.close()


class Portfolio:
    """The best plan of all ways."""

    name = "portfolio"

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """The best plan found within `budget`; steps are shared equally by the lanes."""
        half = budget if budget.max_steps is None else replace(budget, max_steps=-(-budget.max_steps // _LANES))
        search = Search(self.name, problem, half, seed, pricer, listen)
        if len(os.sched_getaffinity(0)) >= _LANES and "fork" in multiprocessing.get_all_start_methods():
            builder = _side_by_side(search, pricer)
        else:
            builder = run_lane(search, 0, seed)
            if half.max_steps is not None and not search.stopped:
                other = Search(self.name, problem, half, seed, pricer, listen)
                run_lane(other, 1, seed)
                _merge(search, other.plan, other.steps, other.nearest)
        return explain(search, builder)


def _side_by_side(search: Search, pricer: Pricer | None) -> Builder:
    """Both lanes at once, the second in a forked process; its error is ours."""
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    here, there = context.Pipe(duplex=False)
    child = context.Process(
        target=_second_lane,
        args=(search.problem, search.budget, search.seed, pricer, stop, there),
        daemon=True,
    )
    child.start()
    there.close()
    try:
        builder = run_lane(search, 0, search.seed)
        if search.stopped or not here.poll(max(0.0, search.left_s()) + _GRACE_S):
            stop.set()
        if here.poll(_GRACE_S):
            message: Any = here.recv()
            if isinstance(message, BaseException):
                raise message
            _merge(search, *message)
    finally:
        if child.is_alive():
            child.join(0.05)
            child.terminate()
        child.join()
        here.close()
    return builder


def _merge(search: Search, plan: Plan | None, steps: int, nearest: tuple[Plan, Cost] | None) -> None:
    """Take over what another lane found."""
    search.steps += steps
    if plan is not None:
        search.offer(plan)
    elif search.nearest is None:
        search.nearest = nearest
