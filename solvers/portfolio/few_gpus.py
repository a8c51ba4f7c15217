"""Members on few GPUs: HexiScale's partition, chains of whole machines and fallbacks, all annealed; near a known plan,
arrangements of chains."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain

from hexiopt.solving import Budget
from solvers.columns.arrangement_search import ArrangementSearch
from solvers.columns.column_search import ColumnSearch, column_stages
from solvers.columns.near_known import NearKnown
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition
from solvers.core.search import Search
from solvers.frame.starts import short_chain_partitions
from solvers.heuristics.hexiscale import HierarchicalPartition
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.local_search import ANNEAL, improve, known_partitions, own_grids, without_grids
from solvers.portfolio.fallbacks import price_fallbacks, ranked_grids
from solvers.portfolio.members import FEW_DEVICES, SEEDS, Member, completer_of
from solvers.sequence.planning import plan_jointly

_FEW = 64  # GPUs up to which the second member prices all fallbacks soon enough, while the first partitions
_NEAR = 300  # GPUs up to which arrangements near a known plan give starts soon enough
_KNOWN_ARRANGED, _KNOWN_RECREATED = 0.5, 0.25  # where a plan is known: both lead away from it soonest
_LEAST_ARRANGED_S = 0.4  # what those near a known plan take to give starts
_COLUMNS_S, _COLUMNS_STEPS = 0.4, 60  # what columns need before they give starts
_MOST_FOR_COLUMNS = 0.4  # of a small budget
_LEAST_FOR_COLUMNS = 20  # steps; programs take some before there is a plan
_LEAST_ARRANGED = 40  # steps that arrangements need before they give starts
_CHAIN_STARTS = 4  # partitions that columns, and arrangements, give to annealing


def works_on_few(run: Search, members: Sequence[Member]) -> list[Callable[[Search], None]]:
    """What each member does. The second, or the only one, prices the fallbacks; the grids among them the first, where
    there are too many GPUs."""
    if begins_near(run):
        return [partial(_run_near, member=member) for member in members]
    pricing = min(1, len(members) - 1)
    grids = pricing if len(run.problem.usable_devices) <= _FEW else 0
    return [partial(run_on_few, member=m, fallbacks=m.number == pricing, grids=m.number == grids) for m in members]


def run_on_few(run: Search, member: Member, *, fallbacks: bool, grids: bool) -> None:
    """One member on few GPUs, to the end of its budget; whether it prices the fallbacks, and the grids among them."""
    completer = completer_of(run, member)
    short = short_chain_partitions(run.problem) if fallbacks else ()
    cheap = chain(ranked_grids(run, completer) if grids else (), short)
    _run_annealing(run, completer, member, cheap)


def _run_annealing(run: Search, completer: PlanCompleter, member: Member, fallbacks: Iterable[Partition]) -> None:
    """A member on few GPUs, or one that turns to sequence layouts."""
    problem = run.problem
    own = _of_chains(run, completer, member) if member.arranged and len(problem.usable_by_machine) > 1 else []
    cheap = [*own, *price_fallbacks(run, completer, fallbacks, run.until())]
    if problem.space.sequence and member.before_layouts < 1.0:
        rng = random.Random(run.seed)
        starts = chain(cheap, own_grids(problem, completer))
        climber = HillClimber(run, completer, rng)
        improve(climber, starts, without_grids(problem, completer), run.until(member.before_layouts))
        plan_jointly(run, rng)
        return
    partitions = find_spec("pymetis") is not None
    found = hexiscale_partitions(run, completer, member.partition, member.until_first_plan) if partitions else []
    grids = not (found or cheap) or len(problem.usable_devices) <= _FEW
    of_kinds = own_grids(problem, completer) if grids else ()
    anneal_starts(run, completer, member, chain(found, cheap, of_kinds))


def _of_chains(run: Search, completer: PlanCompleter, member: Member) -> list[Partition]:
    """Starts of chains of whole machines: from a few columns, which take the fewest steps, and from arrangements."""
    budget, stage = run.budget, column_stages(run)[0]
    of_columns, of_arrangements = _share(budget, _COLUMNS_S, _COLUMNS_STEPS), member.arranged
    found: list[Partition] = []
    if of_columns:
        columns = ColumnSearch(run, completer, stage, random.Random(run.seed))
        columns.generate(run.until(of_columns))
        found = columns.best(_CHAIN_STARTS)
    if budget.max_steps is None or of_arrangements * budget.max_steps >= _LEAST_ARRANGED:
        chains = ArrangementSearch(run, completer, stage, random.Random(run.seed))
        found += chains.search(run.until(of_columns + of_arrangements), _CHAIN_STARTS)
    return found


def _share(budget: Budget, seconds: float, steps: int) -> float:
    """The share of a budget that takes so long, as far as a small one allows; 0 where that is too little."""
    if budget.max_steps is None:
        return min(_MOST_FOR_COLUMNS, seconds / budget.time_limit_s)
    share = min(_MOST_FOR_COLUMNS, steps / budget.max_steps)
    return share if share * budget.max_steps >= _LEAST_FOR_COLUMNS else 0.0


def hexiscale_partitions(
    run: Search, completer: PlanCompleter, share: float, until_first_plan: bool
) -> list[Partition]:
    """The partitions that HexiScale's search finds in a `share` of the whole budget, best first.

    It draws the same random numbers as `solver=hexiscale`. With `until_first_plan` it continues beyond its share until
    there is a plan.
    """
    if share == 0.0:
        return []
    hierarchy, allowance = HierarchicalPartition(run, completer, random.Random(run.seed)), run.until(share)
    for partition in known_partitions(run):
        hierarchy.begin_at(partition)
    while allowance or (until_first_plan and run.plan is None and run.should_continue()):
        run.step()
        with run.tallied("partition_graph") as tally:
            tally.proposed += 1
            tally.valid += 1
            hierarchy.iterate()
    return hierarchy.found()


def anneal_starts(run: Search, completer: PlanCompleter, member: Member, starts: Iterable[Partition]) -> None:
    """Anneal `starts`, chains and replicas, to the end of the budget."""
    problem, rng = run.problem, random.Random(run.seed * SEEDS + member.number)
    climber = HillClimber(run, completer, rng)
    recreate_share = member.recreate_share if len(problem.usable_devices) > FEW_DEVICES else 0.0
    more = without_grids(problem, completer)
    climber.finish(improve(climber, starts, more, run.until(ANNEAL), member.cooling, recreate_share))


def begins_near(run: Search) -> bool:
    """Whether members begin near a known plan."""
    known = run.start is not None and run.plan is not None  # one that fits: else fallbacks guarantee a plan
    few = len(run.problem.usable_devices) <= _NEAR and not run.problem.space.sequence
    return known and few and len(run.problem.usable_by_machine) > 1


def _run_near(run: Search, member: Member) -> None:
    """One member on few GPUs, from a known plan and arrangements of chains near it, to the end of its budget."""
    assert run.start is not None, "as begins_near says"
    completer, rng = completer_of(run, member), random.Random(run.seed * SEEDS + member.number)
    starts: list[Partition] = []
    if _enough_for_arrangements(run.budget):
        plain = PlanCompleter(run.pricer, replicates=False)
        chains = NearKnown(run, plain, column_stages(run)[0], rng, run.start)
        starts = chains.search(run.until(_KNOWN_ARRANGED), _CHAIN_STARTS)
    recreate_share = _KNOWN_RECREATED if starts else member.recreate_share
    climber = HillClimber(run, completer, rng)
    climber.finish(improve(climber, starts, (), run.until(ANNEAL), member.cooling, recreate_share))


def _enough_for_arrangements(budget: Budget) -> bool:
    """Whether the share of a budget for arrangements near a known plan gives starts; smaller ones stay at the plan."""
    if budget.max_steps is not None:
        return _KNOWN_ARRANGED * budget.max_steps >= _LEAST_ARRANGED
    return _KNOWN_ARRANGED * budget.time_limit_s >= _LEAST_ARRANGED_S
