"""`portfolio`, the default: several ways of finding a plan within one time limit, and the best plan of all.

Two lanes work side by side, on two cores where there are two. Before anything else they price the *floor*, cheap
candidates that a plan of the portfolio is never behind: symmetric grids over all machines, a grid of each kind's own,
and what `solver=shapes` gives; past the time limit too, until there is a plan. Then one lane continues with HexiScale's
partition, as `solver=hexiscale` would, and anneals what that finds and what people build by hand, now and then with
bundles made anew (`recreate.py`); the other anneals the latter, the best of the floor, and what chains of whole
machines give (`columns/`). On many GPUs both search these chains, one for plans in ZeRO-1, the other in ZeRO-0, and
anneal the best, the floor included; they price it after the first columns, which have a plan sooner. Where the plan
space has sequence layouts, the first lane soon turns to them instead, and decides stage by stage between these and
tensor parallelism (`planning.py`). With a budget in steps both lanes run wherever they are, so that the plan does not
depend on the cores.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice

from hexiopt.solving import Capabilities
from solvers.columns.column_search import ColumnSearch, column_stages
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition
from solvers.core.search import Search
from solvers.core.workers import has_second_core, in_parallel
from solvers.frame.solver import SearchSolver
from solvers.frame.starts import short_chain_partitions, whole_grids
from solvers.heuristics.configuration_program import shape_partitions
from solvers.heuristics.hexiscale import HierarchicalPartition
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.local_search import ANNEAL, improve, own_grids, without_grids
from solvers.sequence.planning import plan_jointly


@dataclass(frozen=True, slots=True)
class _Member:
    """How a lane spends its budget."""

    number: int  # lanes of other numbers draw otherwise
    partition: float  # share for HexiScale's partition
    until_first_plan: bool  # whether that takes longer until there is a plan
    # First temperature of a round of annealing over that of the round before. Heated as much again, large plans mostly
    # lose what they gained, while small ones get out of where they are stuck.
    cooling: float
    recreate_share: float  # of annealing's moves, those that recreate bundles as chains: dear, and mostly worth it
    before_layouts: float  # share before it turns to sequence layouts, where the plan space has any


_SIDE_BY_SIDE = (
    _Member(0, partition=0.25, until_first_plan=True, cooling=0.6, recreate_share=0.05, before_layouts=0.15),
    _Member(1, partition=0.0, until_first_plan=False, cooling=1.0, recreate_share=0.0, before_layouts=1.0),
)
_ALONE = _Member(0, partition=0.25, until_first_plan=False, cooling=1.0, recreate_share=0.03, before_layouts=0.3)
_FEW_DEVICES = 16  # GPUs up to which both lanes search replicas, and single TP groups are moved soon enough
_FEW = 64  # GPUs up to which one lane prices the floor soon enough, while the other partitions
_LARGE = 200  # GPUs beyond which a structure takes too long to price for annealing thousands
_MANY = 4  # of those for each of the floor's shapes
_MACHINES = 100  # GPUs beyond which counts of chains matter more than parts of machines and replicas
_COLUMNS = 0.08  # share for columns where they only give starts
_COLUMN_STARTS = 4  # of these
_HOPE = 0.02  # of the best step time: how far below it the program must end to be worth all the time
_BEST = 16  # of the floor's structures that are annealed


class Portfolio(SearchSolver):
    """The best plan of all ways; steps are shared equally by the lanes."""

    name = "portfolio"
    capabilities = Capabilities(sequence="also", cores=2)

    def search(self, run: Search, rng: random.Random) -> None:
        """Run both lanes, at once where the machine can."""
        whole, problem = run.budget, run.problem
        if whole.max_steps is not None:
            run.budget = replace(whole, max_steps=-(-whole.max_steps // len(_SIDE_BY_SIDE)))
        # Replicas rarely pay beyond a few devices, and their plans take longer to price: there, one lane tries them.
        first = PlanCompleter(run.pricer, replicates=len(problem.usable_devices) <= _FEW_DEVICES)
        if whole.max_steps is None and not has_second_core():
            _run(run, first, _ALONE, chain(_grids(run, first), _shapes(run)))
        else:
            few = len(problem.usable_devices) <= _FEW
            with in_parallel(run, lambda other: _second(other, with_grids=few)) as answer:
                _run(run, first, _SIDE_BY_SIDE[0], () if few else _grids(run, first))
                answer()
        run.budget = whole


def _second(run: Search, *, with_grids: bool) -> None:
    completer = PlanCompleter(run.pricer)
    grids = _grids(run, completer) if with_grids else ()
    _run(run, completer, _SIDE_BY_SIDE[1], chain(grids, _shapes(run)))


def _grids(run: Search, completer: PlanCompleter) -> Iterator[Partition]:
    if len(run.problem.usable_devices) > _LARGE:  # grids of a kind's own are columns
        return whole_grids(run.problem)
    return chain(whole_grids(run.problem), own_grids(run.problem, completer, lambda: _continues(run)))


def _shapes(run: Search) -> Iterator[Partition]:
    """What `shapes` gives; between, what was best on many machines, of which hundreds of starts cannot be priced."""
    many = short_chain_partitions(run.problem)
    for partition in shape_partitions(run, lambda: _continues(run)):
        yield partition
        yield from islice(many, _MANY)
    yield from many


def _continues(run: Search) -> bool:
    """Whether the floor is priced on: as long as budget is left, and past the time limit while there is no plan."""
    return run.should_continue() or (run.plan is None and run.budget.max_steps is None and not run.stopped)


def _run(run: Search, completer: PlanCompleter, member: _Member, fallbacks: Iterable[Partition]) -> None:
    """One lane, to the end of its budget."""
    problem = run.problem
    layouts = problem.space.sequence and member.before_layouts < 1.0
    if len(problem.usable_devices) > _MACHINES and not layouts:
        _run_columns(run, completer, member, fallbacks)
        return
    own = list[Partition]()
    if member.number and problem.usable_by_machine.keys() != {0}:
        columns = ColumnSearch(run, completer, column_stages(run)[0], random.Random(run.seed))
        columns.generate(run.until(_COLUMNS))
        own = columns.best(_COLUMN_STARTS)
    cheap = [*own, *price_fallbacks(run, completer, fallbacks)]
    if layouts:
        rng = random.Random(run.seed)
        starts = chain(cheap, own_grids(problem, completer), without_grids(problem, completer))
        improve(HillClimber(run, completer, rng), starts, run.until(member.before_layouts))
        plan_jointly(run, rng)
        return
    partitions = find_spec("pymetis") is not None and len(problem.usable_devices) <= _LARGE
    found = hexiscale_partitions(run, completer, member.partition, member.until_first_plan) if partitions else []
    rng = random.Random(run.seed * len(_SIDE_BY_SIDE) + member.number)
    grids = () if cheap and len(problem.usable_devices) > _FEW else own_grids(problem, completer)
    starts = chain(found, cheap, grids, without_grids(problem, completer))
    climber = HillClimber(run, completer, rng)
    recreate_share = member.recreate_share if len(problem.usable_devices) > _FEW_DEVICES else 0.0
    climber.finish(improve(climber, starts, run.until(ANNEAL), member.cooling, recreate_share))


def _run_columns(run: Search, completer: PlanCompleter, member: _Member, fallbacks: Iterable[Partition]) -> None:
    """One lane on many GPUs, to the end of its budget."""
    rng = random.Random(run.seed * len(_SIDE_BY_SIDE) + member.number)
    stages = column_stages(run)
    columns = ColumnSearch(run, completer, stages[member.number % len(stages)], rng)
    columns.generate(run.until(0.3))
    # They take seconds, so they wait for columns that have run out of hope.
    hopeful = run.plan is not None and columns.hoped_s < (1 - _HOPE) * run.best_s
    cheap = [] if hopeful else price_fallbacks(run, completer, fallbacks)
    columns.restricted_master(run.until(0.5 if len(run.problem.usable_devices) < 300 else 0.75))
    columns.variants(5, run.until(0.8))
    for partition in cheap[:_COLUMN_STARTS]:
        columns.price(partition)
    columns.anneal(run.until(0.93))
    HillClimber(run, completer, rng).finish(columns.best(5))


def price_fallbacks(run: Search, completer: PlanCompleter, fallbacks: Iterable[Partition]) -> list[Partition]:
    """Price structures one after another: all of them within the time limit, and past it until there is a plan. Of
    those that fit, the best, best first."""
    found: list[tuple[float, int, Partition]] = []
    for number, partition in enumerate(fallbacks):
        if not _continues(run):
            break
        run.step()
        completed = completer.allowed(partition) and completer.complete(partition)
        if not completed:
            continue
        priced = completer.price(completed, run.best_s)
        if priced is None:
            found.append((completed.estimate_s, number, partition))
            continue
        cost = run.offer(priced.plan, priced.cost)
        if cost.fits:
            found.append((completed.estimate_s, number, partition))
    return [partition for _, _, partition in sorted(found, key=lambda item: item[:2])[:_BEST]]


def hexiscale_partitions(
    run: Search, completer: PlanCompleter, share: float, until_first_plan: bool
) -> list[Partition]:
    """What HexiScale's partition finds in a `share` of the whole budget, drawing as `solver=hexiscale` does, or until
    there is a plan."""
    if share == 0.0:
        return []
    hierarchy, allowance = HierarchicalPartition(run, completer, random.Random(run.seed)), run.until(share)
    while allowance or (until_first_plan and run.plan is None and run.should_continue()):
        run.step()
        hierarchy.iterate()
    return hierarchy.found()
