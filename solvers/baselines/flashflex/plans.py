"""From FlashFlex's pipelines of TP groups to plans: layers and batches, as published or as released."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

from hexiopt.cost.executors.memory import UNSHARDED, StateSharding
from hexiopt.memo import Memo
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, schedules
from hexiopt.schedules.in_flight import holding, in_flight
from hexiopt.schedules.schedule import Schedule, largest_cycle_mean_s, positions
from hexiopt.solving import Pricer
from solvers.baselines._estimates import one_f_one_b_s
from solvers.baselines._plans import optimizer_shardings, pipeline_of, shift_layers
from solvers.baselines.flashflex.pricer import RULE_MICRO_BATCHES, FlashFlexPricer
from solvers.baselines.flashflex.published import SCHEDULES, OurMemory, Pipelines, intra_gb_per_s
from solvers.baselines.flashflex.released import StageSequence, memory_shares
from solvers.completion.batches import split_batch
from solvers.completion.layers import LayerSplitter

_RANKED = next(schedule for schedule in SCHEDULES if schedule.all_forwards_first)  # which its rule ranks plans by
_SIZES = 3  # micro-batch sizes tried: 1, 2, 4
_SLOW_MESSAGE = 0.01  # of a micro-batch's time in all stages, from which on messages count in the split of layers

# Schedule, micro-batch size, recompute policy, layers by measured times, ZeRO stage.
FlashFlexChoice = tuple[Schedule, int, str, bool, int]


class PartitionPlans(ABC):
    """Completes partitions into plans of one problem."""

    measured: tuple[bool, ...] = (False,)  # whose times split layers and batch: FlashFlex's or, measured, ours
    assumed = 0  # which of the ZeRO stages allowed its memory counts: the first, as of all states on each device

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.policies = recompute_policies(problem.workload)  # from least recompute to most
        self.schedules = [s for s in SCHEDULES if s in schedules(problem.workload)]

    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Micro-batch sizes to try."""

    @abstractmethod
    def complete(self, partition: Pipelines, choice: FlashFlexChoice) -> Plan | None:
        """The plan; None if it does not fit by the memory that splits its layers."""

    def plan(self, partition: Pipelines, choice: FlashFlexChoice) -> Plan | None:
        """The plan; None also if it would repeat another."""
        return self.complete(partition, choice)

    def published(self, partition: Pipelines) -> Plan | None:
        """The plan without what we choose for FlashFlex: by its own formulas, which count full recompute."""
        shardings = optimizer_shardings(self.problem, len(partition))
        by_formulas = (self.schedules[:1], self.sizes()[:1], self.policies[-1:], (False,), shardings)
        choices = list(product(*by_formulas))
        return self.complete(partition, choices[self.assumed]) if choices else None

    def choices(self, num_pipelines: int) -> list[FlashFlexChoice]:
        """All combinations of what FlashFlex does not choose, the likely ones first."""
        shardings = optimizer_shardings(self.problem, num_pipelines)
        return list(product(self.schedules, self.sizes(), self.policies, self.measured, shardings))


def plan_of_lines(
    partition: Pipelines,
    layers: Sequence[Sequence[int]],
    counts: Sequence[int],
    schedule: Schedule,
    size: int,
    policy: str,
    sharding: int,
) -> Plan:
    """The plan of pipelines with layers per stage and micro-batches per pipeline."""
    each = zip(partition, layers, counts, strict=True)
    pipelines = (pipeline_of(line, split, policy, count, size) for line, split, count in each)
    return Plan(tuple(pipelines), schedule, Sharding(sharding))


# As published.


class PublishedPlans(PartitionPlans):
    """Layers that make the slowest stage as fast as memory allows, and batches by the speed of pipelines."""

    measured = (True, False)
    assumed = -1  # as its search does (`published.py`)

    def __init__(self, problem: Problem, ours: Pricer) -> None:
        super().__init__(problem)
        even = not problem.space.uneven_layers
        self._pricers: dict[bool, Pricer] = {True: ours, False: OurMemory(problem)}
        self._splits: Memo[tuple[Any, ...], list[int] | None] = Memo(lambda key: self._split(*key))
        self._splitters = {
            (policy, measured): LayerSplitter(pricer, (policy,), even)
            for policy in self.policies
            for measured, pricer in self._pricers.items()
        }

    def sizes(self) -> Sequence[int]:
        """The smallest few, which are best by its formulas."""
        return self.problem.space.micro_batch_sizes(self.problem.workload.global_batch)[:_SIZES]

    def complete(self, partition: Pipelines, choice: FlashFlexChoice) -> Plan | None:
        """The plan, its batch split by the times that split its layers."""
        schedule, size, policy, measured, sharding = choice
        layers = self._layers(partition, *choice)
        counts = layers and self._counts(partition, layers, size, policy, measured)
        if not layers or not counts:
            return None
        return plan_of_lines(partition, layers, counts, schedule, size, policy, sharding)

    def plan(self, partition: Pipelines, choice: FlashFlexChoice) -> Plan | None:
        """The plan; None also if less recompute leads to the same layers."""
        schedule, size, policy, measured, sharding = choice
        layers = self._layers(partition, *choice)
        before = self.policies[: self.policies.index(policy)]
        if any(self._layers(partition, schedule, size, p, measured, sharding) == layers for p in before):
            return None
        return self.complete(partition, choice)

    def _layers(
        self, partition: Pipelines, schedule: Schedule, size: int, policy: str, measured: bool, sharding: int
    ) -> list[list[int]] | None:
        """Layers per stage of every pipeline; None if they do not fit."""
        shards = StateSharding(sharding, len(partition))
        batches = max(1, self.problem.workload.global_batch // (len(partition) * size))
        splits = []
        for line in partition:
            split = self._splits[line, schedule, size, policy, measured, shards, batches]
            if split is None:
                return None
            splits.append(split)
        return splits

    def _split(
        self,
        line: StageSequence,
        schedule: Schedule,
        size: int,
        policy: str,
        measured: bool,
        shards: StateSharding,
        batches: int,
    ) -> list[int] | None:
        pricer = self._pricers[measured]
        waits_s: tuple[float, ...] = ()
        if pricer.features.sends_occupy_stages:
            waits_s = (*(2.0 * pricer.message_s(a, b, size) for a, b in pairwise(line)), 0.0)
        tp_groups = [pricer.tp_group(group) for group in line]
        split = self._splitters[policy, measured].split(
            [frozenset((tp_group,)) for tp_group in tp_groups], size, schedule, batches, shards, waits_s
        )
        if isinstance(split, int):
            return None
        layers = [count for count, _ in split]
        if not measured or not schedule.shares_waits or not self.problem.space.uneven_layers:
            return layers
        # Slow messages between two stages hold up 1F1B unless those have fewer layers.
        message_s = [pricer.message_s(a, b, size) + pricer.message_s(b, a, size) for a, b in pairwise(line)]
        if max(message_s, default=0.0) < _SLOW_MESSAGE * sum(self._stages_s(line, layers, size, policy, measured)):
            return layers
        most = [
            pricer.max_layers(tp_group, at.first, at.last, size, policy, in_flight(schedule, at), shards)
            for tp_group, at in zip(tp_groups, positions(len(line), batches), strict=True)
        ]

        def seconds(trial: Sequence[int]) -> float:
            return one_f_one_b_s(self._stages_s(line, trial, size, policy, measured), message_s, batches)

        return list(shift_layers(layers, most, seconds)[0])

    def _stages_s(
        self, line: StageSequence, layers: Sequence[int], size: int, policy: str, measured: bool
    ) -> list[float]:
        """Seconds of each stage for one micro-batch."""
        pricer, last = self._pricers[measured], len(line) - 1
        return [
            sum(pricer.stage_s(pricer.tp_group(group), n, k == 0, k == last, size, policy))
            for k, (group, n) in enumerate(zip(line, layers, strict=True))
        ]

    def _counts(
        self, partition: Pipelines, layers: Sequence[Sequence[int]], size: int, policy: str, measured: bool
    ) -> list[int] | None:
        """Micro-batches per pipeline, of which m take about fill + m · period."""
        pricer = self._pricers[measured]
        fills, periods = [], []
        for line, split in zip(partition, layers, strict=True):
            stage_s = self._stages_s(line, split, size, policy, measured)
            message_s = [pricer.message_s(a, b, size) + pricer.message_s(b, a, size) for a, b in pairwise(line)]
            periods.append(
                largest_cycle_mean_s(stage_s, message_s)
                if measured
                else max(map(sum, zip(stage_s, (*message_s, 0.0), strict=True)))
            )
            fills.append(max(0.0, sum(stage_s) + sum(message_s) - periods[-1]))
        even = not self.problem.space.uneven_batch
        return split_batch(fills, periods, [size] * len(fills), self.problem.workload.global_batch, even=even)


# As released.


class ReleasedPlans(PartitionPlans):
    """Layers by the memory of stages, and equal batches whose micro-batch size is fixed by the initial number of
    pipelines."""

    def __init__(self, problem: Problem, start: int) -> None:
        super().__init__(problem)
        self._pricer = FlashFlexPricer(problem, intra_gb_per_s=intra_gb_per_s(problem))
        self._fixed = max(1, problem.workload.global_batch // RULE_MICRO_BATCHES // start)

    def sizes(self) -> Sequence[int]:
        """The largest size that the plan space allows, up to the fixed one."""
        batch = self.problem.workload.global_batch
        return [b for b in self.problem.space.micro_batch_sizes(batch) if b <= self._fixed and batch % b == 0][-1:]

    def estimate_s(self, partition: Pipelines) -> float:
        """Seconds of a step in which every pipeline has the same number of micro-batches of the fixed size."""
        layers = [memory_shares(self.problem, line) for line in partition]
        if not self.choices(len(partition)) or not all(map(self._fits, partition, layers)):
            return float("inf")
        counts = [RULE_MICRO_BATCHES] * len(partition)
        return self._pricer.price(plan_of_lines(partition, layers, counts, _RANKED, self._fixed, "full", 0)).step_time_s

    def _fits(self, line: StageSequence, layers: Sequence[int]) -> bool:
        """Whether a pipeline fits by FlashFlex's own memory formula."""
        last = len(line) - 1
        return all(
            1
            <= count
            <= self._pricer.max_layers(tp_group, k == 0, k == last, self._fixed, "full", holding(0), UNSHARDED)
            for k, (tp_group, count) in enumerate(zip(map(self._pricer.tp_group, line), layers, strict=True))
        )

    def complete(self, partition: Pipelines, choice: FlashFlexChoice) -> Plan | None:
        """The plan; None if there are fewer micro-batches than pipelines, or if a stage gets no layer."""
        schedule, size, policy, _, sharding = choice
        most = self.problem.workload.global_batch // size
        layers = [memory_shares(self.problem, line) for line in partition]
        if most < len(partition) or min(map(min, layers)) < 1:
            return None
        counts = [most // len(partition) + (k < most % len(partition)) for k in range(len(partition))]
        return plan_of_lines(partition, layers, counts, schedule, size, policy, sharding)
