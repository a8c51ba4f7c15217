"""Completes partitions into plans."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.plan.plan import Pipeline, Plan, Sharding
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Pricer
from solvers.completion.batches import split_batch
from solvers.completion.executors import StageExecutors
from solvers.completion.layers import LayerSplitter
from solvers.completion.pipelines import PipelineTimer, SplitInput, TimedPipeline
from solvers.completion.pricing import PricedPlan, price_plan
from solvers.core.partition import DeviceGroup, DoesNotFit, Partition, PipelineGroup
from solvers.core.zero import LOCKSTEP, fewest_holders


@dataclass(frozen=True, slots=True)
class CompletedPlan:
    """A plan, and an estimate of the seconds of its longest pipeline, without gradient sync and optimiser.

    `waiting`: where its pipelines would wait for messages, what it was made from: `price` tries other layers too.
    """

    plan: Plan
    estimate_s: float
    waiting: tuple[Partition, LayerSplitter] | None = None


class PlanCompleter:
    """Completes partitions into plans: layers, recompute policies, and micro-batches per pipeline.

    It knows the problem and the pricer, not the search, and caches what it computes.
    """

    def __init__(self, pricer: Pricer, *, replicates: bool = True) -> None:
        """`replicates`: whether stages may have replicas, where the plan space has them and the pricer knows them."""
        self.pricer, self.problem = pricer, pricer.problem
        space, policies = self.problem.space, pricer.policies()
        sets = [policies] if space.recompute_per_stage else [(policy,) for policy in policies]
        self.splitters = tuple(
            LayerSplitter(pricer, chosen, not space.uneven_layers, space.recompute_per_layer) for chosen in sets
        )
        self.executors = StageExecutors(pricer, replicates=replicates)
        self._timer = PipelineTimer(pricer, self.executors)
        self._machine_of: list[int] = self.problem.cluster.machine_of.tolist()

    @property
    def replicates(self) -> bool:
        """Whether stages may have replicas."""
        return self.executors.replicates

    def splitter(self, policy: str) -> LayerSplitter:
        """The splitter whose set of recompute policies includes `policy`."""
        return next(own for own in self.splitters if policy in own.policies)

    def allowed(self, partition: Partition) -> bool:
        """Whether the partition respects the switches and constraints of the plan space."""
        return self.distance(partition) == 0

    def distance(self, partition: Partition) -> int:
        """A measure of how far the partition violates the switches and constraints of the plan space; 0 if it does
        not.
        """
        space, pipeline_groups = self.problem.space, partition.pipeline_groups
        pipelines, most = partition.num_pipelines, self.problem.workload.global_batch
        far = max(0, pipelines - most) + (not pipeline_groups) + self.executors.distance(partition)
        far += sum(max(0, len(b.stages) - self.problem.model.num_layers) for b in pipeline_groups)
        if space.num_pipelines is not None:
            far += 10 * abs(pipelines - space.num_pipelines)
        if space.num_stages is not None:
            far += sum(abs(len(b.stages) - space.num_stages) for b in pipeline_groups)
        if not space.uneven_structure:
            far += max(0, len(pipeline_groups) - 1)
        if not space.uneven_batch:
            far += len({b.micro_batch_size for b in pipeline_groups}) - 1
        if partition.sharding >= LOCKSTEP:
            far += max(0, len(pipeline_groups) - 1) + (not partition.schedule.lockstep)
            far += sum(most % (b.width * b.micro_batch_size) != 0 for b in pipeline_groups)
        return far

    def complete(self, partition: Partition) -> CompletedPlan | DoesNotFit:
        """The completion of `partition` with the least estimate over the sets of recompute policies."""
        found = [self._complete(partition, splitter) for splitter in self.splitters]
        fitting = [one for one in found if not isinstance(one, DoesNotFit)]
        if fitting:
            return min(fitting, key=lambda one: one.estimate_s)
        return DoesNotFit(min(one.missing for one in found if isinstance(one, DoesNotFit)))

    def price(self, completed: CompletedPlan, limit_s: float = math.inf) -> PricedPlan | None:
        """The plan and its cost; None, without a full price, where it certainly exceeds `limit_s`.

        Where pipelines wait for messages, the better of two: with layers that leave each of them some slack, and with
        those of the least period. The latter is shorter for a pipeline alone, but messages of others delay it more.
        """
        priced = price_plan(self.pricer, completed.plan, limit_s)
        if priced is None or completed.waiting is None:
            return priced
        tight = self._complete(*completed.waiting, tight=True)
        if isinstance(tight, DoesNotFit) or tight.plan == completed.plan:
            return priced
        other = price_plan(self.pricer, tight.plan, priced.cost.objective)
        return min(filter(None, (priced, other)), key=lambda one: one.cost.objective)

    def rate(self, partition: Partition, shards: StateSharding) -> float:
        """Estimated sequences per second of `partition` alone, states spread as `shards`; 0 where it does not fit.

        Uses the best set of recompute policies. In a wide pipeline group the first, middle and last pipeline stand for
        all.
        """
        expected = max(1, self.problem.workload.global_batch // max(partition.num_pipelines, int(shards.num_devices)))
        thin = partition.with_pipeline_groups(map(_thin, partition.pipeline_groups))
        trips = self._timer.trips_s(thin)
        terms = [self._terms(few, partition, shards, expected) for few in thin.pipeline_groups]

        def per_second(splitter: LayerSplitter) -> float:
            total = 0.0
            for pipeline_group, few, own, trips_s in zip(
                partition.pipeline_groups, thin.pipeline_groups, terms, trips, strict=True
            ):
                made = self._timer.pipelines[few, own, splitter, trips_s]
                if isinstance(made, DoesNotFit):
                    return 0.0
                total += (
                    sum(few.micro_batch_size / timed_pipeline.rate.period_s for timed_pipeline in made)
                    * pipeline_group.width
                    / few.width
                )
            return total

        return max(map(per_second, self.splitters))

    def finish_s(
        self,
        groups: Sequence[DeviceGroup],
        size: int,
        schedule: Schedule,
        shards: StateSharding,
        sequences: float,
        chunks: int,
        splitter: LayerSplitter,
    ) -> float:
        """Estimated seconds in which one pipeline with stages `groups` processes `sequences` on an idle network,
        under the recompute policies of `splitter`; infinite where it does not fit.
        """
        pipeline_group = PipelineGroup(tuple((group,) for group in groups), size)
        alone = Partition((pipeline_group,), schedule, shards.stage, chunks)
        [trips_s] = self._timer.trips_s(alone)
        terms = self._terms(pipeline_group, alone, shards, sequences)
        timed = self._timer.pipelines[pipeline_group, terms, splitter, trips_s]
        if isinstance(timed, DoesNotFit):
            return math.inf
        return timed[0].rate.fill_s + sequences / size * timed[0].rate.period_s

    def _complete(
        self, partition: Partition, splitter: LayerSplitter, *, tight: bool = False
    ) -> CompletedPlan | DoesNotFit:
        schedule, batch = partition.schedule, self.problem.workload.global_batch
        shards = self._shards(partition)
        expected = max(1, -(-batch // partition.num_pipelines))
        timed_pipelines: list[TimedPipeline] = []
        sizes: list[int] = []
        missing = 0
        for pipeline_group, trips_s in zip(partition.pipeline_groups, self._timer.trips_s(partition), strict=True):
            terms = self._terms(pipeline_group, partition, shards, expected, tight=tight)
            made = self._timer.pipelines[pipeline_group, terms, splitter, trips_s]
            if isinstance(made, DoesNotFit):
                missing += made.missing * pipeline_group.width
            else:
                timed_pipelines += made
                sizes += [pipeline_group.micro_batch_size] * pipeline_group.width
        if missing:
            return DoesNotFit(missing)
        fills, periods = (
            [timed_pipeline.rate.fill_s for timed_pipeline in timed_pipelines],
            [timed_pipeline.rate.period_s for timed_pipeline in timed_pipelines],
        )
        together = partition.sharding >= LOCKSTEP
        even = together or not self.problem.space.uneven_batch
        multiples = [schedule.micro_batch_multiple(len(own.placed), own.chunks) for own in timed_pipelines]
        counts = split_batch(fills, periods, sizes, batch, even=even, multiples=multiples)
        exact = together or (even and not self.problem.space.batch_remainder)
        if counts is None or (exact and len(set(counts)) > 1):
            return DoesNotFit(1)
        longest = max(f + b * c for f, b, c in zip(fills, periods, counts, strict=True))
        pipelines = tuple(
            Pipeline(timed_pipeline.stages, count, size)
            for timed_pipeline, count, size in zip(timed_pipelines, counts, sizes, strict=True)
        )
        waiting = not tight and any(timed_pipeline.split_again for timed_pipeline in timed_pipelines)
        plan = Plan(pipelines, schedule, Sharding(partition.sharding, partition.groups))
        return CompletedPlan(plan, longest, (partition, splitter) if waiting else None)

    def _shards(self, partition: Partition) -> StateSharding:
        """How states are sharded, at the least number of holders."""
        if partition.groups == "all":
            stages, tied = self.pricer.features.stages, None
            if stages is not None and stages.spreads_over_ends(partition.sharding):
                tied = float(sum(own.width * (1 + (len(own.stages) > 1)) for own in partition.pipeline_groups))
            return StateSharding(partition.sharding, partition.num_pipelines, tied)
        stages_of_groups = (
            stage_groups for pipeline_group in partition.pipeline_groups for stage_groups in pipeline_group.stages
        )
        return StateSharding(partition.sharding, fewest_holders(stages_of_groups, self._machine_of))

    def _terms(
        self,
        pipeline_group: PipelineGroup,
        partition: Partition,
        shards: StateSharding,
        expected: float,
        *,
        tight: bool = False,
    ) -> SplitInput:
        """What the layer split of a pipeline group depends on, if each pipeline processes `expected` sequences."""
        schedule, p = partition.schedule, len(pipeline_group.stages)
        chunks = self._timer.chunks(pipeline_group, partition)
        batches = max(1, int(expected // pipeline_group.micro_batch_size))
        batches = schedule.distinct_micro_batches(batches, p, chunks)
        return SplitInput(schedule, chunks, shards, partition.groups == "all", batches, tight)


def _thin(pipeline_group: PipelineGroup) -> PipelineGroup:
    """The first, the middle and the last pipeline of a wide pipeline group."""
    width = pipeline_group.width
    if width <= 3:
        return pipeline_group
    return pipeline_group.with_stages(
        tuple(stage_groups[k] for k in (0, width // 2, width - 1)) for stage_groups in pipeline_group.stages
    )
