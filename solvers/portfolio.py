"""`portfolio`, the default: every way of finding a plan within one time limit, and the best of all.

Two lanes work side by side, on two cores where there are two. One begins with HexiScale's partition, as
`solver=metis` would, and anneals what that finds and what people build by hand, now and then with bundles made anew
(`rechaining.py`); the other anneals the latter and, beyond a few machines, what the linear program over shapes gives.
On large clusters, too large for a complete graph, both start by hand. Where the plan space has sequence layouts, the
first lane soon turns to them instead, and decides stage by stage between these and tensor parallelism
(`sequence/joint.py`). With a budget in steps both lanes run wherever they are, so that the plan does not depend on the
cores.
"""

import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from hexiopt.cores import usable_cores
from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.result import Point
from solvers.completion.completer import Builder
from solvers.core.partition import Structure
from solvers.core.search import Search
from solvers.frame.solver import SearchingSolver
from solvers.frame.starts import dealt_structures
from solvers.heuristics.hexiscale import HierarchicalPartition
from solvers.heuristics.hill_climbing import Polisher
from solvers.heuristics.local_search import ANNEAL, hand_made, improve, own_grids
from solvers.heuristics.shape_program import shape_structures
from solvers.sequence.joint import plan_jointly


@dataclass(frozen=True, slots=True)
class _Lane:
    """How a lane spends its budget."""

    partition: float  # share for HexiScale's partition
    patient: bool  # whether that takes longer until there is a plan
    # First temperature of a round of annealing over that of the round before. Heated as much again, large plans mostly
    # lose what they gained, while small ones get out of where they are stuck.
    cooling: float
    anew: float  # share of annealing's moves that make bundles anew, as chains: dear, and mostly worth it
    for_many: bool  # whether it has starts of its own for many machines
    before_layouts: float  # share before it turns to sequence layouts, where the plan space has any


_SIDE_BY_SIDE = (
    _Lane(partition=0.25, patient=True, cooling=0.6, anew=0.05, for_many=False, before_layouts=0.15),
    _Lane(partition=0.0, patient=False, cooling=1.0, anew=0.0, for_many=True, before_layouts=1.0),
)
_ALONE = _Lane(partition=0.25, patient=False, cooling=1.0, anew=0.03, for_many=True, before_layouts=0.3)
_GRACE_S = 0.5  # how long a lane may take to notice that time is up
_FEW_DEVICES = 16  # GPUs up to which both lanes search replicas, and single TP groups are moved soon enough
_FEW = 64  # GPUs up to which rounding the linear program loses to enumerating by hand
_LARGE = 200  # GPUs beyond which a structure takes too long to price for annealing thousands


def run_lane(search: Search, builder: Builder, lane: _Lane, number: int = 0) -> None:
    """One lane, to the end of its budget. Lanes of other numbers draw otherwise."""
    problem = search.problem
    if problem.space.sequence and lane.before_layouts < 1.0:
        rng = random.Random(search.seed)
        improve(Polisher(search, builder, rng), hand_made(problem, builder), lane.before_layouts)
        plan_jointly(search, rng)
        return
    partitions = find_spec("pymetis") is not None and len(problem.usable_devices) <= _LARGE
    found = partition(search, builder, lane.partition, lane.patient) if partitions else []
    rng = random.Random(search.seed * len(_SIDE_BY_SIDE) + number)
    programs = shape_structures(search) if lane.for_many and len(problem.usable_devices) > _FEW else ()
    # Of many machines hundreds of starts cannot be priced: those that were best there come first.
    many = dealt_structures(problem) if lane.for_many else ()
    starts = (found, many, own_grids(problem, builder), programs, hand_made(problem, builder))
    polisher = Polisher(search, builder, rng)
    anew = lane.anew if len(problem.usable_devices) > _FEW_DEVICES else 0.0
    polisher.finish(improve(polisher, chain.from_iterable(starts), ANNEAL, lane.cooling, anew))


def partition(search: Search, builder: Builder, share: float, patient: bool) -> list[Structure]:
    """What HexiScale's partition finds in a `share` of the budget, drawing as `solver=metis` does; if `patient`, it
    goes on until there is a plan."""
    if share == 0.0:
        return []
    hierarchy = HierarchicalPartition(search, builder, random.Random(search.seed))
    most = search.budget.max_steps
    while True:
        end = 1.0 if patient and search.plan is None else share
        if not search.go_on(end) or (most is not None and search.steps >= int(most * end)):
            break
        search.step()
        hierarchy.iterate()
    return hierarchy.found()


class Portfolio(SearchingSolver):
    """The best plan of all ways; steps are shared equally by the lanes."""

    name = "portfolio"

    def run(self, search: Search, builder: Builder, rng: random.Random) -> None:
        """Run both lanes, at once where the machine can."""
        whole = search.budget
        if whole.max_steps is not None:
            search.budget = replace(whole, max_steps=-(-whole.max_steps // len(_SIDE_BY_SIDE)))
        # Replicas rarely pay beyond a few devices, and their plans take longer to price: there, one lane tries them.
        first = builder if len(search.problem.usable_devices) <= _FEW_DEVICES else Builder(search, replicates=False)
        if _can_fork():
            _side_by_side(search, first)
        else:
            run_lane(search, first, _ALONE if whole.max_steps is None else _SIDE_BY_SIDE[0])
            if whole.max_steps is not None and not search.stopped:
                other = search.beside()
                run_lane(other, Builder(other), _SIDE_BY_SIDE[1], 1)
                _merge(search, other.plan, other.steps, other.nearest, other.trajectory)
        search.budget = whole


def _can_fork() -> bool:
    """Whether a second process can run beside this one: two cores, fork, and no daemon that may not have children."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    return forks and usable_cores() >= len(_SIDE_BY_SIDE) and not multiprocessing.current_process().daemon


def _side_by_side(search: Search, builder: Builder) -> None:
    """Both lanes at once, the second in a forked process; its error is ours."""
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_second_lane, args=(search, stop, there), daemon=True)
    child.start()
    there.close()
    try:
        run_lane(search, builder, _SIDE_BY_SIDE[0])
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


def _second_lane(search: Search, stop: Event, pipe: Connection) -> None:
    """In the other process: run lane 1 until `stop`, and send back what it found."""
    try:
        own = search.beside(lambda _: not stop.is_set())
        builder = Builder(own)  # kept until all is sent: to forget what it knows takes longer than the other lane waits
        run_lane(own, builder, _SIDE_BY_SIDE[1], 1)
        pipe.send((own.plan, own.steps, own.nearest, own.trajectory))
    except BaseException as error:
        pipe.send(error)
        raise
    finally:
        pipe.close()


def _merge(
    search: Search,
    plan: Plan | None,
    steps: int,
    nearest: tuple[Plan, Cost] | None,
    trajectory: Sequence[Point],
) -> None:
    """Take over what another lane found."""
    search.steps += steps
    if plan is not None:
        search.offer(plan)
        search.weave(trajectory)
    elif search.nearest is None:
        search.nearest = nearest
