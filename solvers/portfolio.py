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
from typing import Any

from hexiopt.plan import Plan
from hexiopt.problem import Problem
from hexiopt.result import Result
from solvers.base import Budget, Listener, Pricer, Search
from solvers.local_search import hand_made, improve, own_grids
from solvers.metis import HierarchicalPartition
from solvers.polish import Polisher
from solvers.reason import explain
from solvers.shapes import shape_structures
from solvers.structure import Builder, Structure

_LANES = 2
_PARTITION = 0.2  # share of the time for HexiScale's partition, in the first lane
_ANNEAL = 0.93  # annealing ends here, the rest polishes
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
    improve(search, builder, starts(search, builder, lane, rng), rng, _ANNEAL)
    Polisher(search, builder, rng).climb(1.0)
    return builder


def _second_lane(problem: Problem, budget: Budget, seed: int, pricer: Pricer | None, pipe: Connection) -> None:
    """In another process: run lane 1 and send back its plan, with when and at which step it was found."""
    try:
        search = Search("portfolio", problem, budget, seed, pricer)
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
        search = Search(self.name, problem, budget, seed, pricer, listen)
        half = budget if budget.max_steps is None else replace(budget, max_steps=-(-budget.max_steps // _LANES))
        search.budget = half
        builder = self._run(search, problem, half, seed, pricer)
        search.budget = budget
        return explain(search, builder)

    @staticmethod
    def _run(search: Search, problem: Problem, half: Budget, seed: int, pricer: Pricer | None) -> Builder:
        if len(os.sched_getaffinity(0)) < _LANES or "fork" not in multiprocessing.get_all_start_methods():
            if half.max_steps is None:
                return run_lane(search, 0, seed)
            builder = run_lane(search, 0, seed)
            other = Search(search.name, problem, half, seed, pricer)
            run_lane(other, 1, seed)
            _merge(search, (other.plan, other.steps, other.nearest))
            return builder
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_second_lane, args=(problem, half, seed, pricer, there), daemon=True)
        child.start()
        there.close()
        try:
            builder = run_lane(search, 0, seed)
            message: Any = here.recv()
        finally:
            child.terminate() if not here.closed and child.is_alive() and not here.poll(0) else None
            child.join(1.0)
            here.close()
        if isinstance(message, BaseException):
            raise message
        _merge(search, message)
        return builder


def _merge(search: Search, found: tuple[Plan | None, int, Any]) -> None:
    """Take over what another lane found."""
    plan, steps, nearest = found
    search.steps += steps
    if plan is not None:
        search.offer(plan)
    elif search.nearest is None:
        search.nearest = nearest
