"""`sailor`: Sailor's planner (Strati et al., SOSP 2025, arXiv 2504.17096; released as github.com/eth-easl/sailor).

Can express: any subset of the devices; one data-parallel degree D for all stages, so that the k-th replicas of all
stages make a pipeline; per stage and replica its own GPU type and TP degree, inside a machine; one micro-batch size
for all; 1F1B (it runs on Megatron-DeepSpeed); minimal step time, or minimal money under a deadline.

Cannot: layers by speed (a stage holds ⌊U/P⌋ of the U units of the model, the last U mod P stages one more; units are
the layers and, in the released code, embedding and head too: both are offered here); unequal batches of replicas;
unequal numbers of stages. It has one recompute policy and no sharding of its own; here one policy for the whole
plan, the best that the workload allows, and ZeRO-1 or none, as the workload allows.

Its search: for every P and micro-batch size the TP degree of a GPU type in a stage is the least that fits memory or
scales well (H1, H2); D falls from its largest value, skipping those that do not change the number of micro-batches
(H3); a dynamic programme over stages shares out the GPUs of each type, by straggler · (M−1) + Σ stages + messages
+ slowest gradient sync. With equal layers a straggler is one of few times, so the programme is replaced here by a
list: for each time, the least TP degrees that keep to it, and GPU types filling the stages in every order. The
estimate is the paper's, of the pipelines with equally many micro-batches, but for messages, which overlap as 1F1B
lets them, and gradients, which are summed when the executor sums them. Its zones are here the machines that links
of some rate join, tried one by one and all together; fees between zones are left out.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from hexiopt.plan.plan import Sharding
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._estimates import GridEstimates, StageTpGroups
from solvers.baselines._frame import BestEstimate, PlanCandidate, SearchLimits, best_first
from solvers.baselines._grids import Area, StageGrid, fill_slots, linked_areas, orders_of
from solvers.baselines._money import MoneyBaseline, Objective
from solvers.baselines._plans import aligned_plan, even_parts, in_flight_of_1f1b, one_f_one_b, optimizer_shardings
from solvers.core.search import Search
from solvers.frame.starts import machine_classes

_STRAGGLERS = 3  # stragglers tried of each shape, the least first, and for money as many of the others
_TRIED = 4  # placements after which an area is left, where all are much above the best estimate
_HOPELESS = 1.3  # how much

Fitting = list[list[list[tuple[int, float]]]]  # per stage and machine class: TP degrees, each with the stage's seconds
Degrees = list[list[int]]  # TP degree per stage and machine class; 0 where the class does not serve the stage


def splits(num_layers: int, stages: int) -> list[tuple[int, ...]]:
    """Layers per stage, with and without embedding and head counted as a unit each; none if a stage would be empty."""
    ways = []
    for ends in (1, 0):
        low, more = divmod(num_layers + 2 * ends, stages)
        layers = [low + (s >= stages - more) for s in range(stages)]
        layers[0] -= ends
        layers[-1] -= ends
        if min(layers) > 0:
            ways.append(tuple(layers))
    return list(dict.fromkeys(ways))


@dataclass(frozen=True, slots=True)
class _Shape:
    """All choices except the devices.

    `batches` counts the micro-batches of all pipelines; `tp` is set if one degree is required; `sharding` is the ZeRO
    stage.
    """

    pipelines: int
    layers: tuple[int, ...]
    size: int
    batches: int
    policy: str
    sharding: int
    tp: int | None

    @property
    def longest(self) -> int:
        """Micro-batches of the longest pipeline."""
        return -(-self.batches // self.pipelines)


@dataclass(frozen=True)
class Sailor(MoneyBaseline):
    """Sailor (SOSP 2025): devices, types and degrees of every replica.

    Opens shapes in the order of a lower bound; every placement of a shape is estimated.
    """

    name = "sailor"
    limits = SearchLimits(slack=1.3, max_candidates=16000)

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """The placements of all shapes whose bound is not clearly above the best estimate."""
        problem = run.problem
        schedule = one_f_one_b(problem)
        if schedule is None:
            return
        planner, best = _Planner(GridEstimates(run.pricer), self.objective_of(problem)), BestEstimate()
        expand = partial(_placements, planner, schedule, best)
        yield from best_first(run, planner.shapes(), expand, self.limits, best)


def _placements(planner: "_Planner", schedule: Schedule, best: BestEstimate, shape: _Shape) -> Iterator[PlanCandidate]:
    """The placements of a shape, area by area, for the least stragglers that leave any."""
    batches, sharding = even_parts(shape.batches, shape.pipelines), Sharding(shape.sharding)
    for area in planner.areas:
        stragglers = 0
        for degrees in planner.degrees(shape, area):
            least = math.inf
            for tried, grid in enumerate(planner.placements(shape, degrees, area)):
                estimate = planner.estimate(shape, grid)
                least = min(least, estimate)
                whole = (grid.stages, shape.layers, shape.policy, batches, shape.size, schedule, sharding)
                yield PlanCandidate(estimate, partial(aligned_plan, *whole))
                if tried >= _TRIED and least > _HOPELESS * best.seconds:
                    break
            stragglers += least < math.inf
            if stragglers >= _STRAGGLERS * planner.sides:
                break


class _Planner:
    """The search for one problem."""

    def __init__(self, times: GridEstimates, objective: Objective) -> None:
        self.times, self.objective = times, objective
        self.sides = 1 if objective.prices is None else 2  # ends of the list of stragglers that are tried
        self.problem = problem = times.problem
        devices = problem.usable_by_machine
        self.members = machine_classes(problem)
        self.classes = [[devices[m] for m in members] for members in self.members]
        self.areas = linked_areas(problem)
        self._fitted: tuple[_Shape | None, Fitting] = (None, [])  # of the latest shape
        self._near = (False, True) if len(self.areas) > 1 else (False,)
        self.tp_groups: list[dict[int, StageTpGroups]] = [
            {tp: frozenset([times.pricer.tp_group(alike[0][:tp])]) for tp in problem.space.allowed_tp(len(alike[0]))}
            for alike in self.classes
        ]

    def shapes(self) -> list[tuple[float, _Shape]]:
        """All shapes with a lower bound of their objective, the least first."""
        problem, bounded = self.problem, []
        space, workload = problem.space, problem.workload
        usable = len(problem.usable_devices)
        degrees = [None] if space.uneven_tp else sorted({tp for tp_groups in self.tp_groups for tp in tp_groups})
        for size in space.micro_batch_sizes(workload.global_batch):
            batches, rest = divmod(workload.global_batch, size)
            if rest:
                continue
            for policy in self.times.pricer.policies():
                for tp in degrees:
                    offers = self._offers(size, policy, tp)
                    for stages in range(1, min(usable, problem.model.num_layers) + 1):
                        if space.num_stages not in (None, stages):
                            continue
                        for pipelines in self._widths(batches, usable // stages):
                            if not offers or offers[-1][1] < stages * pipelines:
                                continue
                            slowest_s = _slowest_s(offers, stages, even_parts(batches, pipelines))
                            shardings = optimizer_shardings(problem, pipelines)
                            for layers, sharding in product(splits(problem.model.num_layers, stages), shardings):
                                shape = _Shape(pipelines, layers, size, batches, policy, sharding, tp)
                                least_s = max(layers) * slowest_s + problem.model.num_layers * offers[0][0]
                                bounded.append((self.objective.lower_bound(stages * pipelines, least_s), shape))
        return sorted((pair for pair in bounded if pair[0] < float("inf")), key=lambda pair: pair[0])

    def _widths(self, batches: int, most: int) -> list[int]:
        """Data-parallel degrees; of several with equally many micro-batches a pipeline, the least (H3)."""
        asked = self.problem.space.num_pipelines
        if asked is not None:
            return [asked] if asked <= min(most, batches) else []
        return [d for d in range(1, min(most, batches) + 1) if d == 1 or -(-batches // d) < -(-batches // (d - 1))]

    def _offers(self, size: int, policy: str, tp: int | None) -> list[tuple[float, int]]:
        """Pairs (seconds of a layer, number of TP groups in the cluster at least as fast), the slowest last."""
        layer_s = [
            {
                t: self.times.stage_s(tp_group, 1, False, False, size, policy)
                for t, tp_group in tp_groups.items()
                if tp in (None, t)
            }
            for tp_groups in self.tp_groups
        ]
        pairs = []
        for limit in sorted({s for by_tp in layer_s for s in by_tp.values()}):
            room = 0
            for alike, by_tp in zip(self.classes, layer_s, strict=True):
                least = min((t for t, s in by_tp.items() if s <= limit), default=None)
                room += sum(len(machine) // least for machine in alike) if least else 0
            pairs.append((limit, room))
        return pairs

    def degrees(self, shape: _Shape, area: Area) -> list[Degrees]:
        """TP degrees for the least few stragglers that may leave enough TP groups in an area; for money in turns with
        those for the longest that the deadline allows, which take the fewest GPUs.
        """
        if self._fitted[0] is not shape:
            self._fitted = (shape, self._fitting(shape))
        fitting = self._fitted[1]
        limits_s = sorted({seconds for by_class in fitting for options in by_class for _, seconds in options})
        # The longer the straggler may take, the smaller the degrees and the more groups: the least is found by halving.
        first = bisect_left(limits_s, True, key=lambda limit_s: self._enough(shape, area, _least(fitting, limit_s)))
        shortest = shape.batches // shape.pipelines
        rising = [limit_s for limit_s in limits_s[first:] if limit_s * shortest <= self.objective.latest_s]
        ends = [order[: 2 * _STRAGGLERS] for order in (rising, rising[::-1])[: self.sides]]
        return [_least(fitting, limit_s) for limit_s in dict.fromkeys(chain.from_iterable(zip(*ends, strict=True)))]

    def placements(self, shape: _Shape, degrees: Degrees, area: Area) -> Iterator[StageGrid]:
        """Placements of `shape` on an area, which machine classes fill in every order."""
        devices = self.problem.usable_by_machine
        free = [[devices[m] for m in members if m in area] for members in self.members]
        seen: set[StageGrid] = set()
        for order, along, near in product(orders_of(range(len(self.classes))), (False, True), self._near):
            wanted = [[(c, by_class[c]) for c in order if by_class[c]] for by_class in degrees]
            grid = fill_slots(self.problem, free, wanted, shape.pipelines, along=along, near=near)
            if grid is None:
                continue
            if shape.batches % shape.pipelines:  # the first pipelines have a micro-batch more
                grid = grid.of(sorted(range(grid.width), key=partial(self._straggler_s, shape, grid)))
            if grid not in seen:
                seen.add(grid)
                yield grid

    def _straggler_s(self, shape: _Shape, grid: StageGrid, pipeline: int) -> float:
        """Seconds of the slowest stage of one of a grid's pipelines."""
        return max(self.times.stages_s(grid.of([pipeline]), shape.policy, shape.size)(shape.layers))

    def estimate(self, shape: _Shape, grid: StageGrid) -> float:
        """The objective of a step, by its estimate."""
        batches = even_parts(shape.batches, shape.pipelines)
        seconds = self.times.step_s(grid, shape.layers, shape.policy, batches, shape.size, shape.sharding)
        return self.objective.of(grid.devices(), seconds)

    def _fitting(self, shape: _Shape) -> Fitting:
        """The TP degrees that fit memory, ascending, with the seconds of the stage, for each stage and class."""
        stages = len(shape.layers)
        shards = shape.pipelines if shape.sharding else 1
        options = []
        for s, n in enumerate(shape.layers):
            ends = s == 0, s == stages - 1
            held = in_flight_of_1f1b(s, stages, shape.longest)
            options.append(
                [
                    [
                        (tp, self.times.stage_s(tp_group, n, *ends, shape.size, shape.policy))
                        for tp, tp_group in by_tp.items()
                        if shape.tp in (None, tp)
                        and self.times.max_layers[tp_group, *ends, shape.size, shape.policy, held, shards] >= n
                    ]
                    for by_tp in self.tp_groups
                ]
            )
        return options

    def _enough(self, shape: _Shape, area: Area, degrees: Degrees) -> bool:
        """Whether there may be enough TP groups: every stage has one, and all replicas fit at the least degrees."""
        if not all(any(by_class) for by_class in degrees):
            return False
        room = 0
        devices = self.problem.usable_by_machine
        for members, by_stage in zip(self.members, zip(*degrees, strict=True), strict=True):
            least = min((tp for tp in by_stage if tp), default=0)
            room += sum(len(devices[m]) // least for m in members if m in area) if least else 0
        return room >= len(shape.layers) * shape.pipelines


def _slowest_s(offers: Sequence[tuple[float, int]], stages: int, batches: Sequence[int]) -> float:
    """The least seconds of a layer of the slowest stage in all micro-batches but one of a pipeline; `batches` of each
    pipeline, the most first."""
    return max(
        (count - 1) * next(layer_s for layer_s, room in offers if room >= stages * pipelines)
        for pipelines, count in enumerate(batches, 1)
    )


def _least(fitting: Fitting, limit_s: float) -> Degrees:
    """The least TP degree of each class that keeps to `limit_s` in each stage; 0 where there is none."""
    return [[next((tp for tp, s in options if s <= limit_s), 0) for options in by_class] for by_class in fitting]
