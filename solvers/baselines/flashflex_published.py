"""The search of the published scheduler: HexiScale's two phases, iterated under FlashFlex's own formulas.

The phases are those of `solvers.metis`, our version of the same paper (arXiv 2409.01143, section 4), on all devices;
seconds are FlashFlex's (`flashflex_pricer.py`), memory is ours.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, schedules, sharding_stages
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.units import GB
from solvers.baselines.flashflex_pricer import FlashFlexPricer, Site
from solvers.baselines.flashflex_released import Line
from solvers.completion.completer import Builder
from solvers.core.partition import Bundle, Misfit, Structure
from solvers.core.search import Budget, Search
from solvers.heuristics.hexiscale import HierarchicalPartition

SCHEDULES = (ONE_F_ONE_B, GPIPE)  # of its runtime, by preference
MOST_SHARDING = 1
_KEPT = 32  # best partitions kept of each number of pipelines

Pipelines = tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Place(Site):
    """A site by FlashFlex's formulas, and by ours."""

    own: Any = None


class OurMemory(FlashFlexPricer):
    """FlashFlex's seconds, which are with full recompute whatever the policy, and our memory."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, intra_gb_per_s=intra_gb_per_s(problem))
        self._model = CostModel(problem)
        self._places: dict[tuple[int, ...], _Place] = {}

    def site(self, devices: tuple[int, ...]) -> _Place:
        """The site of a TP group."""
        found = self._places.get(devices)
        if found is None:
            base, own = super().site(devices), self._model.site(devices)
            found = _Place(base.flops, base.memory_bytes, base.tp, base.link_s_per_byte, own)
            self._places[devices] = found
        return found

    def stage_s(
        self, site: Site, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Seconds with full recompute."""
        return super().stage_s(site, num_layers, first, last, micro_batch_size, "full")

    def max_layers(
        self, site: Site, first: bool, last: bool, micro_batch_size: int, policy: str, held: InFlight, shards: Shards
    ) -> int:
        """The most layers that fit by our memory."""
        assert isinstance(site, _Place), "a site of this pricer"
        return self._model.max_layers(site.own, first, last, micro_batch_size, policy, held, shards)

    def policies(self) -> tuple[str, ...]:
        """Those that the workload allows."""
        return recompute_policies(self.problem.workload)

    def refuse(self, policy: str) -> None:
        """Nothing: a policy counts in memory alone."""


def intra_gb_per_s(problem: Problem) -> dict[str, float]:
    """GB/s inside machines by GPU type, as the cluster states them; with several, the least."""
    found: dict[str, float] = {}
    for machine in problem.cluster.machines:
        if machine.num_gpus > 1:
            rate = machine.intra_bandwidth_bytes_per_s / GB
            found[machine.gpu.name] = min(rate, found.get(machine.gpu.name, rate))
    return found


class _AllDevices(HierarchicalPartition):
    """The phases, with no device left out."""

    def _used(self, count: int) -> tuple[int, ...]:
        return tuple(range(len(self.problem.usable_devices)))


class _Recorder(Builder):
    """Keeps FlashFlex's seconds of all structures that leave no device out."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self.seconds: dict[Structure, float] = {}

    def price(self, structure: Structure, limit_s: float = float("inf")) -> tuple[Plan, Cost] | Misfit | None:
        """As the builder prices it, the stages of a machine together: links inside are the fattest."""
        structure = structure.with_bundles(map(self._along, structure.bundles))
        built = self.build(structure)
        if isinstance(built, Misfit):
            return built
        if structure not in self.seconds and structure.devices() == set(self.problem.usable_devices):
            self.seconds[structure] = self.pricer.price(built[0]).step_time_s
        return self.price_built(built[0], limit_s)

    def _along(self, bundle: Bundle) -> Bundle:
        machine_of = self.problem.cluster.machine_of
        machines = [int(machine_of[slot[0][0]]) for slot in bundle.stages]
        return bundle.with_stages(sorted(bundle.stages, key=lambda slot: machines.index(int(machine_of[slot[0][0]]))))


class PublishedSearch:
    """The phases iterated; what they found, and FlashFlex's seconds for it."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        workload = problem.workload
        schedule = next((s for s in SCHEDULES if s in schedules(workload)), None)
        sharding = max((s for s in sharding_stages(workload) if s <= MOST_SHARDING), default=None)
        self._recorder: _Recorder | None = None
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
        self._recorder = _Recorder(search)
        self._phases = _AllDevices(search, self._recorder, rng)

    def iterate(self) -> None:
        """One pass of both phases."""
        if self._recorder is not None:
            self._phases.iterate()

    def found(self) -> list[list[tuple[Pipelines, float]]]:
        """The best partitions of each number of pipelines, best first, with seconds of a step."""
        by_number: dict[int, list[tuple[float, Structure]]] = {}
        if self._recorder is not None:
            alike: set[tuple[Any, ...]] = set()
            for structure, seconds in self._recorder.seconds.items():
                looks = tuple(sorted(self._look(line) for line in _pipelines(structure)))
                if looks not in alike:
                    alike.add(looks)
                    by_number.setdefault(structure.num_pipelines, []).append((seconds, structure))
        return [
            [(_pipelines(structure), seconds) for seconds, structure in sorted(kept, key=lambda pair: pair[0])[:_KEPT]]
            for kept in by_number.values()
        ]

    def _look(self, line: Line) -> tuple[tuple[int, int], ...]:
        """A pipeline up to the names of devices in a machine: machine and TP degree of every stage."""
        machine_of = self._phases.problem.cluster.machine_of
        return tuple((int(machine_of[group[0]]), len(group)) for group in line)


def _pipelines(structure: Structure) -> Pipelines:
    return tuple(line for bundle in structure.bundles for line in zip(*bundle.stages, strict=True))
