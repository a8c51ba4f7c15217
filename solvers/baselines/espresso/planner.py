"""Espresso's planner (see `espresso.py`): how many stages each GPU type gets, their order, layers and devices."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from hexiopt.memo import Memo
from hexiopt.plan.token_layout import Floats, Ints
from solvers.baselines._estimates import GridEstimates, StageTpGroups
from solvers.baselines._grids import Area, StageGrid, fill_slots, orders_of
from solvers.baselines._money import Objective
from solvers.baselines._plans import (
    balanced_layers,
    dividing_sizes,
    in_flight_of_1f1b,
    neighbouring_layers,
    optimizer_shardings,
)
from solvers.core.partition import DeviceGroup
from solvers.core.search import Search
from solvers.frame.starts import cut, machine_classes

_ALL_ORDERS = 5  # stages up to which all their orders are tried
_ALLOCATIONS = 150  # allocations kept of each choice of degrees, micro-batch and policy
_COUNTS = 200_000_000  # numbers in the table of all allocations: 1.5 GiB
_MACHINE_ORDERS = 40  # orders of machines that are drawn


@dataclass(frozen=True, slots=True)
class EspressoChoice:
    """What is chosen once for all stages."""

    tp: int
    dp: int
    size: int
    policy: str
    sharding: int  # the ZeRO stage
    count: int  # micro-batches of a pipeline


@dataclass(frozen=True, slots=True)
class EspressoAllocation:
    """How many stages each GPU type gets."""

    choice: EspressoChoice
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EspressoPlacement:
    """A whole plan: the GPU type, the TP groups and the layers of each stage."""

    choice: EspressoChoice
    order: tuple[int, ...]
    grid: StageGrid
    layers: tuple[int, ...]


def _numbers(most: Sequence[int]) -> list[Ints]:
    """Numbers of stages of each type, up to `most`: all of them, or evenly spaced ones where there would be more than
    `_COUNTS` numbers in all combinations, as of eight types."""
    points = [n + 1 for n in most]
    while math.prod(points) * len(points) > _COUNTS:
        widest = max(range(len(points)), key=points.__getitem__)
        points[widest] = (points[widest] + 1) // 2
    return [np.unique(np.linspace(0, n, p).round().astype(np.int64)) for n, p in zip(most, points, strict=True)]


class EspressoPlanner:
    """The search in one area. GPU types are numbered, the slowest first."""

    def __init__(self, times: GridEstimates, objective: Objective, area: Area) -> None:
        self.times, self.objective = times, objective
        self.problem = problem = times.problem
        self.machines: list[list[tuple[int, ...]]] = []
        names: dict[str, int] = {}
        for m in (m for members in machine_classes(problem) for m in members if m in area):
            name = problem.cluster.machines[m].gpu.name
            if name not in names:
                names[name] = len(names)
                self.machines.append([])
            self.machines[names[name]].append(problem.usable_by_machine[m])
        if (prices := objective.prices) is not None:
            for machines in self.machines:
                machines.sort(key=lambda devices: prices[devices[0]])
        self._near = (False, True) if problem.cluster.groups or problem.cluster.links else (False,)
        # TP groups by degree for each type; and of a (degree, type), those that cost the same once.
        self.groups: Memo[int, list[list[DeviceGroup]]] = Memo(self._groups)
        self.tp_groups: Memo[tuple[int, int], StageTpGroups] = Memo(lambda key: self._tp_groups(*key))

    def _groups(self, tp: int) -> list[list[DeviceGroup]]:
        allowed = self.problem.space.allowed_tp
        return [
            [group for devices in machines if tp in allowed(len(devices)) for group in cut(devices, tp)]
            for machines in self.machines
        ]

    def most_stages(self, choice: EspressoChoice) -> list[int]:
        """The most stages for which each type has TP groups."""
        return [len(groups) // choice.dp for groups in self.groups[choice.tp]]

    def _tp_groups(self, tp: int, kind: int) -> StageTpGroups:
        return frozenset(self.times.pricer.tp_group(group) for group in self.groups[tp][kind])

    def layer_s(self, choice: EspressoChoice, kind: int) -> float:
        """Seconds of a layer on a type."""
        return self.times.stage_s(self.tp_groups[choice.tp, kind], 1, False, False, choice.size, choice.policy)

    def choices(self, policies: Sequence[str]) -> Iterator[EspressoChoice]:
        """All choices whose pipelines share the global batch equally."""
        problem, batch = self.problem, self.problem.workload.global_batch
        degrees = {
            tp for machines in self.machines for devices in machines for tp in problem.space.allowed_tp(len(devices))
        }
        for tp in sorted(degrees):
            for dp in range(1, max(map(len, self.groups[tp])) + 1):
                if problem.space.num_pipelines not in (None, dp):
                    continue
                shardings = optimizer_shardings(problem, dp)
                for size, policy, sharding in product(dividing_sizes(problem, dp), policies, shardings):
                    yield EspressoChoice(tp, dp, size, policy, sharding, batch // (dp * size))

    def allocations(self, run: Search) -> list[tuple[float, EspressoAllocation]]:
        """Allocations with lower bounds of their objective, the least bound first."""
        bounded: list[tuple[float, EspressoAllocation]] = []
        asked, layers = self.problem.space.num_stages, self.problem.model.num_layers
        for choice in self.choices(run.pricer.policies()):
            if not run.should_continue():
                break
            most = self.most_stages(choice)
            counts = np.stack(np.meshgrid(*_numbers(most), indexing="ij"), -1).reshape(-1, len(most))
            stages = counts.sum(axis=1)
            counts = counts[(stages == asked) if asked else (stages > 0) & (stages <= layers)]
            if not len(counts):
                continue
            layer_s = np.array([self.layer_s(choice, k) if n else np.inf for k, n in enumerate(most)])
            slowest_s = layers / (counts / layer_s).sum(axis=1)
            seconds = (choice.count - 1) * slowest_s + layers * layer_s.min()
            bounds = self._lower_bounds(choice, counts, seconds)
            for k in np.argsort(bounds, kind="stable")[:_ALLOCATIONS]:
                if bounds[k] < np.inf:
                    bounded.append((float(bounds[k]), EspressoAllocation(choice, tuple(counts[k].tolist()))))
        return sorted(bounded, key=lambda pair: pair[0])

    def _lower_bounds(self, choice: EspressoChoice, counts: Ints, seconds: Floats) -> Floats:
        """Lower bounds of the objective of allocations [n, types] that take `seconds` [n] or longer."""
        if self.objective.prices is None:
            return seconds
        price = np.zeros(len(counts))
        for k, groups in enumerate(self.groups[choice.tp]):
            each = [sum(self.objective.prices[d] for d in group) for group in groups]
            price += np.concatenate([[0.0], np.cumsum(each)])[counts[:, k] * choice.dp]
        return np.where(seconds > self.objective.latest_s, np.inf, price * seconds)

    def orders(self, allocation: EspressoAllocation) -> list[tuple[int, ...]]:
        """Orders of GPU types by stage: by the ratio of compute to memory, with types together, and for a few stages
        all."""
        count = allocation.stages
        present = [k for k, n in enumerate(count) if n]
        tried = [self._by_ratio(allocation)]
        tried += [tuple(k for k in order for _ in range(count[k])) for order in orders_of(present)]
        if sum(count) <= _ALL_ORDERS:
            tried += permutations(k for k in present for _ in range(count[k]))
        return list(dict.fromkeys(tried))

    def machine_orders(self, allocation: EspressoAllocation) -> list[tuple[int, ...]]:
        """Some of the orders in which only the stages of a machine stay together."""
        blocks: list[tuple[int, ...]] = []
        for kind, count in enumerate(allocation.stages):
            groups = max((len(devices) for devices in self.machines[kind]), default=1) // allocation.choice.tp
            size = max(1, groups // allocation.choice.dp)
            blocks += [(kind,) * min(size, count - at) for at in range(0, count, size)]
        rng, drawn = random.Random(len(blocks)), dict[tuple[int, ...], None]()
        for _ in range(_MACHINE_ORDERS):
            rng.shuffle(blocks)
            drawn[tuple(kind for block in blocks for kind in block)] = None
        return list(drawn)

    def _by_ratio(self, allocation: EspressoAllocation) -> tuple[int, ...]:
        """Types by the ratio of their compute to the layers that fit, the least first: first stages hold most micro-
        batches."""
        choice, left, stages, order = allocation.choice, list(allocation.stages), sum(allocation.stages), list[int]()
        rate = {k: 1.0 / self.layer_s(choice, k) for k, n in enumerate(left) if n}
        while len(order) < stages:
            fitting = {k: self._max_layers_of(choice, k, len(order), stages) for k in rate if left[k]}
            order.append(min(fitting, key=lambda k: (rate[k] / max(fitting[k], 0.5), k)))
            left[order[-1]] -= 1
        return tuple(order)

    def _max_layers_of(self, choice: EspressoChoice, kind: int, position: int, stages: int) -> int:
        held = in_flight_of_1f1b(position, stages, choice.count)
        ends = position == 0, position == stages - 1
        shards = choice.dp if choice.sharding else 1
        return self.times.max_layers[self.tp_groups[choice.tp, kind], *ends, choice.size, choice.policy, held, shards]

    def layers(self, choice: EspressoChoice, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Layers per stage that make the slowest as fast as memory allows, and neighbouring splits; none if nothing
        fits."""
        return balanced_layers(self.times.layer_times_s(*self._stages(choice, order)), self.problem.model.num_layers)

    def max_layers(self, choice: EspressoChoice, order: Sequence[int]) -> list[int]:
        """The most layers of each stage."""
        most = self.times.max_layers_by_stage(*self._stages(choice, order))
        return [min(self.problem.model.num_layers, n) for n in most]

    def _stages(self, choice: EspressoChoice, order: Sequence[int]) -> tuple[list[StageTpGroups], int, str, int, int]:
        """What decides how many layers fit: TP groups by stage, size, policy, micro-batches, holders of states."""
        tp_groups = [self.tp_groups[choice.tp, kind] for kind in order]
        return tp_groups, choice.size, choice.policy, choice.count, choice.dp if choice.sharding else 1

    def _grids(self, choice: EspressoChoice, order: Sequence[int]) -> list[StageGrid]:
        """TP groups for the stages: neighbours share a stage or a pipeline; where links differ, also the nearest
        groups."""
        wanted = [[(kind, choice.tp)] for kind in order]
        ways = (
            fill_slots(self.problem, self.machines, wanted, choice.dp, along=along, near=near)
            for along, near in product((False, True), self._near)
        )
        return [grid for grid in dict.fromkeys(ways) if grid is not None]

    def placements(self, choice: EspressoChoice, order: tuple[int, ...]) -> Iterator[EspressoPlacement]:
        """All placements of an order; those with neighbouring splits come last."""
        grids = self._grids(choice, order)
        return (
            EspressoPlacement(choice, order, grid, layers) for layers in self.layers(choice, order) for grid in grids
        )

    def evaluate(self, placement: EspressoPlacement) -> float:
        """The objective of a step, by its estimate."""
        choice, grid = placement.choice, placement.grid
        batches = [choice.count] * choice.dp
        seconds = self.times.step_s(grid, placement.layers, choice.policy, batches, choice.size, choice.sharding)
        return self.objective.of(grid.devices(), seconds)

    def refine(self, placement: EspressoPlacement) -> EspressoPlacement:
        """The placement with layers moved while its estimate falls."""
        choice, most = placement.choice, self.max_layers(placement.choice, placement.order)
        pipelines = choice.policy, choice.count, choice.size
        return replace(placement, layers=self.times.refine(placement.grid, placement.layers, most, *pipelines))

    def neighbours(self, placement: EspressoPlacement) -> Iterator[EspressoPlacement]:
        """Placements one change away: a layer, two neighbouring stages, the policy, the micro-batch or ZeRO."""
        choice, order = placement.choice, placement.order
        for layers in neighbouring_layers(placement.layers, self.max_layers(choice, order)):
            yield replace(placement, layers=layers)
        for s in range(len(order) - 1):
            if order[s] != order[s + 1]:
                yield from self.placements(choice, (*order[:s], order[s + 1], order[s], *order[s + 2 :]))
        for other in self.choices(self.times.pricer.policies()):
            alike = (other.tp, other.dp) == (choice.tp, choice.dp)
            changed = (other.size != choice.size, other.policy != choice.policy, other.sharding != choice.sharding)
            if alike and sum(changed) == 1:
                yield from self.placements(other, order)
