"""Members on many GPUs: columns of chains of whole machines, and what they give."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice

from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.columns.column_search import ColumnSearch, column_completer, column_stages
from solvers.completion.completer import PlanCompleter
from solvers.core.like_parts import LikeParts, like_parts
from solvers.core.partition import Partition, partition_of
from solvers.core.search import Allowance, Search
from solvers.core.workers import in_parallel
from solvers.core.zero import LOCKSTEP
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.local_search import known_partitions
from solvers.portfolio.fallbacks import BEST, fallbacks_on_many, price_fallbacks
from solvers.portfolio.few_gpus import anneal_starts, run_on_few
from solvers.portfolio.members import ALONE, MACHINES, MOST_ANNEALED, SEEDS, Member, completer_of, within
from solvers.sequence.planning import plan_jointly

_GENERATED = 0.3  # share for making columns
_EXPLORED = 0.1  # of a lone member, for pricing fallbacks after that, or for one of the like parts
_ELSEWHERE = (0.3, 0.7)  # of the annealings of multisets, those that do not begin at the best plans
COPIED = 0.45  # of the budget, until which one of several like parts is searched, while more columns are made
_OTHER_COLUMNS = 0.3  # of exploring, for each other search by columns
_ON_THOSE_USED = 0.65  # of the budget, until which only the machines of the best chains are searched, if few
_COLUMN_STARTS = 4  # partitions that fallbacks give to columns


def run_columns(run: Search, members: Sequence[Member], others: Budget) -> None:
    """All members on many GPUs, with the budget `others` but for the first. While the first makes columns, the second
    tries others and prices fallbacks; then all go on from the first's columns."""
    completer, layouts = PlanCompleter(run.pricer, replicates=False), run.problem.space.sequence
    of_chains = column_completer(run, replicates=False)
    columns = ColumnSearch(run, of_chains, column_stages(run)[0], random.Random(run.seed * SEEDS))
    parts = None if layouts else _few_like_parts(run)
    explored = (
        partial(_explore, completer=completer, of_chains=of_chains)
        if parts is None
        else partial(of_one_part, parts=parts)
    )
    made = run.until(members[0].before_layouts if layouts else _GENERATED if parts is None else COPIED)
    if len(members) == 1:
        columns.generate(made)
        found = explored(run, allowance=run.until(made.end + _EXPLORED))
    else:
        explore = within(others, lambda other: explored(other, allowance=other.until(made.end)))
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
            return islice(fallbacks_on_many(own, completer), priced, None) if number == len(members) - 1 else ()

        if number % 2 and len(run.problem.usable_devices) <= MOST_ANNEALED:
            best, member = columns.best(BEST), members[number]

            def anneal(own: Search) -> None:
                asked = best and number == 1 and not layouts
                inside = on_those_used(own, best[0], own.until(_ON_THOSE_USED)) if asked else []
                starts = chain(inside[:BEST], best, fallbacks(own))
                anneal_starts(own, completer_of(own, member), member, starts)

            return anneal
        return lambda own: _run_on_columns(own, columns, number, fallbacks(own), completer)

    with in_parallel(run, *(within(others, go_on(number)) for number in range(1, len(members)))) as answers:
        go_on(0)(run)
        answers()


def _few_like_parts(run: Search) -> LikeParts | None:
    """The like parts of the machines, where a part has few GPUs and is priced by our cost model."""
    parts = like_parts(run.problem) if run.our_model is not None else None
    return parts if parts is not None and len(parts.problem.usable_devices) <= MACHINES else None


def of_one_part(run: Search, parts: LikeParts, allowance: Allowance) -> tuple[list[Partition], int]:
    """The last partitions by which the search of one part became better, copied to all; and 0 fallbacks priced."""
    inner = _searched(run, parts.problem, allowance)
    return [parts.copied(partition) for partition in _improvements(inner)], 0


def on_those_used(run: Search, partition: Partition, allowance: Allowance) -> list[Partition]:
    """The last partitions by which the search of the machines that a partition uses became better; none where these
    have more than `MACHINES` GPUs.

    The best chains often leave most machines of a large cluster idle: slow ones, or all but one chain's, where summing
    gradients takes longer than more GPUs save. The others are few enough to look at single GPUs and replicas.
    """
    problem, cluster = run.problem, run.problem.cluster
    used = set(cluster.machine_of[list(partition.devices())].tolist())
    idle = tuple(cluster.machines[m].name for m in problem.usable_by_machine if m not in used)
    few = sum(len(problem.usable_by_machine[m]) for m in used) <= MACHINES
    if not few or run.our_model is None:
        return []
    space = replace(problem.space, exclude=(*problem.space.exclude, *idle))
    inner = _searched(run, problem.replace(space=space), allowance)
    found = _improvements(inner)
    if inner.plan is not None and found:
        run.offer(inner.plan, inner.cost, (found[0], ()))
    return found


def _searched(run: Search, problem: Problem, allowance: Allowance) -> Search:
    """The search of a problem of few GPUs, at its end."""
    inner = run.inside(problem, allowance)
    run_on_few(inner, ALONE, fallbacks=True, grids=True)
    run.steps += inner.total_steps
    return inner


def _improvements(search: Search) -> list[Partition]:
    """The partitions by which it became better, the last first."""
    return [*filter(None, map(partition_of, search.improvements))][::-1]


def _explore(
    run: Search, completer: PlanCompleter, of_chains: PlanCompleter, allowance: Allowance
) -> tuple[list[Partition], int]:
    """The best of columns alone or repeated, of columns in another ZeRO stage and of the fallbacks, and how many of the
    latter were priced.
    """
    best: list[Partition] = []
    stages = column_stages(run)
    others = [(zero_stage, False) for zero_stage in stages[1:]]
    if run.problem.space.uneven_structure and stages[-1] < LOCKSTEP:  # a lone chain, which programs do not see
        others.insert(0, (stages[-1], True))
    for zero_stage, together in others:
        columns = ColumnSearch(run, of_chains, zero_stage, random.Random(run.seed), together=together)
        columns.generate(allowance.part(_OTHER_COLUMNS))
        best += columns.best(1)
    numbers = count()
    fallbacks = (partition for partition, _ in zip(fallbacks_on_many(run, completer), numbers, strict=False))
    best += price_fallbacks(run, completer, fallbacks, allowance)[:_COLUMN_STARTS]
    return best, next(numbers)


def _run_on_columns(
    run: Search, columns: ColumnSearch, number: int, fallbacks: Iterable[Partition], completer: PlanCompleter
) -> None:
    """One member, from columns that are made; it prices `fallbacks` once columns have given what they have."""
    columns.go_on(run, random.Random(run.seed * SEEDS + number))
    columns.restricted_master(run.until(0.75), _ELSEWHERE[number % 2])
    columns.variants(5, run.until(0.8))
    price_fallbacks(run, completer, fallbacks, run.until(0.93))
    columns.anneal(run.until(0.93))
    HillClimber(run, columns.completer, columns.rng).finish(columns.best(5))
