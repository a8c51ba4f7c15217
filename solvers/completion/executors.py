"""What the devices of a stage are, and what any number of layers takes on them: decided here and nowhere else.

A search moves devices. How those of a stage share its work is its *executor*: today a TP group, or replicas, which are
TP groups that process some samples of every micro-batch each. `StageExecutors` says which of them a plan may have and
makes them; `ExecutorTables` has their options: seconds and recompute policies of 1, 2, ... layers, as far as memory
allows. A new kind of executor has what `Executor` has, a row in `StageExecutors.of`, and its `StageOptions`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from hexiopt.cost.executors.limits import MemoryLimits
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Stage
from hexiopt.problem.space import LayerRanges, Recompute, recompute_first
from hexiopt.schedules.in_flight import InFlight
from hexiopt.solving import Pricer
from solvers.completion.allocation import earliest_finish
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup
from solvers.core.zero import LOCKSTEP


class ReplicaShare(NamedTuple):
    """One replica of a stage: a TP group, and the samples of each micro-batch that it processes."""

    tp_group: Any
    samples: int


Works = frozenset[Any]  # what a stage must do well on: TP groups for whole micro-batches, `ReplicaShare`s for parts


def works_of(tp_groups: Iterable[Any], samples: Iterable[int], micro_batch_size: int) -> Works:
    """`Works` of TP groups, each with its samples of every micro-batch."""
    return frozenset(
        tp_group if given == micro_batch_size else ReplicaShare(tp_group, given)
        for tp_group, given in zip(tp_groups, samples, strict=True)
    )


class PlacedReplica(NamedTuple):
    """A replica of a stage: its devices, their TP group as the pricer knows it, and its samples of a micro-batch."""

    group: DeviceGroup
    tp_group: Any
    samples: int


class Executor(NamedTuple):
    """The devices of a stage of one pipeline: a TP group, or several, which are replicas."""

    replicas: tuple[PlacedReplica, ...]

    @property
    def groups(self) -> list[DeviceGroup]:
        """The devices of each replica."""
        return [replica.group for replica in self.replicas]

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of a micro-batch that each replica processes."""
        return tuple([replica.samples for replica in self.replicas])

    def works(self, micro_batch_size: int) -> Works:
        """What its options depend on."""
        return works_of((replica.tp_group for replica in self.replicas), self.samples, micro_batch_size)

    def stage(self, layers: LayerRanges, recompute: Recompute) -> Stage:
        """The stage of a plan that holds `layers`."""
        several = len(self.replicas) > 1
        replicas = (Replica(replica.group, replica.samples if several else None) for replica in self.replicas)
        return Stage.of_replicas(tuple(replicas), layers, recompute)


class StageExecutors:
    """Makes the executors of one problem's partitions."""

    def __init__(self, pricer: Pricer, *, replicates: bool = True) -> None:
        """`replicates`: whether stages may have replicas, where the plan space has them and the pricer knows them."""
        self._pricer, self._space = pricer, pricer.problem.space
        self._num_layers = pricer.problem.model.num_layers
        self._stages = pricer.features.stages
        self.replicates = replicates and self._space.replicas and pricer.features.replicas

    def distance(self, partition: Partition) -> int:
        """A measure of how far the executors of `partition` are from what a plan may have; 0 if they are allowed."""
        groups, far = partition.pipeline_groups, 0
        if not self._space.uneven_tp:
            far += len({len(group) for b in groups for stage_groups in b.stages for group in stage_groups}) - 1
        if not self.replicates:
            far += sum(b.replicated for b in groups)
        if partition.sharding >= LOCKSTEP:  # replicas gather and scatter together
            replicated = [stage_groups for b in groups if b.replicated for stage_groups in b.stages]
            far += sum(len({len(group) for group in stage_groups}) - 1 for stage_groups in replicated)
        return far

    def of(self, pipeline_group: PipelineGroup) -> tuple[tuple[Executor, ...], ...]:
        """The executors of each pipeline, stage by stage [pipelines][stages]; none if a replica would have no
        sample."""
        size, tp_group = pipeline_group.micro_batch_size, self._pricer.tp_group
        if not pipeline_group.replicated:
            slots = (
                [Executor((PlacedReplica(group, tp_group(group), size),)) for group in stage_groups]
                for stage_groups in pipeline_group.stages
            )
            return tuple(zip(*slots, strict=True))
        if pipeline_group.most_replicas > size:
            return ()
        return (tuple(self._replicas(pipeline_group, s) for s in range(len(pipeline_group.stages))),)

    def _replicas(self, pipeline_group: PipelineGroup, s: int) -> Executor:
        """The replicas of stage s, with samples as if the stage held an equal share of the layers."""
        count, policy = len(pipeline_group.stages), self._pricer.policies()[0]
        layers = max(1, self._num_layers // count)

        def finish_s(tp_group: Any) -> Callable[[int], float]:
            return lambda n: sum(self._pricer.stage_s(tp_group, layers, s == 0, s == count - 1, n, policy))

        groups = pipeline_group.stages[s]
        tp_groups = [self._pricer.tp_group(group) for group in groups]
        samples = earliest_finish(list(map(finish_s, tp_groups)), pipeline_group.micro_batch_size)
        return Executor(tuple(map(PlacedReplica, groups, tp_groups, samples)))

    def more_holders(self, pipeline_group: PipelineGroup, *, everywhere: bool) -> tuple[int, ...]:
        """How many more devices share the states of each stage than those of like pipelines: its replicas hold the same
        layers, and share their states, if these are sharded `everywhere` and not inside machines. Empty if none do."""
        if not pipeline_group.replicated:
            return ()
        return tuple(len(stage_groups) - 1 if everywhere else 0 for stage_groups in pipeline_group.stages)

    def seconds(self, executor: Executor, first: bool, last: bool, num_layers: int, recompute: Recompute) -> float:
        """Forward and backward of a micro-batch through a stage."""
        return max(
            sum(
                self._pricer.stage_s(tp_group, num_layers, first, last, samples, recompute[0])
                if self._stages is None  # others have one policy a stage
                else self._stages.stage_s(tp_group, num_layers, first, last, samples, recompute)
            )
            for _, tp_group, samples in executor.replicas
        )


class PolicyMix(NamedTuple):
    """How the first `num_smaller` layers of a stage recompute, and how the others do."""

    smaller: str
    num_smaller: int
    faster: str


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of a stage: `times[n-1]` is the least time of n layers, `mixes[n-1]` the policies that achieve it."""

    times: list[float]
    mixes: list[PolicyMix]

    def recompute(self, num_layers: int) -> Recompute:
        """The policies of `num_layers` layers, which must fit."""
        return recompute_first(*self.mixes[num_layers - 1], num_layers)


class ExecutorTables:
    """The options of stages under a set of recompute policies, kept; one for a search."""

    def __init__(self, pricer: Pricer, policies: tuple[str, ...], per_layer: bool = False) -> None:
        """`per_layer`: a stage may mix two policies, which only our cost model prices."""
        self._policies, self._pricer = policies, pricer
        features = pricer.features
        self._stages = features.stages if per_layer else None
        self._limits = None if self._stages is None else MemoryLimits(self._stages)
        self._num_layers = pricer.problem.model.num_layers
        self._times: Memo[tuple[Works, bool, bool, int], list[tuple[str, list[float]]]] = Memo(
            lambda key: self._by_speed(*key)
        )
        self.options: Memo[tuple[Works, bool, bool, int, InFlight, StateSharding], StageOptions] = Memo(
            lambda key: self._options(*key)
        )

    def _options(
        self,
        works: Works,
        first: bool,
        last: bool,
        micro_batch_size: int,
        held: InFlight,
        shards: StateSharding,
    ) -> StageOptions:
        """The options of a stage that must do well on all of `works` (the slowest and the fullest decide).

        A TP group gets whole micro-batches, unless it is given as a `ReplicaShare`.
        """
        shares = _shares(works, micro_batch_size)
        tables = self._times[works, first, last, micro_batch_size]
        layer_limits = [
            min(self._pricer.max_layers(tp_group, first, last, n, policy, held, shards) for tp_group, n in shares)
            for policy, _ in tables
        ]
        times: list[float] = []
        mixes: list[PolicyMix] = []
        # Fastest policy first: each one serves the numbers of layers that no faster one can fit.
        for layer_limit, (policy, seconds) in zip(layer_limits, tables, strict=True):
            more = seconds[len(times) : max(len(times), layer_limit)]
            times += more
            mixes += [PolicyMix(policy, 0, policy)] * len(more)
        options = StageOptions(times, mixes)
        if self._stages is not None:
            for (layer_limit, (faster, _)), (_, (smaller, _)) in combinations(
                zip(layer_limits, tables, strict=True), 2
            ):
                self._mix(options, max(0, layer_limit), smaller, faster, shares, first, last, held, shards)
        return options

    def _mix(
        self,
        options: StageOptions,
        layer_limit: int,
        smaller: str,
        faster: str,
        shares: Sequence[ReplicaShare],
        first: bool,
        last: bool,
        held: InFlight,
        shards: StateSharding,
    ) -> None:
        """Improve `options` for more than `layer_limit` layers by mixing two policies.

        As few layers as memory requires recompute under `smaller`, the others under `faster`.
        """
        stages, limits = self._stages, self._limits
        assert stages is not None
        assert limits is not None
        rates = []  # per share: seconds of no layer, of a layer of either
        for tp_group, samples in shares:
            none_s = sum(stages.stage_s(tp_group, 0, first, last, samples, (smaller,)))
            rates.append((none_s, *(sum(stages.layer_s(tp_group, samples, policy)) for policy in (smaller, faster))))
        counts = range(layer_limit + 1, len(options.times) + 1)
        each = [
            limits.min_recompute_layers(tp_group, counts, first, last, samples, smaller, faster, held, shards)
            for tp_group, samples in shares
        ]
        needed = each[0] if len(each) == 1 else list(map(max, *each))
        by_share = [
            [none_s + k * smaller_s + (n - k) * faster_s for n, k in zip(counts, needed, strict=True)]
            for none_s, smaller_s, faster_s in rates
        ]
        times = by_share[0] if len(by_share) == 1 else map(max, *by_share)
        for n, num_smaller, seconds in zip(counts, needed, times, strict=True):
            if num_smaller < n and seconds < options.times[n - 1]:
                options.times[n - 1], options.mixes[n - 1] = seconds, PolicyMix(smaller, num_smaller, faster)

    def _by_speed(self, works: Works, first: bool, last: bool, micro_batch_size: int) -> list[tuple[str, list[float]]]:
        """For each policy, fastest first, the times of 1, 2, ... layers on the slowest of `works`."""
        shares = _shares(works, micro_batch_size)
        tables = [
            (
                policy,
                [
                    max(
                        sum(self._pricer.stage_s(tp_group, n, first, last, samples, policy))
                        for tp_group, samples in shares
                    )
                    for n in range(1, self._num_layers + 1)
                ],
            )
            for policy in self._policies
        ]
        return sorted(tables, key=lambda table: table[1][-1])


def _shares(works: Works, micro_batch_size: int) -> list[ReplicaShare]:
    """All TP groups of `works` with their samples of a micro-batch."""
    return [
        tp_group if isinstance(tp_group, ReplicaShare) else ReplicaShare(tp_group, micro_batch_size)
        for tp_group in works
    ]
