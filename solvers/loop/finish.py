"""What the arrays do not say, on the best candidates: other schedules, interleaved stages, deeper sharding; then single
layers, micro-batches and recompute policies of the best plans, by the exact price."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from solvers.completion.completer import PlanCompleter
from solvers.completion.experts import first_plans
from solvers.core.interleaving import may_interleave
from solvers.core.partition import Partition
from solvers.core.search import Allowance, Search
from solvers.core.zero import LOCKSTEP, sharding_groups
from solvers.frame.solver import offer_partition
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.local_search import improve, without_grids

_FEW = 64  # GPUs up to which replicas, interleaving and lockstep are annealed
_ANNEALED, _SETTLED = 0.8, 0.5  # most of what is left of the budget, before climbing
_CHUNKS = (2, 3, 4, 6)  # layer ranges a stage that are tried


def variants(problem: Problem, partition: Partition) -> Iterator[Partition]:
    """`partition` in every schedule and with every sharding that it may have."""
    deep = max(len(group.stages) for group in partition.pipeline_groups) > 1
    for schedule in problem.schedules:
        if schedule.chunked and may_interleave(problem) and deep:
            yield from (replace(partition, schedule=schedule, chunks=chunks) for chunks in _CHUNKS)
        elif not schedule.chunked:
            yield replace(partition, schedule=schedule, chunks=1)
    for stage in sharding_stages(problem.workload):
        if stage < LOCKSTEP or len(partition.pipeline_groups) == 1:
            yield from (replace(partition, sharding=stage, groups=way) for way in sharding_groups(problem, stage))


def settle(
    run: Search, completer: PlanCompleter, candidates: Iterable[Partition], allowance: Allowance
) -> list[Partition]:
    """Price the candidates and their variants, each a step; the best of each, best first."""
    best: list[tuple[float, int, Partition]] = []
    for number, candidate in enumerate(candidates):
        prices = [(float("inf"), number, candidate)]
        for variant in (candidate, *variants(run.problem, candidate)):
            if variant == candidate and len(prices) > 1:
                continue
            if not (allowance and run.step()):
                break
            with run.tallied("settle") as tally:
                tally.proposed += 1
                priced = offer_partition(run, completer, variant, min(seconds for seconds, *_ in prices))
                if priced is not None and priced.cost.fits:
                    tally.valid += 1
                    tally.priced += 1
                    prices.append((priced.cost.step_time_s, number, variant))
        best.append(min(prices, key=lambda item: item[:2]))
    return [partition for *_, partition in sorted(best, key=lambda item: item[:2])]


def offer_uneven_experts(run: Search) -> bool:
    """Price first plans whose replicas share experts in any numbers, each a step; whether one of them is the best."""
    stages, before = run.pricer.features.stages, run.plan
    for plan in first_plans(stages) if stages is not None else ():
        if not run.step():
            break
        with run.tallied("uneven experts"):
            run.offer(plan)
    return run.plan is not before


def finish(run: Search, candidates: Sequence[Partition], allowance: Allowance) -> None:
    """Improve the candidates by what the arrays do not say until the budget is spent: few GPUs by annealing partitions,
    beside starts of rules; many by their variants alone. Then climb from the best plan and theirs."""
    completer = PlanCompleter(run.pricer)
    climber = HillClimber(run, completer, random.Random(run.seed))
    if not candidates:
        ranked: Sequence[Partition] = ()
    elif len(run.problem.usable_devices) <= _FEW:
        ranked = improve(climber, candidates, without_grids(run.problem, completer), allowance.part(_ANNEALED))
    else:
        ranked = settle(run, completer, candidates, allowance.part(_SETTLED))
    climber.finish(ranked, allowance.rest())
