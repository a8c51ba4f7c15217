"""Samples and experts of a stage whose replicas share experts in any numbers.

They are not searched: a layer lasts as long as the slowest replica takes for what mixes tokens, and then the slowest
device for its experts, so that each further sample, and each further experts, go where they end first, within memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import floor, inf

import numpy as np

from hexiopt.cost.context import plan_context
from hexiopt.cost.executors.experts.times import ExpertSharing
from hexiopt.cost.executors.stage_model import StageModel, StagePlace
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica, StageParallelism
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import stages_in_flight
from hexiopt.schedules.schedule import Schedule
from solvers.completion.allocation import earliest_finish, proportional

_PARTS = 32  # in which experts are dealt out for each device
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the first plans

Group = tuple[int, ...]  # devices of a replica


def may_share_unevenly(problem: Problem) -> bool:
    """Whether stages may share experts in any numbers."""
    space, model = problem.space, problem.model
    free = space.uneven_experts and space.uneven_tp and space.uneven_structure and space.uneven_layers
    return free and model.shares_experts and not model.extra_layers


def groups_of(parallelism: StageParallelism) -> list[Group]:
    """The TP groups of a stage."""
    if isinstance(parallelism, ExpertParallel):
        return [member.devices for member in parallelism.members]
    return list(parallelism.parameter_copies)


def undivided(groups: Sequence[Group], size: int) -> ExpertParallel:
    """Replicas whose numbers are yet to be chosen."""
    members = [ExpertReplica(group, 0 if k else size, (1,) * len(group)) for k, group in enumerate(groups)]
    return ExpertParallel(tuple(members))


def with_stage(plan: Plan, p: int, s: int, stage: Stage) -> Plan:
    lines, stages = list(plan.pipelines), list(plan.pipelines[p].stages)
    stages[s] = stage
    lines[p] = replace(lines[p], stages=tuple(stages))
    return replace(plan, pipelines=tuple(lines))


def balance(stages: StageModel, plan: Plan, p: int, s: int, alone: bool) -> Stage | None:
    """Stage `s` of pipeline `p` of `plan` with samples and experts where they end first, under the fastest recompute
    policy that fits; None where none does. `alone`: the slowest type's groups get no samples."""
    return _Balance(stages, plan, p, s, alone).stage()


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
        return groups_of(self._stage.parallelism)

    @cached_property
    def _kind(self) -> int | None:
        """A kind of the stage's layers with experts."""
        model = self.stages.problem.model
        kinds = [model.depth[n] for first, end in self._stage.layers for n in range(first, end)]
        return next((k for k in kinds if model.kinds[k].experts is not None), None)

    def _samples(self) -> list[int] | None:
        """Samples of each group, at least one where it takes any."""
        cells, kind = [*map(self.stages.whole_group, self._groups)], self._kind
        size = self._stage.parallelism.num_samples
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
                return inf if held > most[k] else sum(times[k].seconds(part, sharing._replace(held=held), tokens[k]))

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
        for held_each in (1, 2):
            shares = zip(self._groups, samples, strict=True)
            members = [ExpertReplica(devices, n, (held_each,) * len(devices)) for devices, n in shares]
            group = ExpertParallel(tuple(members))
            trial = with_stage(self.plan, self.p, self.s, replace(self._stage, parallelism=group))
            sharding, copies = plan_context(trial, None, stages)[self.p].sharding, group.parameter_copies
            holders = sharding.holders(self.s, len(copies))
            cost = stages.expert_stage(group).cost(counts, 1, policy, place, holders)
            excess.append([copy.excess_bytes for copy in cost.copies])
        limits = list[int]()
        for devices, one, two in zip(group.parameter_copies, *excess, strict=True):
            limits += [max(0, floor(1 - one / (two - one))) if two > one else 0] * len(devices)
        return limits


def first_plans(stages: StageModel) -> Iterator[Plan]:
    """Plans of one pipeline over all usable devices, of one stage or few, each of a run of machines by their speed that
    share experts: as single devices, or in the largest TP groups; with samples on all, or on all but the slowest type
    alone."""
    problem = stages.problem
    schedule = default_schedule(problem.workload)
    shardings = [stage for stage in (1, 0) if stage in sharding_stages(problem.workload)]
    if schedule.splits or schedule.chunked or not shardings or problem.space.num_pipelines not in (None, 1):
        return
    machines = sorted(
        problem.usable_by_machine.items(), key=lambda item: (-problem.cluster.machines[item[0]].gpu.flops_fp32, item[0])
    )
    most, fixed = min(len(machines), problem.model.num_layers), problem.space.num_stages
    for count in _STAGES if fixed is None else (fixed,):
        if count > most:
            return
        cuts = list(pairwise(_cuts(problem, [devices for _, devices in machines], count)))
        single, whole = (
            [[group for machine in machines[a:b] for group in _tp_groups(problem, *machine, largest)] for a, b in cuts]
            for largest in (False, True)
        )
        for runs in (single, whole) if whole != single else (single,):
            plan = _plan_of_runs(problem, runs, schedule, Sharding(shardings[0]))
            for alone in (False, True):
                balanced = None if plan is None else _balance_all(stages, plan, alone)
                if balanced is not None:
                    yield balanced


def _balance_all(stages: StageModel, plan: Plan, alone: bool) -> Plan | None:
    """`plan`, of one pipeline, with every stage as of `balance`; None where one does not fit."""
    for s in range(len(plan.pipelines[0].stages)):
        stage = balance(stages, plan, 0, s, alone)
        if stage is None:
            return None
        plan = with_stage(plan, 0, s, stage)
    return plan


def _tp_groups(problem: Problem, machine: int, devices: Group, largest: bool) -> list[Group]:
    """Devices of a machine as single ones, or in the `largest` TP groups."""
    size = problem.space.allowed_tp(problem.cluster.machines[machine].num_gpus)[-1] if largest else 1
    types = [problem.cluster.gpu_of(device).type_name for device in devices]
    size = size if len(set(types)) == 1 and len(devices) % size == 0 else 1
    return [devices[at : at + size] for at in range(0, len(devices), size)]


def _cuts(problem: Problem, machines: Sequence[Group], count: int) -> list[int]:
    """Where runs of machines end that have about equal memory [count + 1]."""
    bytes_of = [sum(problem.cluster.gpu_of(d).usable_memory_bytes for d in devices) for devices in machines]
    cuts, so_far = [0], 0.0
    for m, held in enumerate(bytes_of):
        so_far += held
        left = count - len(cuts)
        if left and (so_far >= sum(bytes_of) * len(cuts) / count or len(machines) - m - 1 == left):
            cuts.append(m + 1)
    return [*cuts, len(machines)]


def _plan_of_runs(
    problem: Problem, runs: Sequence[Sequence[Group]], schedule: Schedule, sharding: Sharding
) -> Plan | None:
    """A pipeline with a stage for each of `runs`, layers by their memory; None where no micro-batch has a sequence for
    each replica."""
    batch, model = problem.workload.global_batch, problem.model
    most = max(map(len, runs))
    size = next((n for n in problem.space.micro_batch_sizes(batch) if n >= most and batch % n == 0), None)
    if size is None:
        return None
    memory = np.array(
        [sum(problem.cluster.gpu_of(d).usable_memory_bytes for group in run for d in group) for run in runs]
    )
    ends = [0, *np.cumsum(proportional(memory, model.num_layers)).tolist()]
    stages = [Stage(undivided(run, size), (span,)) for run, span in zip(runs, pairwise(ends), strict=True)]
    return Plan((Pipeline(tuple(stages), batch // size, size),), schedule, sharding)
