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
from functools import lru_cache, partial
from itertools import accumulate, pairwise

from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Pipeline, Plan, Replica, Sharding, Stage, held_by
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from solvers.baselines.estimate import Estimates, one_f_one_b_s
from solvers.baselines.frame import Candidate, Rival
from solvers.baselines.galvatron_stages import ZEROS, Choice, Ranks, Split, StagePlanner
from solvers.baselines.grid import Grid, machine_orders
from solvers.core.search import Search
from solvers.frame.starts import cut

_ORDERS = 300  # orders of machines
_KEPT = 60  # choices of a set of machines that are tried in all orders
_ENUMERATION = 0.4  # share of the time limit for finding candidates
_SLACK = 1.5  # choices whose compute alone is this much above the best estimate of their set are left out


@dataclass(frozen=True, slots=True)
class _Scored:
    """A choice and layers for it, by an estimate."""

    estimate_s: float
    choice: Choice
    split: Split


class Galvatron(Rival):
    """Degrees, micro-batches, sharding and layers for every set of machines; the best of them in every order."""

    name = "galvatron"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """Priced in turns: the best of every number of stages and kind of sharding, then their second best, ..."""
        planner, estimates = StagePlanner(CostModel(search.problem)), Estimates(search.pricer)
        families: dict[tuple[int, int], list[Candidate]] = {}
        for orders in _ranks_by_set(search.problem):
            for one in _best_choices(search, planner, estimates, orders[0]):
                family = families.setdefault((len(one.choice.tps), one.choice.zero), [])
                for order in orders if search.go_on(_ENUMERATION) else orders[:1]:
                    seconds = _estimate_s(estimates, order, one.choice, one.split)
                    scored = _Scored(seconds, one.choice, one.split)
                    family.append(_candidate(search, planner, estimates, order, orders, scored))
            if not search.go_on(_ENUMERATION):
                break
        found = [
            replace(candidate, turn=turn)
            for family in families.values()
            for turn, candidate in enumerate(sorted(family, key=lambda candidate: candidate.estimate_s))
        ]
        yield from sorted(found, key=lambda candidate: (candidate.turn, candidate.estimate_s))

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        lines, first = plan.pipelines, plan.pipelines[0]
        if plan.schedule == GPIPE:
            return f"schedule {plan.schedule}"
        if plan.sharding.stage not in ZEROS or plan.sharding.groups != "all":
            return f"sharding stage {plan.sharding.stage} over {plan.sharding.groups}"
        if len({(len(line.stages), line.num_micro_batches, line.micro_batch_size) for line in lines}) > 1:
            return "unequal pipelines or batches"
        slots = list(zip(*(line.stages for line in lines), strict=True))
        if len(slots) & (len(slots) - 1):
            return f"{len(slots)} stages, not a power of two"
        if any(len({len(replica.devices) for one in slot for replica in one.replicas}) > 1 for slot in slots):
            return "unequal TP degrees in a stage"
        order = tuple(d for slot in slots for one in slot for d in one.all_devices())
        if len({sum(len(one.all_devices()) for one in slot) for slot in slots}) > 1:
            return "unequally many GPUs in stages"
        if not _follows_machines(problem, order):
            return "devices that are not the ranks of machines in some order"
        planner = _planner(problem)
        for policies in planner.policies():
            choice = Choice(
                tuple(slot[0].tp for slot in slots),
                len(lines),
                plan.sharding.stage,
                first.micro_batch_size,
                first.num_micro_batches,
                policies,
            )
            if any(plan == plan_of(problem, order, choice, split) for split in planner.splits(order, choice)):
                return None
        return "layers or recompute that are not planned for GPUs that are all alike"

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """Random machines in random order, and a random choice and layers of those that fit."""
        machines = list(problem.usable_by_machine.values())
        chosen, most = rng.sample(machines, rng.randint(1, len(machines))), rng.choice(_processes(problem))
        order = tuple(d for own in chosen for d in own[:most])
        planner = _planner(problem)
        choices = planner.choices(order)
        if not choices:
            return None
        choice = rng.choice(choices)
        choice = rng.choice((choice, *planner.mixed(order, choice)))
        found = planner.splits(order, choice)
        return plan_of(problem, order, choice, rng.choice(found)) if found else None


@lru_cache(maxsize=2)
def _planner(problem: Problem) -> StagePlanner:
    return StagePlanner(CostModel(problem))


def _processes(problem: Problem) -> list[int]:
    """How many GPUs of a machine may run: as many as some machine has."""
    return sorted({len(own) for own in problem.usable_by_machine.values()}, reverse=True)


def _ranks_by_set(problem: Problem) -> list[list[Ranks]]:
    """Ranks in the order of machines; those of the same GPUs together, most GPUs first."""
    found: dict[tuple[int, ...], dict[Ranks, None]] = {}
    for machines in machine_orders(problem, _ORDERS, subsets=True):
        for most in _processes(problem):
            order = tuple(d for m in machines for d in problem.usable_by_machine[m][:most])
            found.setdefault(tuple(sorted(order)), {})[order] = None
    return [list(found[devices]) for devices in sorted(found, key=lambda devices: (-len(devices), devices))]


def _follows_machines(problem: Problem, order: Ranks) -> bool:
    """Whether `order` goes through machines one after another, as many GPUs of each or all that it has."""
    machines = list(dict.fromkeys(int(problem.cluster.machine_of[d]) for d in order))
    devices = problem.usable_by_machine
    return any(order == tuple(d for m in machines for d in devices[m][:most]) for most in _processes(problem))


def _best_choices(search: Search, planner: StagePlanner, estimates: Estimates, order: Ranks) -> list[_Scored]:
    """The best choices for ranks in one order, an equal share of them for every number of stages and sharding."""
    found: dict[tuple[int, int], list[_Scored]] = {}
    best_s = float("inf")
    for choice in planner.choices(order):
        if not search.go_on(_ENUMERATION):
            break
        for split in planner.splits(order, choice):
            compute_s = choice.num_micro_batches * max(option.forward_s + option.backward_s for option in split)
            if compute_s < _SLACK * best_s:
                one = _Scored(_estimate_s(estimates, order, choice, split), choice, split)
                best_s = min(best_s, one.estimate_s)
                found.setdefault((len(choice.tps), choice.zero), []).append(one)
    share = max(1, _KEPT // max(1, len(found)))
    kept = [one for own in found.values() for one in sorted(own, key=lambda one: one.estimate_s)[:share]]
    tried: set[Choice] = set()
    for one in tuple(kept):
        for choice in planner.mixed(order, one.choice) if search.go_on(_ENUMERATION) else ():
            if choice not in tried:
                tried.add(choice)
                for split in planner.splits(order, choice):
                    kept.append(_Scored(_estimate_s(estimates, order, choice, split), choice, split))
    return kept


def _candidate(
    search: Search, planner: StagePlanner, estimates: Estimates, order: Ranks, orders: list[Ranks], one: _Scored
) -> Candidate:
    """A candidate whose neighbours have another order, other layers, or one other degree, size or kind of sharding."""

    def near() -> Iterator[Candidate]:
        for other in orders:
            if other != order:
                yield made(other, one.choice, one.split)
        for uniform in planner.choices(order):
            if not search.go_on():
                return
            nearly = replace(uniform, tps=one.choice.tps).differs_in_one(one.choice)  # whatever the degrees
            for choice in (uniform, *planner.mixed(order, uniform)) if nearly else ():
                if choice.differs_in_one(one.choice):
                    for split in planner.splits(order, choice):
                        yield made(order, choice, split)

    def made(ranks: Ranks, choice: Choice, split: Split) -> Candidate:
        seconds = _estimate_s(estimates, ranks, choice, split)
        return _candidate(search, planner, estimates, ranks, orders, _Scored(seconds, choice, split))

    return Candidate(one.estimate_s, partial(plan_of, search.problem, order, one.choice, one.split), near=near)


def plan_of(problem: Problem, order: Ranks, choice: Choice, split: Split) -> Plan:
    """The stages in turn on blocks of ranks; where TP is narrower, a pipeline's samples are split over replicas."""
    block = len(order) // len(choice.tps)
    ends = [0, *accumulate(option.num_layers for option in split)]
    lines: list[list[Stage]] = [[] for _ in range(choice.pipelines)]
    for s, (tp, option, layers) in enumerate(zip(choice.tps, split, pairwise(ends), strict=True)):
        groups = cut(order[s * block : (s + 1) * block], tp)
        width = len(groups) // choice.pipelines  # replicas of a pipeline
        samples = choice.micro_batch_size // width if width > 1 else None
        for k, line in enumerate(lines):
            own = groups[k * width : (k + 1) * width]
            replicas = tuple(Replica(group, samples) for group in own)
            line.append(Stage(held_by(replicas), (layers,), option.recompute(choice)))
    pipelines = tuple(Pipeline(tuple(line), choice.num_micro_batches, choice.micro_batch_size) for line in lines)
    # With one range of layers a stage, interleaved is 1F1B.
    schedule = ONE_F_ONE_B if ONE_F_ONE_B in schedules(problem.workload) else INTERLEAVED
    return Plan(pipelines, schedule, Sharding(choice.zero))


def _estimate_s(estimates: Estimates, order: Ranks, choice: Choice, split: Split) -> float:
    """1F1B with rings and messages as if all stages had the first one's TP degree."""
    workload, stages, tp = estimates.problem.workload, len(choice.tps), choice.tps[0]
    block = len(order) // stages
    grid = Grid(tuple(tuple(cut(order[s * block : (s + 1) * block], tp)) for s in range(stages)))
    gradients = estimates.gradient_bytes([option.num_layers for option in split])
    rings = estimates.rings(grid)
    scatter_s = [seconds / 2 for seconds in rings.sync_s(gradients)]
    ratio = workload.element_bytes / workload.stored_gradient_bytes
    gather_s = [seconds / 2 for seconds in rings.sync_s([size * ratio for size in gradients])]
    stage_s, once_s = [], 0.0
    for option, gather, scatter in zip(split, gather_s, scatter_s, strict=True):
        forward, backward, n = option.forward_s, option.backward_s, option.num_layers
        if choice.zero == 3:
            forward, backward = max(forward, gather) + gather / n, max(backward, gather + scatter)
            backward += (gather + scatter) / n
        elif choice.zero == 2:
            backward, once_s = max(backward, scatter) + scatter / n, max(once_s, gather)
        else:
            once_s = max(once_s, 2 * scatter)
        stage_s.append(forward + backward)
    samples = choice.sequences / grid.width
    hop_s = estimates.messages(grid).seconds(samples * estimates.sequence_bytes)
    step_s = one_f_one_b_s(stage_s, hop_s, choice.num_micro_batches)
    return step_s + once_s + estimates.optimizer_s(grid, grid.width if choice.zero else 1)
