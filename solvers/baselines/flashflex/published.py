"""The search of the published scheduler: HexiScale's two phases, iterated under FlashFlex's own formulas.

The phases are those of `hexiscale`, our version of the same paper (arXiv 2409.01143, section 4), on all devices;
seconds are FlashFlex's (`pricer.py`), memory is ours.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, schedules
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Budget
from hexiopt.units import GB
from solvers.baselines._plans import optimizer_shardings
from solvers.baselines.flashflex.pricer import FlashFlexPricer, FlashFlexTpGroup
from solvers.baselines.flashflex.released import StageSequence
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import PricedPlan
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Search
from solvers.heuristics.hexiscale import HierarchicalPartition

SCHEDULES = (ONE_F_ONE_B, GPIPE)  # of its runtime, by preference
_BEST = 32  # best partitions kept of each number of pipelines

Pipelines = tuple[StageSequence, ...]


@dataclass(frozen=True, slots=True)
class _OurTpGroup(FlashFlexTpGroup):
    """A TP group of FlashFlex's formulas, with the same one of our cost model."""

    ours: Any = None


class OurMemory(FlashFlexPricer):
    """Prices seconds by FlashFlex's formulas, with full recompute whatever the policy, and memory by ours."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, intra_gb_per_s=intra_gb_per_s(problem))
        self._model = PlanPricer(problem)
        self._places: Memo[tuple[int, ...], _OurTpGroup] = Memo(self._place)

    def tp_group(self, devices: tuple[int, ...]) -> _OurTpGroup:
        """The TP group that these devices form."""
        return self._places[devices]

    def _place(self, devices: tuple[int, ...]) -> _OurTpGroup:
        base, ours = super().tp_group(devices), self._model.tp_group(devices)
        return _OurTpGroup(base.flops, base.memory_bytes, base.tp, base.link_s_per_byte, ours)

    def stage_s(
        self, tp_group: FlashFlexTpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Seconds with full recompute."""
        return super().stage_s(tp_group, num_layers, first, last, micro_batch_size, "full")

    def max_layers(
        self,
        tp_group: FlashFlexTpGroup,
        first: bool,
        last: bool,
        micro_batch_size: int,
        policy: str,
        held: InFlight,
        shards: StateSharding,
    ) -> int:
        """The most layers that fit by our memory."""
        assert isinstance(tp_group, _OurTpGroup), "a TP group of this pricer"
        return self._model.max_layers(tp_group.ours, first, last, micro_batch_size, policy, held, shards)

    def policies(self) -> tuple[str, ...]:
        """The policies that the workload allows."""
        return recompute_policies(self.problem.workload)

    def refuse(self, policy: str) -> None:
        """Nothing: a policy counts in memory alone."""


def intra_gb_per_s(problem: Problem) -> dict[str, float]:
    """GB/s inside machines by GPU type as the cluster states them, the least of several."""
    least: dict[str, float] = {}
    for machine in problem.cluster.machines:
        if machine.num_gpus > 1:
            rate = machine.intra_bandwidth_bytes_per_s / GB
            least[machine.gpu.name] = min(rate, least.get(machine.gpu.name, rate))
    return least


class _AllDevices(HierarchicalPartition):
    """The phases, with no device left out; `seconds`: FlashFlex's, of all partitions."""

    def __init__(self, search: Search, rng: random.Random) -> None:
        super().__init__(search, PlanCompleter(search.pricer), rng)
        self.seconds: dict[Partition, float] = {}

    def _used(self, count: int) -> tuple[int, ...]:
        return tuple(range(len(self.problem.usable_devices)))

    def offer(self, partition: Partition, limit_s: float) -> PricedPlan | None:
        """With the stages of a machine together: links inside are the fattest."""
        if not self.completer.allowed(partition):
            return None
        partition = partition.with_pipeline_groups(map(self._along, partition.pipeline_groups))
        completed = self.completer.complete(partition)
        if not completed:
            return None
        if partition not in self.seconds and partition.devices() == set(self.problem.usable_devices):
            self.seconds[partition] = self.search.pricer.price(completed.plan).step_time_s
        return super().offer(partition, limit_s)

    def _along(self, pipeline_group: PipelineGroup) -> PipelineGroup:
        machine_of = self.problem.cluster.machine_of
        machines = [int(machine_of[stage_groups[0][0]]) for stage_groups in pipeline_group.stages]
        return pipeline_group.with_stages(
            sorted(pipeline_group.stages, key=lambda stage_groups: machines.index(int(machine_of[stage_groups[0][0]])))
        )


class PublishedSearch:
    """Iterates the phases and keeps what they find, with FlashFlex's seconds for it."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        workload = problem.workload
        schedule = next((s for s in SCHEDULES if s in schedules(workload)), None)
        sharding = max(optimizer_shardings(problem), default=None)  # the highest leaves most memory
        self._phases: _AllDevices | None = None
        if schedule is None or sharding is None:
            return
        # What FlashFlex does not choose is left out of its search: the most recompute leaves most room.
        fixed = replace(
            workload,
            schedule=schedule.name,
            recompute=recompute_policies(workload)[-1],
            optimizer_sharding=str(sharding),
        )
        narrowed = replace(problem, workload=fixed)
        search = Search("flashflex", narrowed, Budget(), 0, OurMemory(narrowed))
        self._phases = _AllDevices(search, rng)

    def iterate(self) -> None:
        """One pass of both phases."""
        if self._phases is not None:
            self._phases.iterate()

    def best_partitions(self) -> list[list[tuple[Pipelines, float]]]:
        """For each number of pipelines its best partitions, best first, with the seconds of a step."""
        by_number: dict[int, list[tuple[float, Partition]]] = {}
        if self._phases is not None:
            alike: set[tuple[Any, ...]] = set()
            machine_of = self._phases.problem.cluster.machine_of.tolist()
            for partition, seconds in self._phases.seconds.items():
                looks = tuple(sorted(_look(line, machine_of) for line in _pipelines(partition)))
                if looks not in alike:
                    alike.add(looks)
                    by_number.setdefault(partition.num_pipelines, []).append((seconds, partition))
        return [
            [(_pipelines(partition), seconds) for seconds, partition in sorted(pairs, key=lambda pair: pair[0])[:_BEST]]
            for pairs in by_number.values()
        ]


def _look(line: StageSequence, machine_of: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """A pipeline up to the names of devices in a machine: machine and TP degree of every stage."""
    return tuple((machine_of[group[0]], len(group)) for group in line)


def _pipelines(partition: Partition) -> Pipelines:
    return tuple(
        line for pipeline_group in partition.pipeline_groups for line in zip(*pipeline_group.stages, strict=True)
    )
