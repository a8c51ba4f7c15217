"""Operators on plans whose replicas may share experts in any numbers: stages become such, experts move between devices.

Given the replicas of a stage, samples and experts are not searched: a layer lasts as long as the slowest replica takes
for what mixes tokens, and then the slowest device for its experts, so that each further sample, and each further
experts, go where they end first, within memory.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, inf
from typing import NamedTuple

from hexiopt.cost.context import plan_context
from hexiopt.cost.executors.experts import ExpertSharing
from hexiopt.cost.executors.stage_model import StageModel, StagePlace
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica, StageParallelism
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import stages_in_flight
from solvers.completion.allocation import earliest_finish
from solvers.completion.pricing import PricedPlan
from solvers.core.zero import LOCKSTEP

_PARTS = 32  # in which experts are dealt out
_ALONE = 0.25  # chance that devices of the slower type get experts alone
_PIPELINES, _STAGES = 0.4, 0.4  # chances that two pipelines, or two stages, are joined

Group = tuple[int, ...]  # devices of a replica


def may_share_unevenly(problem: Problem) -> bool:
    """Whether stages may share experts in any numbers."""
    space, model = problem.space, problem.model
    free = space.uneven_experts and space.uneven_tp and space.uneven_structure and space.uneven_layers
    return free and model.shares_experts and not model.extra_layers


def shares_unevenly(plan: Plan) -> bool:
    """Whether a stage of `plan` shares experts so."""
    return any(isinstance(stage.parallelism, ExpertParallel) for line in plan.pipelines for stage in line.stages)


def share_experts(stages: StageModel, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Let the replicas of a stage, of two that follow each other, or of those in the same place of two pipelines, share
    its experts; those of the slower type may get experts alone."""
    plan, alone = _unsharded_groups(stages.problem, priced.plan), rng.random() < _ALONE
    if plan is None or any(line.num_chunks > 1 or line.depths for line in plan.pipelines):
        return None
    pairs, several = _alike(plan), [p for p, line in enumerate(plan.pipelines) if len(line.stages) > 1]
    draw = rng.random()
    if pairs and draw < _PIPELINES:
        joined = _join_pipelines(stages.problem, plan, *rng.choice(pairs))
    elif several and draw < _PIPELINES + _STAGES:
        p = rng.choice(several)
        joined = _join_stages(stages.problem, plan, p, rng.randrange(len(plan.pipelines[p].stages) - 1), 2)
    else:
        p = rng.randrange(len(plan.pipelines))
        joined = _join_stages(stages.problem, plan, p, rng.randrange(len(plan.pipelines[p].stages)), 1)
    if joined is None:
        return None
    for p, s in joined.places:
        balanced = _Balance(stages, joined.plan, p, s, alone).stage()
        if balanced is None:
            return None
        joined = joined._replace(plan=_with_stage(joined.plan, p, s, balanced))
    return joined.plan


class _Joined(NamedTuple):
    """A plan with replicas that share experts in the stages at `places` (pipeline, stage), in numbers yet to be
    chosen."""

    plan: Plan
    places: Sequence[tuple[int, int]]


def _unsharded_groups(problem: Problem, plan: Plan) -> Plan | None:
    """`plan` under a sharding that stages which share experts may have; None where the workload allows none."""
    if plan.schedule.splits:
        return None
    if plan.sharding.stage < LOCKSTEP and plan.sharding.groups == "all":
        return plan
    stage = min(plan.sharding.stage, 1)
    return replace(plan, sharding=Sharding(stage)) if stage in sharding_stages(problem.workload) else None


def _join_stages(problem: Problem, plan: Plan, p: int, s: int, count: int) -> _Joined | None:
    """`count` stages of pipeline `p` from `s` on as one."""
    line = plan.pipelines[p]
    parts = line.stages[s : s + count]
    groups = [group for part in parts for group in _groups(part.parallelism)]
    roomy = _with_room(problem, line, len(groups))
    if roomy is None or len(groups) < 2:
        return None
    size, span = roomy.micro_batch_size, (parts[0].layers[0][0], parts[-1].layers[0][1])
    joined = Stage(_undivided(groups, size), (span,), parts[0].recompute[:1])
    lines = list(plan.pipelines)
    lines[p] = replace(roomy, stages=(*roomy.stages[:s], joined, *roomy.stages[s + count :]))
    return _Joined(replace(plan, pipelines=tuple(lines)), [(p, s)])


def _join_pipelines(problem: Problem, plan: Plan, a: int, b: int) -> _Joined | None:
    """Pipelines `a` and `b` as one, with the layers of the first."""
    line, other = plan.pipelines[a], plan.pipelines[b]
    sequences = line.num_sequences + other.num_sequences
    groups = [
        [*_groups(one.parallelism), *_groups(two.parallelism)]
        for one, two in zip(line.stages, other.stages, strict=True)
    ]
    least, both = max(map(len, groups)), line.micro_batch_size + other.micro_batch_size
    sizes = [n for n in problem.space.micro_batch_sizes(problem.workload.global_batch) if sequences % n == 0]
    size = max((n for n in sizes if n <= both), default=0)
    if size < least:
        size = min((n for n in sizes if n >= least), default=0)
    if not size:
        return None
    stages = [
        replace(stage, parallelism=_undivided(some, size), recompute=stage.recompute[:1])
        for stage, some in zip(line.stages, groups, strict=True)
    ]
    rest = [each for k, each in enumerate(plan.pipelines) if k not in (a, b)]
    joined = Pipeline(tuple(stages), sequences // size, size)
    return _Joined(replace(plan, pipelines=(joined, *rest)), [(0, s) for s in range(len(stages))])


def _alike(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of pipelines with as many stages."""
    lengths = [len(line.stages) for line in plan.pipelines]
    return [(a, b) for b in range(len(lengths)) for a in range(b) if lengths[a] == lengths[b]]


def _groups(parallelism: StageParallelism) -> list[Group]:
    """The TP groups of a stage."""
    if isinstance(parallelism, ExpertParallel):
        return [member.devices for member in parallelism.members]
    return list(parallelism.parameter_copies)


def _undivided(groups: Sequence[Group], size: int) -> ExpertParallel:
    """Replicas whose numbers are yet to be chosen."""
    members = [ExpertReplica(group, 0 if k else size, (1,) * len(group)) for k, group in enumerate(groups)]
    return ExpertParallel(tuple(members))


def _with_room(problem: Problem, line: Pipeline, replicas: int) -> Pipeline | None:
    """`line` with micro-batches of at least as many sequences as there are `replicas`; None where sizes do not allow
    it."""
    sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
    size = next((n for n in sizes if n >= max(replicas, line.micro_batch_size) and line.num_sequences % n == 0), None)
    resized = None if size is None else line.resize(size)
    return None if resized is None else resized.with_micro_batches(line.num_sequences // resized.micro_batch_size)


def _with_stage(plan: Plan, p: int, s: int, stage: Stage) -> Plan:
    lines, stages = list(plan.pipelines), list(plan.pipelines[p].stages)
    stages[s] = stage
    lines[p] = replace(lines[p], stages=tuple(stages))
    return replace(plan, pipelines=tuple(lines))


@dataclass(frozen=True)
class _Balance:
    """Chooses the numbers of stage `s` of pipeline `p` of a plan; `alone`: the slowest type's groups get no samples."""

    stages: StageModel
    plan: Plan
    p: int
    s: int
    alone: bool

    def stage(self) -> Stage | None:
        """The stage with samples and experts where they end first, under the fastest recompute policy that fits; None
        where none does."""
        samples = self._samples()
        if samples is None:
            return None
        for policy in recompute_policies(self.stages.problem.workload):  # the fastest first
            experts = self._experts(samples, policy)
            if experts is not None:
                given = iter(experts)
                held = [tuple(next(given) for _ in group) for group in self._groups]
                group = self._with_waves(ExpertParallel(tuple(map(ExpertReplica, self._groups, samples, held))), policy)
                return replace(self._stage, parallelism=group, recompute=(policy,))
        return None

    def _with_waves(self, group: ExpertParallel, policy: str) -> ExpertParallel:
        """`group` with one wave or two, whichever is faster."""
        if any(samples % 2 for samples in group.shares):
            return group
        assert self._kind is not None
        both, kind = (group, replace(group, waves=2)), self._kind
        return min(both, key=lambda each: sum(self.stages.expert_stage(each).layer_s(kind, policy)))

    @property
    def _stage(self) -> Stage:
        return self.plan.pipelines[self.p].stages[self.s]

    @cached_property
    def _groups(self) -> list[Group]:
        return _groups(self._stage.parallelism)

    @cached_property
    def _kind(self) -> int | None:
        """A kind of the stage's layers with experts."""
        model = self.stages.problem.model
        kinds = [model.depth[n] for first, end in self._stage.layers for n in range(first, end)]
        return next((k for k in kinds if model.kinds[k].experts is not None), None)

    def _samples(self) -> list[int] | None:
        """Samples of each group, at least one where it takes any."""
        cells, kind, size = (
            [*map(self.stages.whole_group, self._groups)],
            self._kind,
            self._stage.parallelism.num_samples,
        )
        if kind is None or size is None:
            return None

        def finish_s(k: int) -> Callable[[int], float]:
            return lambda n: sum(self.stages.layer_apart(cells[k], n, kind).under("none"))

        device_s = [finish_s(k)(1) * len(group) for k, group in enumerate(self._groups)]
        slowest = cells[max(range(len(cells)), key=device_s.__getitem__)].gpu
        taking = [k for k, cell in enumerate(cells) if not (self.alone and cell.gpu is slowest)]
        if not taking or len(taking) > size:
            return None
        samples = [0] * len(cells)
        for k, count in zip(taking, earliest_finish([*map(finish_s, taking)], size), strict=True):
            samples[k] = count
        return samples

    def _experts(self, samples: Sequence[int], policy: str) -> list[int] | None:
        """Whole experts of each device as they end first, within memory; None where memory has no room."""
        stages, groups = self.stages, self._groups
        assert self._kind is not None
        part, seq_len = stages.problem.model.kinds[self._kind].experts, stages.problem.workload.seq_len
        assert part is not None
        tokens = [n * seq_len / len(group) for group, n in zip(groups, samples, strict=True) for _ in group]
        times = [stages.expert_times[stages.tp_group((device,)).gpu.name] for device in self._stage.devices]
        most, sharing = self._most_experts(samples, policy), ExpertSharing(len(tokens), len(groups), sum(samples))
        least = [0 if routed else 1 for routed in tokens]  # devices without samples hold some
        unit = max(1, part.count // (_PARTS * len(tokens)))

        def finish_s(k: int) -> Callable[[int], float]:
            def seconds(n: int) -> float:
                held = least[k] + n * unit
                return inf if held > most[k] else sum(times[k].seconds(part, tokens[k], sharing._replace(held=held)))

            return seconds

        parts, rest = divmod(part.count - sum(least), unit)
        dealt = earliest_finish([finish_s(k) for k in range(len(tokens))], parts, 0)
        held = [few + n * unit for few, n in zip(least, dealt, strict=True)]
        k = max(range(len(held)), key=lambda k: most[k] - held[k])
        held[k] += rest
        return held if all(n <= limit for n, limit in zip(held, most, strict=True)) else None

    def _most_experts(self, samples: Sequence[int], policy: str) -> list[int]:
        """The most experts of a layer for which each device has memory: bytes grow by as many for each."""
        stages, line, schedule = self.stages, self.plan.pipelines[self.p], self.plan.schedule
        held = stages_in_flight(schedule, len(line.stages), line.num_micro_batches, 1, line.depths)[self.s]
        place = StagePlace(self.s == 0, self.s == len(line.stages) - 1, held, self.plan.sharding.stage)
        counts, excess = [stages.count_by_kind(self._stage.layers[0], (policy,))], []
        for each in (1, 2):
            shares = zip(self._groups, samples, strict=True)
            group = ExpertParallel(tuple([ExpertReplica(devices, n, (each,) * len(devices)) for devices, n in shares]))
            trial = _with_stage(self.plan, self.p, self.s, replace(self._stage, parallelism=group))
            sharding, copies = plan_context(trial, None, stages)[self.p].sharding, group.parameter_copies
            holders = sharding.holders(self.s, len(copies))
            cost = stages.expert_stage(group).cost(counts, 1, policy, place, holders)
            excess.append([copy.excess_bytes for copy in cost.copies])
        limits = list[int]()
        for devices, one, two in zip(group.parameter_copies, *excess, strict=True):
            limits += [max(0, floor(1 - one / (two - one))) if two > one else 0] * len(devices)
        return limits


def shift_expert(stages: StageModel, priced: PricedPlan, rng: random.Random) -> Plan | None:
    """Move experts of a stage from one device to another: one, or as many as double from one draw to the next."""
    plan = priced.plan
    places = [
        (p, s)
        for p, line in enumerate(plan.pipelines)
        for s, stage in enumerate(line.stages)
        if isinstance(stage.parallelism, ExpertParallel) and len(stage.devices) > 1
    ]
    if not places:
        return None
    p, s = rng.choice(places)
    stage = plan.pipelines[p].stages[s]
    group = stage.parallelism
    assert isinstance(group, ExpertParallel)
    experts = list(group.experts)
    a, b = rng.sample(range(len(experts)), 2)
    moved = min(experts[a], 1 << rng.randrange(5))
    experts[a], experts[b] = experts[a] - moved, experts[b] + moved
    given = iter(experts)
    held = [tuple(next(given) for _ in member.devices) for member in group.members]
    if any(not member.samples and 0 in some for member, some in zip(group.members, held, strict=True)):
        return None
    members = tuple([replace(member, experts=some) for member, some in zip(group.members, held, strict=True)])
    return _with_stage(plan, p, s, replace(stage, parallelism=replace(group, members=members)))
