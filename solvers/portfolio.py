"""`portfolio`, the default: several search strategies within one time limit; the best plan of all is the result.

Two members run side by side, on two cores where there are two. First they price the *fallbacks*, cheap candidates that
guarantee a minimum quality: symmetric grids over all machines, a separate grid for each machine kind, and the
partitions of `solver=shapes`. Pricing them continues past the time limit until there is a plan. Then one member runs
HexiScale's partition, as `solver=hexiscale` would, and anneals its results and the rule-based starts, occasionally
rebuilding pipeline groups as chains (`recreate.py`); the other anneals the rule-based starts and the best fallbacks. On
clusters too large for a complete graph, both begin with the rule-based starts. Where the plan space has sequence
layouts, the first member soon turns to them and chooses between a layout and tensor parallelism stage by stage
(`planning.py`). With a budget in steps both members run even on a single core, so that the plan does not depend on the
number of cores.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice

from hexiopt.solving import Capabilities
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
    """How a member spends its budget."""

    number: int  # members with different numbers draw different random numbers
    partition: float  # share for HexiScale's partition
    until_first_plan: bool  # keep partitioning beyond that share until a feasible plan is found
    # First temperature of an annealing round, relative to that of the round before. Reheating fully undoes what large
    # plans gained, but frees small ones from local optima.
    cooling: float
    recreate_share: float  # of annealing's moves that rebuild groups as chains: expensive, usually worth it
    before_layouts: float  # share of the budget before it turns to sequence layouts, where the plan space has them


_SIDE_BY_SIDE = (
    _Member(0, partition=0.25, until_first_plan=True, cooling=0.6, recreate_share=0.05, before_layouts=0.15),
    _Member(1, partition=0.0, until_first_plan=False, cooling=1.0, recreate_share=0.0, before_layouts=1.0),
)
_ALONE = _Member(0, partition=0.25, until_first_plan=False, cooling=1.0, recreate_share=0.03, before_layouts=0.3)
_FEW_DEVICES = 16  # GPUs up to which both members search replicas, and single TP groups are moved soon enough
_FEW = 64  # GPUs up to which one member prices the fallbacks soon enough, while the other partitions
_LARGE = 200  # GPUs beyond which a partition takes too long to price for annealing thousands
_MANY = 4  # of those for each of the fallbacks' shapes
_BEST = 16  # of the fallbacks' partitions that are annealed


class Portfolio(SearchSolver):
    """The best plan of all members, which share the steps equally."""

    name = "portfolio"
    capabilities = Capabilities(sequence="also", cores=2)

    def search(self, run: Search, rng: random.Random) -> None:
        """Run both members, at once where the machine can."""
        whole, problem = run.budget, run.problem
        if whole.max_steps is not None:
            run.budget = replace(whole, max_steps=-(-whole.max_steps // len(_SIDE_BY_SIDE)))
        # Replicas rarely pay beyond a few devices, and their plans take longer to price: there, one member tries them.
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
    return chain(whole_grids(run.problem), own_grids(run.problem, completer, lambda: _continues(run)))


def _shapes(run: Search) -> Iterator[Partition]:
    """The partitions of `shapes`; on many machines, where hundreds of starts cannot be priced, interleaved with short
    chains.
    """
    many = short_chain_partitions(run.problem)
    for partition in shape_partitions(run, lambda: _continues(run)):
        yield partition
        yield from islice(many, _MANY)
    yield from many


def _continues(run: Search) -> bool:
    """Whether to go on pricing fallbacks: while budget is left, and past the time limit while there is no plan."""
    return run.should_continue() or (run.plan is None and run.budget.max_steps is None and not run.stopped)


def _run(run: Search, completer: PlanCompleter, member: _Member, fallbacks: Iterable[Partition]) -> None:
    """One member, to the end of its budget."""
    problem = run.problem
    cheap = price_fallbacks(run, completer, fallbacks)
    if problem.space.sequence and member.before_layouts < 1.0:
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


def price_fallbacks(run: Search, completer: PlanCompleter, fallbacks: Iterable[Partition]) -> list[Partition]:
    """Price partitions one after another, within the time limit or, while there is no plan, past it.

    Returns the partitions with the best estimates among those that fit, best first.
    """
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
    """The partitions that HexiScale's search finds in a `share` of the whole budget, best first.

    It draws the same random numbers as `solver=hexiscale`. With `until_first_plan` it continues beyond its share until
    there is a plan.
    """
    if share == 0.0:
        return []
    hierarchy, allowance = HierarchicalPartition(run, completer, random.Random(run.seed)), run.until(share)
    while allowance or (until_first_plan and run.plan is None and run.should_continue()):
        run.step()
        hierarchy.iterate()
    return hierarchy.found()
