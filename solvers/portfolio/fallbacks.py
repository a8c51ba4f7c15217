"""Cheap candidates that guarantee a minimum quality, and their pricing."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest

from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition
from solvers.core.search import Allowance, Search
from solvers.frame.ranking import promising_first
from solvers.frame.starts import lockstep_partitions, other_grids, short_chain_partitions, whole_grids
from solvers.heuristics.local_search import own_grids
from solvers.portfolio.members import MOST_ANNEALED

_SHORT = 24  # short chains of every mix among the fallbacks on many GPUs
_SHALLOW, _LOCKSTEP = 200, 12  # data-parallel partitions under ZeRO-2 and 3 on many GPUs: looked at, and fallbacks
_GRIDS = 24  # grids priced on many GPUs
BEST = 16  # of the fallbacks' partitions that are annealed


def ranked_grids(run: Search, completer: PlanCompleter) -> Iterator[Partition]:
    """Grids over all machines, and one for each kind of machine side by side, the most promising first."""

    def should_continue() -> bool:
        return continues(run)

    grids = chain(whole_grids(run.problem), own_grids(run.problem, completer, should_continue))
    yield from promising_first(completer, grids, run.budget.max_steps, should_continue)


def fallbacks_on_many(run: Search, completer: PlanCompleter) -> Iterator[Partition]:
    """Fallbacks on many GPUs, where a separate grid for each kind is made of columns: more only while there is no
    plan."""
    short = short_chain_partitions(run.problem)
    shallow = islice(filter(_is_shallow, lockstep_partitions(run.problem)), _SHALLOW)
    ranked = promising_first(completer, shallow, run.budget.max_steps, lambda: continues(run))
    lockstep = islice(ranked, _LOCKSTEP)
    grids: Iterable[Partition] = whole_grids(run.problem)
    if len(run.problem.usable_devices) <= MOST_ANNEALED:
        every = chain(grids, other_grids(run.problem))
        grids = promising_first(completer, every, run.budget.max_steps, lambda: continues(run))
    for turn in zip_longest(islice(short, _SHORT), lockstep, islice(grids, _GRIDS)):
        yield from filter(None, turn)
    if run.plan is None:
        yield from short
        yield from own_grids(run.problem, completer, lambda: continues(run))


def _is_shallow(partition: Partition) -> bool:
    """Whether no pipeline has two stages."""
    return all(len(group.stages) == 1 for group in partition.pipeline_groups)


def continues(run: Search) -> bool:
    """Whether to go on pricing fallbacks: while budget is left, and past the time limit while there is no plan."""
    return run.should_continue() or continues_without_plan(run)


def continues_without_plan(run: Search) -> bool:
    return run.plan is None and run.budget.max_steps is None and not run.stopped


def price_fallbacks(
    run: Search, completer: PlanCompleter, fallbacks: Iterable[Partition], allowance: Allowance
) -> list[Partition]:
    """Price partitions one after another, each a step, within `allowance` or, while there is no plan, past it.

    Returns the best that fit: first, by their price, those of which no pipeline alone exceeds the best step time, then
    the others by their estimates.
    """
    found: list[tuple[bool, float, int, Partition]] = []
    for number, partition in enumerate(fallbacks):
        if not (allowance or continues_without_plan(run)):
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
    return [partition for *_, partition in sorted(found, key=lambda item: item[:3])[:BEST]]
