"""`galvatron`: Galvatron (Miao et al., VLDB 2022, arXiv 2211.13878) with BMW's balance (Wang et al., arXiv 2307.02031).

Can express: a power of two of pipeline stages, each on as many GPUs; in a stage tensor parallelism by a power of two
and data parallelism by the rest, plain (NO_SHARD or ZeRO-2) or sharded (its SDP: ZeRO-3); micro-batches shared
equally; checkpointing (full recompute) layer by layer; any number of micro-batches; layers by memory, by time, or by
what lies between, as BMW searches them.

Cannot: GPU types. It profiles one GPU: here the slowest of those it uses, with the least memory of any, and with it
every stage is planned (`galvatron_stages.py`). Which machines it uses, in which order, is the engineer's choice, and
all are offered.

Of its space our plan format lacks TP and DP degrees that differ between the layers of one stage (here they do between
stages, as replicas that share a pipeline's samples), and sharded beside plain data parallelism in one plan.

Its estimate: 1F1B of stages on that one GPU, messages and rings on the links of the cluster.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from solvers.baselines._estimates import GridEstimates, one_f_one_b_s, sharded_s
from solvers.baselines._frame import Baseline, PlanCandidate, SearchLimits
from solvers.baselines._grids import lay_out, machine_orders, processes_per_machine, rank_devices
from solvers.baselines._plans import RUNS_1F1B, aligned_plan, one_f_one_b
from solvers.baselines.galvatron.stages import GalvatronChoice, Ranks, StagePlanner, StageSplit
from solvers.core.search import Search
from solvers.frame.starts import cut

_MAX_ORDERS = 300  # orders of machines
_BEST = 60  # choices of a set of machines that are tried in all orders
_ENUMERATION = 0.4  # share of the time limit for finding candidates


@dataclass(frozen=True, slots=True)
class _Scored:
    """A choice with its layers, and an estimate of the step."""

    estimate_s: float
    choice: GalvatronChoice
    split: StageSplit


class Galvatron(Baseline):
    """Galvatron (2211.13878): degrees, sharding and recompute, planned for the slowest GPU.

    Searches degrees, micro-batches, sharding and layers for every set of machines, and the best in every order of
    these.
    """

    name = "galvatron"
    limits = SearchLimits(slack=1.5)

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """Candidates by turn: the best for every number of stages and kind of sharding, then the second best, and so
        on."""
        planner, estimates = StagePlanner(PlanPricer(run.problem)), GridEstimates(run.pricer)
        families: dict[tuple[int, int], list[PlanCandidate]] = {}
        for orders in _ranks_by_set(run.problem):
            for best in _best_choices(run, planner, estimates, orders[0]):
                family = families.setdefault((len(best.choice.tps), best.choice.zero), [])
                for order in orders if run.should_continue(_ENUMERATION) else orders[:1]:
                    scored = _score(estimates, order, best.choice, best.split)
                    family.append(_candidate(run, planner, estimates, order, orders, scored))
            if not run.should_continue(_ENUMERATION):
                break
        in_turns = [
            replace(candidate, turn=turn)
            for family in families.values()
            for turn, candidate in enumerate(sorted(family, key=lambda candidate: candidate.estimate_s))
        ]
        yield from sorted(in_turns, key=lambda candidate: (candidate.turn, candidate.estimate_s))


def _ranks_by_set(problem: Problem) -> list[list[Ranks]]:
    """Ranks for all orders of machines; those of the same GPUs together, the most GPUs first."""
    by_set: dict[tuple[int, ...], dict[Ranks, None]] = {}
    for machines in machine_orders(problem, _MAX_ORDERS, subsets=True):
        for processes in processes_per_machine(problem):
            order = rank_devices(problem, machines, processes)
            by_set.setdefault(tuple(sorted(order)), {})[order] = None
    return [list(by_set[devices]) for devices in sorted(by_set, key=lambda devices: (-len(devices), devices))]


def _best_choices(run: Search, planner: StagePlanner, estimates: GridEstimates, order: Ranks) -> list[_Scored]:
    """The best choices for ranks in one order: equally many for every number of stages and kind of sharding."""
    families: dict[tuple[int, int], list[_Scored]] = {}
    best_s = float("inf")
    for choice in planner.choices(order):
        if not run.should_continue(_ENUMERATION):
            break
        for split in planner.splits(order, choice):
            compute_s = choice.num_micro_batches * max(option.seconds for option in split)
            if compute_s < Galvatron.limits.slack * best_s:
                scored = _score(estimates, order, choice, split)
                best_s = min(best_s, scored.estimate_s)
                families.setdefault((len(choice.tps), choice.zero), []).append(scored)
    share = max(1, _BEST // max(1, len(families)))
    best = [scored for family in families.values() for scored in sorted(family, key=lambda s: s.estimate_s)[:share]]
    tried: set[GalvatronChoice] = set()
    for scored in tuple(best):
        for choice in planner.mixed(order, scored.choice) if run.should_continue(_ENUMERATION) else ():
            if choice not in tried:
                tried.add(choice)
                best += [_score(estimates, order, choice, split) for split in planner.splits(order, choice)]
    return best


def _candidate(
    run: Search, planner: StagePlanner, estimates: GridEstimates, order: Ranks, orders: list[Ranks], scored: _Scored
) -> PlanCandidate:
    """A candidate whose neighbours have another order, other layers, or one other degree, size or kind of sharding."""

    def neighbours() -> Iterator[PlanCandidate]:
        for other in orders:
            if other != order:
                yield candidate_of(other, scored.choice, scored.split)
        for uniform in planner.choices(order):
            if not run.should_continue():
                return
            nearly = replace(uniform, tps=scored.choice.tps).differs_in_one(scored.choice)  # whatever the degrees
            for choice in (uniform, *planner.mixed(order, uniform)) if nearly else ():
                if choice.differs_in_one(scored.choice):
                    for split in planner.splits(order, choice):
                        yield candidate_of(order, choice, split)

    def candidate_of(ranks: Ranks, choice: GalvatronChoice, split: StageSplit) -> PlanCandidate:
        return _candidate(run, planner, estimates, ranks, orders, _score(estimates, ranks, choice, split))

    make = partial(plan_of, run.problem, order, scored.choice, scored.split)
    return PlanCandidate(scored.estimate_s, make, neighbours=neighbours)


def plan_of(problem: Problem, order: Ranks, choice: GalvatronChoice, split: StageSplit) -> Plan:
    """The plan whose stages stand on consecutive blocks of ranks.

    Where TP is narrower, replicas share a pipeline's samples.
    """
    block, slots = len(order) // len(choice.tps), []
    for s, tp in enumerate(choice.tps):
        groups = cut(order[s * block : (s + 1) * block], tp)
        width = len(groups) // choice.pipelines  # replicas of a pipeline
        samples = choice.micro_batch_size // width if width > 1 else None
        replicas = [Replica(group, samples) for group in groups]
        slots.append([tuple(replicas[k * width : (k + 1) * width]) for k in range(choice.pipelines)])
    return aligned_plan(
        slots,
        [option.num_layers for option in split],
        [option.recompute(choice) for option in split],
        choice.num_micro_batches,
        choice.micro_batch_size,
        one_f_one_b(problem) or RUNS_1F1B[-1],
        Sharding(choice.zero),
    )


def _score(estimates: GridEstimates, order: Ranks, choice: GalvatronChoice, split: StageSplit) -> _Scored:
    return _Scored(_estimate_s(estimates, order, choice, split), choice, split)


def _estimate_s(estimates: GridEstimates, order: Ranks, choice: GalvatronChoice, split: StageSplit) -> float:
    """Seconds of a step: 1F1B with rings and messages as if all stages had the TP degree of the first."""
    workload, stages, tp = estimates.problem.workload, len(choice.tps), choice.tps[0]
    grid = lay_out(cut(order, tp), stages, along=False)
    layers = [option.num_layers for option in split]
    gradients = estimates.gradient_bytes(layers)
    rings = estimates.rings(grid)
    sync_s = rings.sync_s(gradients)
    scatter_s = [seconds / 2 for seconds in sync_s]
    exposed_s = estimates.exposed_s(sync_s, [option.backward_s for option in split], layers, choice.zero)
    ratio = workload.element_bytes / workload.states.gradient
    gather_s = [seconds / 2 for seconds in rings.sync_s([size * ratio for size in gradients])]
    stage_s, once_s = [], 0.0
    for option, gather, scatter, exposed in zip(split, gather_s, scatter_s, exposed_s, strict=True):
        once_s = max(once_s, {0: exposed, 2: gather, 3: 0.0}[choice.zero])
        each_way = option.forward_s, option.backward_s
        stage_s.append(sharded_s(choice.zero, *each_way, gather, scatter, option.num_layers))
    samples = choice.sequences / grid.width
    message_s = estimates.messages(grid).seconds(samples * estimates.sequence_bytes)
    step_s = one_f_one_b_s(stage_s, message_s, choice.num_micro_batches)
    return step_s + once_s + estimates.optimizer_s(grid, grid.width if choice.zero else 1)
