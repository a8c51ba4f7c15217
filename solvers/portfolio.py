"""`portfolio`, the default: several search strategies within one time limit; the best plan of all is the result.

Members run side by side, one for each core, and exchange what they find. Up to `_MACHINES` GPUs the first, and every
second after it, runs HexiScale's partition, as `solver=hexiscale` would, and anneals its results and the rule-based
starts, occasionally rebuilding pipeline groups as chains (`recreate.py`); the others try a few chains of whole machines
as columns (`columns/`), anneal arrangements of such chains (`columns/arrangement_search.py`), and then the best of
these, the rule-based starts and the best *fallbacks*. These are cheap candidates that guarantee a minimum quality:
symmetric grids over all machines, a separate grid for each machine kind, on up to 16 GPUs cuts of ranked devices into
device groups, as `solver=metis_atc24` begins with, and the partitions of `solver=shapes`. Those whose estimates promise
most are priced first (`frame/ranking.py`), and pricing continues past the time limit until there is a plan. Where a
plan is known, all members instead anneal arrangements of chains near it (`columns/near_known.py`), and then the best of
these and the plan itself. On more GPUs all members search for chains of whole machines, under different ZeRO stages and
random numbers, and anneal the best; the second also prices the fallbacks and, where the machines are copies of a few
(`core/like_parts.py`), first searches one part. Where the plan space has sequence layouts, the first member soon turns
to them and chooses between a layout and tensor parallelism stage by stage (`planning.py`). With a budget in steps there
are two members whatever the number of cores, so that the plan does not depend on it.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, count, islice, zip_longest
from typing import Any

from hexiopt.solving import Budget, Capabilities
from solvers.columns.arrangement_search import ArrangementSearch
from solvers.columns.column_search import ColumnSearch, column_stages
from solvers.columns.near_known import NearKnown
from solvers.completion.completer import PlanCompleter
from solvers.core.like_parts import LikeParts, like_parts
from solvers.core.partition import Partition, partition_of
from solvers.core.search import Allowance, Search
from solvers.core.workers import in_parallel, num_processes
from solvers.frame.ranking import promising_first
from solvers.frame.solver import SearchSolver
from solvers.frame.starts import lockstep_partitions, short_chain_partitions, whole_grids
from solvers.heuristics.configuration_program import shape_partitions
from solvers.heuristics.device_groups.group_cuts import cut_partitions
from solvers.heuristics.device_groups.stage_estimates import StageEstimates
from solvers.heuristics.hexiscale import HierarchicalPartition
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.local_search import ANNEAL, improve, known_partitions, own_grids, without_grids
from solvers.proof.gaps import checked_gap, prove, share_for_proof
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
    arranged: float  # share for arrangements of chains of whole machines, which give starts


_FIRST = _Member(0, 0.25, until_first_plan=True, cooling=0.6, recreate_share=0.05, before_layouts=0.15, arranged=0.0)
_SECOND = _Member(1, 0.0, until_first_plan=False, cooling=1.0, recreate_share=0.05, before_layouts=1.0, arranged=0.2)
_ALONE = _Member(0, 0.25, until_first_plan=False, cooling=1.0, recreate_share=0.03, before_layouts=0.3, arranged=0.1)
_KNOWN_ARRANGED, _KNOWN_RECREATED = 0.5, 0.25  # where a plan is known: both lead away from it soonest
_LEAST_ARRANGED_S = 0.4  # what those near a known plan take to give starts
_GENERATED = 0.3  # share for making columns
_EXPLORED = 0.1  # of a lone member, for pricing fallbacks after that, or for one of the like parts
_ELSEWHERE = (0.3, 0.7)  # of the annealings of multisets, those that do not begin at the best plans
_COPIED = 0.45  # of the budget, until which one of several like parts is searched, while more columns are made
_OTHER_STAGE = 0.3  # of exploring, for columns in another ZeRO stage
_SEEDS = 2  # factor of the seed, to which a member's number is added
_COUNTED = 2  # members where steps are limited
_FEW_DEVICES = 16  # GPUs up to which all members search replicas, and single TP groups are moved soon enough
_FEW = 64  # GPUs up to which the second member prices all fallbacks soon enough, while the first partitions
_MACHINES = 100  # GPUs beyond which counts of chains matter more than parts of machines and replicas
_SOME = 300  # GPUs beyond which annealing other partitions finds little that columns do not
_SHORT = 24  # short chains of every mix among the fallbacks on many GPUs
_SHALLOW, _LOCKSTEP = 200, 12  # data-parallel partitions under ZeRO-2 and 3 on many GPUs: looked at, and fallbacks
_CUTTING, _CUTS = 0.15, 200  # of the budget for cutting ranked devices, and most such cuts among the fallbacks
_MANY = 4  # of those for each of the fallbacks' shapes
_BEST = 16  # of the fallbacks' partitions that are annealed
_COLUMNS_S, _COLUMNS_STEPS = 0.4, 60  # what columns need before they give starts
_MOST_FOR_COLUMNS = 0.4  # of a small budget
_LEAST_FOR_COLUMNS = 20  # steps; programs take some before there is a plan
_LEAST_ARRANGED = 40  # steps that arrangements need before they give starts
_CHAIN_STARTS = 4  # partitions that columns, and arrangements, give to annealing
_COLUMN_STARTS = 4  # partitions that fallbacks give to columns


@dataclass(frozen=True)
class Portfolio(SearchSolver):
    """The best plan of all members, which share the steps equally.

    `gap`: stop at a plan proved to be within this fraction of the best; 0 stops at none but a proved optimum.
    """

    name = "portfolio"
    capabilities = Capabilities(sequence="also", cores="all")
    gap: float = 0.0

    def __post_init__(self) -> None:
        checked_gap(self.gap)

    def search(self, run: Search, rng: random.Random) -> None:
        """Run all members, and then prove how good the plan is where the problem is small enough (`solvers/proof/`)."""
        whole, proving = run.budget, share_for_proof(run)
        run.enough_gap = self.gap
        run.budget = whole.part(1 - proving)
        self.find(run)
        run.budget = whole
        if proving and run.should_continue():
            prove(run)

    def find(self, run: Search) -> None:
        """Run all members, at once where the machine can."""
        whole, problem, num_members = run.budget, run.problem, num_processes()
        others = whole
        if whole.max_steps is not None:
            num_members = min(_COUNTED, whole.max_steps)
            others = replace(whole, max_steps=max(1, whole.max_steps // num_members))
            run.budget = replace(whole, max_steps=-(-whole.max_steps // num_members))
        first = _ALONE if num_members == 1 else _FIRST
        members = [first, *(replace((_FIRST, _SECOND)[k % 2], number=k) for k in range(1, num_members))]
        many = len(problem.usable_devices) > _MACHINES
        if many and not (problem.space.sequence and num_members == 1):
            _run_columns(run, members, others)
        else:
            grids, near = len(problem.usable_devices) <= _FEW, _begins_near(run)
            works = (partial(_run, member=m, fallbacks=m.number == 1, grids=grids and m.number == 1) for m in members)
            _, *rest = (partial(_run_near, member=m) for m in members) if near else works
            with in_parallel(run, *(_within(others, work) for work in rest)) as answers:
                if near:
                    _run_near(run, members[0])
                else:
                    _run(run, members[0], fallbacks=num_members == 1, grids=num_members == 1 or not grids)
                answers()
        run.budget = whole
        run.count_others()


def _begins_near(run: Search) -> bool:
    """Whether members on few GPUs begin near a known plan."""
    known = run.start is not None and run.plan is not None  # one that fits: else fallbacks guarantee a plan
    return known and len(run.problem.usable_by_machine) > 1 and not run.problem.space.sequence


def _run_near(run: Search, member: _Member) -> None:
    """One member on few GPUs, from a known plan and arrangements of chains near it, to the end of its budget."""
    assert run.start is not None, "as _begins_near says"
    completer, rng = _completer(run, member), random.Random(run.seed * _SEEDS + member.number)
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


def _within(budget: Budget, work: Callable[[Search], Any]) -> Callable[[Search], Any]:
    """`work` with a budget of its own."""

    def limited(own: Search) -> Any:
        own.budget = budget
        return work(own)

    return limited


def _run(run: Search, member: _Member, *, fallbacks: bool, grids: bool) -> None:
    """One member on few GPUs, to the end of its budget; whether it prices the fallbacks, and the grids among them."""
    completer = _completer(run, member)
    cheap = chain(_grids(run, completer) if grids else (), _shapes(run) if fallbacks else ())
    _run_annealing(run, completer, member, cheap)


def _completer(run: Search, member: _Member) -> PlanCompleter:
    # Replicas rarely pay beyond a few devices, and their plans take longer to price: there, every second tries them.
    few = len(run.problem.usable_devices) <= _FEW_DEVICES
    return PlanCompleter(run.pricer, replicates=few or member.number % 2 == 1)


def _grids(run: Search, completer: PlanCompleter) -> Iterator[Partition]:
    def should_continue() -> bool:
        return _continues(run)

    grids: Iterable[Partition] = chain(whole_grids(run.problem), own_grids(run.problem, completer, should_continue))
    if len(run.problem.usable_devices) <= _FEW_DEVICES:  # beyond, replicas crowd out starts that lead further
        cutting, rng = run.allowance(_CUTTING), random.Random(run.seed)
        cuts = cut_partitions(StageEstimates(run.pricer), rng, lambda share: bool(cutting.up_to(share)))
        grids = chain(grids, islice(cuts, _CUTS))
    for grid, _ in promising_first(completer, grids, run.budget.max_steps, should_continue):
        yield grid


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
    return run.should_continue() or _continues_without_plan(run)


def _continues_without_plan(run: Search) -> bool:
    return run.plan is None and run.budget.max_steps is None and not run.stopped


def _run_columns(run: Search, members: Sequence[_Member], others: Budget) -> None:
    """All members on many GPUs, with the budget `others` but for the first. While the first makes columns, the second
    tries others and prices fallbacks; then all go on from the first's columns."""
    completer, layouts = PlanCompleter(run.pricer, replicates=False), run.problem.space.sequence
    columns = ColumnSearch(run, completer, column_stages(run)[0], random.Random(run.seed * _SEEDS))
    parts = None if layouts else _few_like_parts(run)
    explored = partial(_explore, completer=completer) if parts is None else partial(_of_one_part, parts=parts)
    made = run.until(members[0].before_layouts if layouts else _GENERATED if parts is None else _COPIED)
    if len(members) == 1:
        columns.generate(made)
        found = explored(run, allowance=run.until(made.end + _EXPLORED))
    else:
        explore = _within(others, lambda other: explored(other, allowance=other.until(made.end)))
        with in_parallel(run, explore) as answers:
            columns.generate(made)
            [found] = answers(at_once=run.budget.max_steps is None)
    partitions, priced = found or ((), 0)
    for partition in chain(known_partitions(run), partitions):
        columns.price(partition)

    def go_on(number: int) -> Callable[[Search], None]:
        if layouts and number == 0:
            return lambda own: plan_jointly(own, random.Random(own.seed))

        def fallbacks(own: Search) -> Iterable[Partition]:
            """What is left of them; the last member prices it."""
            return islice(_many_fallbacks(own, completer), priced, None) if number == len(members) - 1 else ()

        if number % 2 and len(run.problem.usable_devices) <= _SOME:
            best, member = columns.best(_BEST), members[number]
            return lambda own: _anneal(own, _completer(own, member), member, chain(best, fallbacks(own)))
        return lambda own: _run_on_columns(own, columns, number, fallbacks(own))

    with in_parallel(run, *(_within(others, go_on(number)) for number in range(1, len(members)))) as answers:
        go_on(0)(run)
        answers()


def _few_like_parts(run: Search) -> LikeParts | None:
    """The like parts of the machines, where a part has few GPUs and is priced by our cost model."""
    parts = like_parts(run.problem) if run.pricer.features.exact is not None else None
    return parts if parts is not None and len(parts.problem.usable_devices) <= _MACHINES else None


def _of_one_part(run: Search, parts: LikeParts, allowance: Allowance) -> tuple[list[Partition], int]:
    """The last partitions by which the search of one part became better, copied to all; and 0 fallbacks priced."""
    inner = run.inside(parts.problem, allowance)
    _run(inner, _ALONE, fallbacks=True, grids=True)
    run.steps += inner.total_steps
    found = filter(None, map(partition_of, inner.improvements))
    return [parts.copied(partition) for partition in found][::-1], 0


def _explore(run: Search, completer: PlanCompleter, allowance: Allowance) -> tuple[list[Partition], int]:
    """The best of columns in another ZeRO stage and of the fallbacks, and how many of the latter were priced."""
    best: list[Partition] = []
    for zero_stage in column_stages(run)[1:]:
        columns = ColumnSearch(run, completer, zero_stage, random.Random(run.seed))
        columns.generate(allowance.part(_OTHER_STAGE))
        best += columns.best(1)
    numbers = count()
    fallbacks = (partition for partition, _ in zip(_many_fallbacks(run, completer), numbers, strict=False))
    best += price_fallbacks(run, completer, fallbacks, allowance)[:_COLUMN_STARTS]
    return best, next(numbers)


def _run_on_columns(run: Search, columns: ColumnSearch, number: int, fallbacks: Iterable[Partition]) -> None:
    """One member, from columns that are made; it prices `fallbacks` once columns have given what they have."""
    columns.go_on(run, random.Random(run.seed * _SEEDS + number))
    columns.restricted_master(run.until(0.75), _ELSEWHERE[number % 2])
    columns.variants(5, run.until(0.8))
    price_fallbacks(run, columns.completer, fallbacks, run.until(0.93))
    columns.anneal(run.until(0.93))
    HillClimber(run, columns.completer, columns.rng).finish(columns.best(5))


def _many_fallbacks(run: Search, completer: PlanCompleter) -> Iterator[Partition]:
    """Fallbacks on many GPUs, where a separate grid for each kind is made of columns: more only while there is no
    plan."""
    short = short_chain_partitions(run.problem)
    shallow = islice(filter(_is_shallow, lockstep_partitions(run.problem)), _SHALLOW)
    ranked = promising_first(completer, shallow, run.budget.max_steps, lambda: _continues(run))
    lockstep = (partition for partition, _ in islice(ranked, _LOCKSTEP))
    shapes = shape_partitions(run, lambda: _continues(run))
    for turn in zip_longest(islice(short, _SHORT), shapes, lockstep, whole_grids(run.problem)):
        yield from filter(None, turn)
    if run.plan is None:
        yield from short
        yield from own_grids(run.problem, completer, lambda: _continues(run))


def _is_shallow(partition: Partition) -> bool:
    """Whether no pipeline has two stages."""
    return all(len(group.stages) == 1 for group in partition.pipeline_groups)


def _run_annealing(run: Search, completer: PlanCompleter, member: _Member, fallbacks: Iterable[Partition]) -> None:
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
    _anneal(run, completer, member, chain(found, cheap, of_kinds))


def _of_chains(run: Search, completer: PlanCompleter, member: _Member) -> list[Partition]:
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


def _anneal(run: Search, completer: PlanCompleter, member: _Member, starts: Iterable[Partition]) -> None:
    """Anneal `starts`, chains and replicas, to the end of the budget."""
    problem, rng = run.problem, random.Random(run.seed * _SEEDS + member.number)
    climber = HillClimber(run, completer, rng)
    recreate_share = member.recreate_share if len(problem.usable_devices) > _FEW_DEVICES else 0.0
    more = without_grids(problem, completer)
    climber.finish(improve(climber, starts, more, run.until(ANNEAL), member.cooling, recreate_share))


def price_fallbacks(
    run: Search, completer: PlanCompleter, fallbacks: Iterable[Partition], allowance: Allowance
) -> list[Partition]:
    """Price partitions one after another, each a step, within `allowance` or, while there is no plan, past it.

    Returns the best that fit: first, by their price, those of which no pipeline alone exceeds the best step time, then
    the others by their estimates.
    """
    found: list[tuple[bool, float, int, Partition]] = []
    for number, partition in enumerate(fallbacks):
        if not (allowance or _continues_without_plan(run)):
            break
        with run.tallied("fall_back") as tally:
            tally.proposed += 1
            tally.valid += 1
            completed = completer.allowed(partition) and completer.complete(partition)
            if not completed:
                tally.unfit += 1
                continue
            priced = completer.price(completed, run.best_s)
            if priced is not None:
                run.step()
                tally.priced += 1
            if priced is None or run.offer(priced.plan, priced.cost, (partition, ())).fits:
                seconds = completed.estimate_s if priced is None else priced.cost.step_time_s
                found.append((priced is None, seconds, number, partition))
    return [partition for *_, partition in sorted(found, key=lambda item: item[:3])[:_BEST]]


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
