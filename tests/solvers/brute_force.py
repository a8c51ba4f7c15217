"""The best plan of a small problem by pricing every one that may be: the oracle of proofs and searches.

Every assignment of devices to pipelines of stages of replicas is met once (`assignments.py`), with every schedule,
sharding, cut of the layers, deal of the samples, and split of the batch. It shares nothing with the solvers but the
cost model, the plan space and its check. Two facts about the cost model leave plans out:

- a pipeline next to others ends no earlier than alone, and whatever follows begins no earlier for it;
- a stage that recomputes more takes longer, so each recomputes as little as fits, along each chain of policies.

Where layers have experts, replicas of a group of devices may share them, of any TP degree; it must be in one machine.

`oracle.py` relies on neither; it is for even smaller problems.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hexiopt.cost.context import PipelineContext, PipelineSharding
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.place import place
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.check import check
from hexiopt.plan.holdings import Holdings, parameter_holders
from hexiopt.plan.parallelism import Replicated, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, broken_rule
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import (
    SHARDING_GROUPS,
    Recompute,
    layer_ranges,
    recompute_chains,
    recompute_policies,
    schedules,
    sharding_stages,
)
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from tests.solvers.assignments import DeviceAssignment, DeviceClasses, PlacedDevices
from tests.solvers.oracle import TooManyError, holders, sums

Layers = tuple[tuple[tuple[int, int], ...], ...]  # of each stage, its ranges
_ROUNDING = 1 - 1e-12


@dataclass(frozen=True)
class Common:
    """What a plan's pipelines have in common; `holders` is the most copies of a layer over which states are spread, and
    `tied` those of a matrix that first and last stages spread together, if they do."""

    schedule: Schedule
    policies: tuple[str, ...]
    zero_stage: int
    holders: int
    tied: float | None

    @property
    def context(self) -> PipelineContext:
        """Of a pipeline alone."""
        return PipelineContext(PipelineSharding(self.zero_stage, self.holders, None, self.tied), ())


@dataclass(frozen=True)
class Option:
    """A pipeline, and its cost on an idle network."""

    pipeline: Pipeline
    alone: PipelineCost


def best_plan(problem: Problem, most: int = 1 << 40) -> tuple[Plan | None, float]:
    """The best plan of the plan space and its step time in seconds; None and infinity where none fits.

    Raises TooManyError beyond `most` prices of pipelines and plans.
    """
    search = _BruteForce(problem, most)
    search.run()
    return search.best, search.best_s


class _BruteForce:
    def __init__(self, problem: Problem, most: int) -> None:
        self.best: Plan | None = None
        self.best_s = math.inf
        self._problem, self._left, self._batch = problem, most, problem.workload.global_batch
        self._pricer, self._classes = PlanPricer(problem), DeviceClasses.of(problem)
        # With infinitely fast links inside machines it does not matter which of equal devices is which.
        self._nameless = PlanPricer(_with_fast_links(problem))
        self._least = dict[tuple[Stage, int, int, int, int, Common], list[Recompute]]()
        self._options = Memo[tuple[PlacedDevices, Common], dict[Layers, list[Option]]](
            lambda key: self._all_options(*key)
        )

    def run(self) -> None:
        """Price the plans of all assignments, those first whose pipelines alone end first."""
        candidates = list[tuple[float, int, DeviceAssignment, Common]]()
        for assignment in self._classes.assignments():
            for common in self._commons(assignment):
                tables = [self._options[line, common] for line in self._lines(assignment)]
                least_s = self._least_s(
                    [[option for options in table.values() for option in options] for table in tables]
                )
                candidates.append((least_s, len(candidates), assignment, common))
        for least_s, _, assignment, common in sorted(candidates, key=lambda candidate: candidate[:2]):
            if least_s >= self.best_s:
                break
            self._price_assignment(assignment, common)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooManyError

    def _lines(self, assignment: DeviceAssignment) -> list[PlacedDevices]:
        """The devices of each pipeline, on the first of its machines: alone it does not matter which."""
        return [self._classes.first_labeling((line,))[0] for line in assignment]

    def _commons(self, assignment: DeviceAssignment) -> Iterator[Common]:
        workload = self._problem.workload
        policies = recompute_policies(workload)
        sets = [policies] if self._problem.space.recompute_per_stage else [(policy,) for policy in policies]
        holders = sum(max(map(self._copies, line)) for line in assignment)
        ends = float(sum(self._copies(line[0]) + (len(line) > 1) * self._copies(line[-1]) for line in assignment))
        for schedule, chosen, stage in itertools.product(schedules(workload), sets, sharding_stages(workload)):
            if stage < 2 or schedule.lockstep:
                tied = ends if self._pricer.stages.spreads_over_ends(stage) else None
                yield Common(schedule, chosen, stage, holders if stage else 1, tied)

    def _copies(self, stage: tuple[tuple[int, ...], ...]) -> int:
        """The most copies of a layer on the replicas of a stage."""
        return sum(map(len, stage)) if self._problem.model.shares_experts else len(stage)

    # ------------------------------------------------------------------------- pipelines alone

    def _all_options(self, line: PlacedDevices, common: Common) -> dict[Layers, list[Option]]:
        """All pipelines on a line that fit where states are spread over all holders, by the layers of their stages."""
        options = dict[Layers, list[Option]]()
        for size in self._problem.space.micro_batch_sizes(self._batch):
            deals = list(itertools.product(*(holders(self._problem, replicas, size) for replicas in line)))
            for layers in self._cuts(len(line), common.schedule):
                for dealt, count in itertools.product(deals, range(1, self._batch // size + 1)):
                    stages = [
                        Stage(parallelism, ranges, common.policies[:1])
                        for parallelism, ranges in zip(dealt, layers, strict=True)
                    ]
                    first = Pipeline(tuple(stages), count, size)
                    if broken_rule((first,), common.schedule, Sharding()) is None:
                        options.setdefault(layers, []).extend(self._fitting_options(first, common))
        return options

    def _cuts(self, num_stages: int, schedule: Schedule) -> Iterator[Layers]:
        """All layers of stages; several ranges only where the schedule has them, one only where no other has."""
        space, total = self._problem.space, self._problem.model.num_layers
        least = 2 if schedule.chunked and ONE_F_ONE_B in schedules(self._problem.workload) else 1
        for chunks in range(least, (space.max_chunks if schedule.chunked and num_stages > 1 else 1) + 1):
            for held in sums(total, num_stages):
                if min(held) >= chunks and (space.uneven_layers or max(held) - min(held) <= 1):
                    yield tuple(layer_ranges(held, chunks))

    def _fitting_options(self, fastest: Pipeline, common: Common) -> Iterator[Option]:
        """The pipeline whose stages recompute as little as fits, in all ways."""
        alone = self._alone(fastest, common)
        if all(stage.excess_bytes <= 0 for stage in alone.stages):
            yield Option(fastest, alone)
            return
        num_stages, count, size = len(fastest.stages), fastest.num_micro_batches, fastest.micro_batch_size
        keys = [(stage, s, num_stages, count, size, common) for s, stage in enumerate(fastest.stages)]
        chosen = []
        for s, key in enumerate(keys):
            if key not in self._least:
                self._least[key] = self._least_recomputes(fastest, s, common)
            chosen.append(self._least[key])
        for recomputes in itertools.product(*chosen):
            stages = [
                replace(stage, recompute=recompute) for stage, recompute in zip(fastest.stages, recomputes, strict=True)
            ]
            pipeline = replace(fastest, stages=tuple(stages))
            yield Option(pipeline, self._alone(pipeline, common))

    def _alone(self, pipeline: Pipeline, common: Common) -> PipelineCost:
        self._count()
        [cost] = self._pricer.network([place(pipeline, common.schedule, common.context, self._pricer.stages)])
        return cost

    def _least_recomputes(self, pipeline: Pipeline, s: int, common: Common) -> list[Recompute]:
        """The first policies of each chain with which stage s fits; the other stages do not matter."""
        policies = dict[Recompute, None]()
        stages = pipeline.stages

        def fits(recompute: Recompute) -> bool:
            self._count()
            other = replace(pipeline, stages=(*stages[:s], replace(stages[s], recompute=recompute), *stages[s + 1 :]))
            placed = place(other, common.schedule, common.context, self._pricer.stages)
            return placed.stages[s].excess_bytes <= 0

        per_layer = self._problem.space.recompute_per_layer
        for chain in recompute_chains(common.policies, stages[s].num_layers, per_layer):
            at = bisect.bisect_left(chain, True, key=fits)
            if at < len(chain):
                policies[chain[at]] = None
        return list(policies)

    def _leaner(self, pipeline: Pipeline, cost: PipelineCost, policies: tuple[str, ...]) -> Iterator[Pipeline]:
        """The pipelines whose stages recompute one step more where they do not fit."""
        choices = []
        for stage, stage_cost in zip(pipeline.stages, cost.stages, strict=True):
            chains = recompute_chains(policies, stage.num_layers, self._problem.space.recompute_per_layer)
            after = {b for chain in chains for a, b in itertools.pairwise(chain) if a == stage.recompute}
            choices.append(sorted(after) if stage_cost.excess_bytes > 0 else [stage.recompute])
        for chosen in itertools.product(*choices):
            stages = [
                replace(stage, recompute=recompute) for stage, recompute in zip(pipeline.stages, chosen, strict=True)
            ]
            yield replace(pipeline, stages=tuple(stages))

    def _least_s(self, options: Sequence[Sequence[Option]]) -> float:
        """The least possible end of the longest pipeline alone, of those that process the batch together."""
        reached = {0: 0.0}  # sequences of the first pipelines
        for pipeline_options in options:
            more = dict[int, float]()
            fastest = dict[int, float]()
            for option in pipeline_options:
                count = option.pipeline.num_sequences
                fastest[count] = min(fastest.get(count, math.inf), option.alone.end_s)
            for (done, before_s), (count, own_s) in itertools.product(reached.items(), fastest.items()):
                if done + count <= self._batch:
                    more[done + count] = min(more.get(done + count, math.inf), max(before_s, own_s))
            reached = more
        return reached.get(self._batch, math.inf) * _ROUNDING

    # ------------------------------------------------------------------------- plans

    def _price_assignment(self, assignment: DeviceAssignment, common: Common) -> None:
        """Price the plans of an assignment, by the layers of their stages."""
        tables = [self._options[line, common] for line in self._lines(assignment)]
        names = SHARDING_GROUPS if common.zero_stage and self._problem.space.machine_sharding else ("all",)
        shardings = [Sharding(common.zero_stage, groups) for groups in names]
        cuts, labeled = list[tuple[float, tuple[Layers, ...]]](), self._classes.first_labeling(assignment)
        for layers in itertools.product(*tables):
            pairs = itertools.pairwise(zip(assignment, layers, strict=True))
            if all(a[0] != b[0] or a[1] <= b[1] for a, b in pairs):  # of equal lines, one order counts
                cuts.append(
                    (
                        self._least_s(
                            [table[pipeline_layers] for table, pipeline_layers in zip(tables, layers, strict=True)]
                        ),
                        layers,
                    )
                )
        for (least_s, layers), sharding in itertools.product(sorted(cuts), shardings):
            if least_s >= self.best_s:
                break
            options = [
                sorted(
                    (option for option in table[pipeline_layers] if option.alone.end_s * _ROUNDING < self.best_s),
                    key=lambda option: option.alone.end_s,
                )
                for table, pipeline_layers in zip(tables, layers, strict=True)
            ]
            if all(options) and self._least_synchronised_s(labeled, options, common, sharding) < self.best_s:
                for chosen in self._together(options, self._batch):
                    pipelines = tuple(map(_on, labeled, chosen))
                    if broken_rule(pipelines, common.schedule, sharding) is None:
                        self._price(assignment, Plan(pipelines, common.schedule, sharding))

    def _least_synchronised_s(
        self,
        labeled: Sequence[PlacedDevices],
        options: Sequence[Sequence[Option]],
        common: Common,
        sharding: Sharding,
    ) -> float:
        """A step time below which no plan of these `options` stays: every executor begins its last backward, and ends,
        as soon as in any of them, under the best names. From ZeRO-2 on sync is inside the pipelines, with states
        sharded within machines names also say who waits for whom, and where experts are shared rings differ too."""
        firsts = tuple(
            _on(line, pipeline_options[0].pipeline) for line, pipeline_options in zip(labeled, options, strict=True)
        )
        named = self._names_matter(firsts)
        if (
            sharding.stage >= 2
            or broken_rule(firsts, common.schedule, sharding)
            or self._problem.model.shares_experts
            or (named and sharding.groups != "all")
        ):
            return 0.0
        self._count()
        costs = [earliest([option.alone for option in pipeline_options]) for pipeline_options in options]
        pricer = self._nameless if named else self._pricer
        return pricer.price(Plan(firsts, common.schedule, sharding), costs).step_time_s * _ROUNDING

    def _together(self, options: Sequence[Sequence[Option]], batch: int) -> Iterator[tuple[Pipeline, ...]]:
        """Pipelines, one of each of the `options`, that process `batch` sequences and alone are in time."""
        first_options, *others = options
        for option in first_options:
            if option.alone.end_s * _ROUNDING >= self.best_s:
                return
            left = batch - option.pipeline.num_sequences
            if not others and not left:
                yield (option.pipeline,)
            elif others and left >= len(others):
                for more in self._together(others, left):
                    yield (option.pipeline, *more)

    def _price(self, assignment: DeviceAssignment, first: Plan) -> None:
        """Price a plan, those that recompute more where it does not fit, and those under other names."""
        if check(self._problem, first):
            return
        left, seen = [first], {first}
        policies = recompute_policies(self._problem.workload)
        while left:
            plan = left.pop()
            self._count()
            cost = self._pricer.price(plan)
            if cost.fits:
                self._keep(plan, cost)
                self._rename(assignment, plan, cost)
            elif cost.step_time_s < self.best_s:
                stage_policies = (
                    policies if self._problem.space.recompute_per_stage else plan.pipelines[0].stages[0].recompute[:1]
                )
                each = [
                    list(self._leaner(pipeline, priced, stage_policies))
                    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True)
                ]
                for pipelines in itertools.product(*each):
                    leaner = replace(plan, pipelines=pipelines)
                    if leaner not in seen:
                        seen.add(leaner)
                        left.append(leaner)

    def _names_matter(self, pipelines: Sequence[Pipeline]) -> bool:
        """Whether it may matter which of equal devices is which: to rings of three holders and more."""
        holders = parameter_holders(Holdings.of(pipelines), self._problem.parameters.trained_groups).holders
        return any(group_holders.shape[1] > 2 for group_holders in holders) and any(
            len(devices) > 1 for devices in self._classes.devices
        )

    def _rename(self, assignment: DeviceAssignment, plan: Plan, cost: Cost) -> None:
        """Price a plan of `cost` under all names of equal devices if these matter."""
        if not self._names_matter(plan.pipelines):
            return
        if plan.sharding.groups == "all":
            self._count()
            if self._nameless.price(plan, cost.pipelines).step_time_s * _ROUNDING >= self.best_s:
                return
        for labeled in itertools.islice(self._classes.labelings(assignment), 1, None):
            self._count()
            other = replace(plan, pipelines=tuple(map(_on, labeled, plan.pipelines)))
            self._keep(other, self._pricer.price(other))

    def _keep(self, plan: Plan, cost: Cost) -> None:
        if cost.fits and cost.step_time_s < self.best_s:
            self.best, self.best_s = plan, cost.step_time_s


def _on(line: PlacedDevices, pipeline: Pipeline) -> Pipeline:
    """The pipeline on the devices of a line."""
    stages = []
    for stage, groups in zip(pipeline.stages, line, strict=True):
        group = stage.parallelism
        if isinstance(group, TensorParallel):
            stages.append(replace(stage, parallelism=replace(group, devices=groups[0])))
            continue
        replicas = tuple(
            replace(replica, devices=devices) for replica, devices in zip(group.replicas, groups, strict=True)
        )
        stages.append(replace(stage, parallelism=Replicated(replicas)))
    return replace(pipeline, stages=tuple(stages))


def earliest(costs: Sequence[PipelineCost]) -> PipelineCost:
    """The first cost with executors that begin their last backward no later than in any of `costs`, and end so."""
    lasts = [[executor.last_backward_s for stage in cost.stages for executor in stage.executors] for cost in costs]
    ends = tuple(
        min(min(end_s, end_s - last_s + lasts[0][k]) for end_s, last_s in zip(own_ends, own_lasts, strict=True))
        for k, (own_ends, own_lasts) in enumerate(
            zip(zip(*(cost.executor_end_s for cost in costs), strict=True), zip(*lasts, strict=True), strict=True)
        )
    )
    return replace(costs[0], executor_end_s=ends, end_s=max(ends))


def _with_fast_links(problem: Problem) -> Problem:
    machines = tuple(
        replace(machine, intra_bandwidth_bytes_per_s=math.inf, intra_links=()) for machine in problem.cluster.machines
    )
    return replace(problem, cluster=replace(problem.cluster, machines=machines))
