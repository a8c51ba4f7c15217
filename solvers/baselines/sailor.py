"""`sailor`: Sailor's planner (Strati et al., SOSP 2025, arXiv 2504.17096; released as github.com/eth-easl/sailor).

Can express: any subset of the devices; one data-parallel degree D for all stages, so that the k-th replicas of all
stages make a pipeline; per stage and replica its own GPU type and TP degree, inside a machine; one micro-batch size
for all; 1F1B (it runs on Megatron-DeepSpeed); minimal step time, or minimal money under a deadline.

Cannot: layers by speed (a stage holds ⌊U/P⌋ of the U units of the model, the last U mod P stages one more; units are
the layers and, in the released code, embedding and head too: both are offered here); unequal batches of replicas;
unequal numbers of stages. It has one recompute policy and no sharding of its own; here one policy for the whole
plan, the best that the workload allows, and ZeRO-1 where it is allowed.

Its search: for every P and micro-batch size the TP degree of a GPU type in a stage is the least that fits memory or
scales well (H1, H2); D falls from its largest value, skipping those that do not change the number of micro-batches
(H3); a dynamic programme over stages shares out the GPUs of each type, by straggler · (M−1) + Σ stages + messages
+ slowest gradient sync. With equal layers a straggler is one of few times, so the programme is replaced here by a
list: for each time, the least TP degrees that keep to it, and GPU types filling the stages in every order. The
estimate is the paper's, but for messages, which overlap as 1F1B lets them. Its zones are here the machines that links
of some rate join, tried one by one and all together; fees between zones are left out.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product

from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from solvers.baselines.aligned import (
    AlignedEstimates,
    Slots,
    aligned_plan,
    dealt_batches,
    filled,
    one_f_one_b,
    optimizer_sharding,
    unaligned,
)
from solvers.baselines.areas import Area, linked_areas
from solvers.baselines.estimate import Sites
from solvers.baselines.frame import Candidate
from solvers.baselines.grid import machine_classes
from solvers.baselines.renting import Renting, Worth
from solvers.core.partition import Group
from solvers.core.search import Search

_MOST_PERMUTED = 4  # machine classes whose orders are all tried
_SLACK = 1.3  # shapes whose bound is this much above the best estimate are left out
_STRAGGLERS = 3  # stragglers tried of each shape, the least first
_TRIED = 4  # placements after which an area is left, where all are much above the best estimate
_HOPELESS = 1.3  # how much
_MOST = 8000  # placements estimated

Fitting = list[list[list[tuple[int, float]]]]  # per stage and machine class: TP degrees, each with the stage's seconds
Degrees = list[list[int]]  # TP degree per stage and machine class; 0 where the class does not serve the stage


def splits(num_layers: int, stages: int) -> list[tuple[int, ...]]:
    """Layers per stage, with and without embedding and head as a unit each; none where a stage would have no layer."""
    found = []
    for ends in (1, 0):
        low, more = divmod(num_layers + 2 * ends, stages)
        layers = [low + (s >= stages - more) for s in range(stages)]
        layers[0] -= ends
        layers[-1] -= ends
        if min(layers) > 0:
            found.append(tuple(layers))
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class _Shape:
    """Everything but the devices; `batches` micro-batches of all pipelines, `tp` where one degree is asked for."""

    pipelines: int
    layers: tuple[int, ...]
    size: int
    batches: int
    policy: str
    tp: int | None

    @property
    def longest(self) -> int:
        """Micro-batches of the longest pipeline."""
        return -(-self.batches // self.pipelines)


@dataclass(frozen=True)
class Sailor(Renting):
    """Shapes in the order of a bound, each with its placements."""

    name = "sailor"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """Placements until the bound of a shape is clearly above the best estimate."""
        problem = search.problem
        schedule, sharding = one_f_one_b(problem), optimizer_sharding(problem)
        if schedule is None or sharding is None:
            return
        planner = _Planner(AlignedEstimates(search.pricer), sharding, self.worth(problem))
        best, count = float("inf"), 0
        for bound, shape in planner.shapes():
            if bound > _SLACK * best or count > _MOST or not search.go_on():
                break
            for area in planner.areas:
                stragglers = 0
                for degrees in planner.degrees(shape, area):
                    least = float("inf")
                    for tried, slots in enumerate(planner.placements(shape, degrees, area)):
                        count += 1
                        estimate = planner.estimate(shape, slots)
                        least, best = min(least, estimate), min(best, estimate)
                        deal = dealt_batches(shape.batches, shape.pipelines)
                        choice = (slots, shape.layers, shape.policy, deal, shape.size, schedule, sharding)
                        yield Candidate(estimate, partial(aligned_plan, *choice))
                        if tried >= _TRIED and least > _HOPELESS * best:
                            break
                    stragglers += least < float("inf")
                    if stragglers >= _STRAGGLERS:
                        break

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        broken = unaligned(plan)
        if broken is not None:
            return broken
        layers = tuple(stage.num_layers for stage in plan.pipelines[0].stages)
        return None if layers in splits(problem.model.num_layers, len(layers)) else f"layers {layers}"

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """Random degrees, and random devices for every replica; of one TP degree a machine half of the time."""
        schedule, sharding = one_f_one_b(problem), optimizer_sharding(problem)
        sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
        size = rng.choice(sizes)
        stages = rng.randint(1, min(problem.model.num_layers, len(problem.usable_devices)))
        pipelines = rng.randint(1, max(1, len(problem.usable_devices) // stages))
        batches, rest = divmod(problem.workload.global_batch, size)
        layers = splits(problem.model.num_layers, stages)
        if schedule is None or sharding is None or rest or batches < pipelines or not layers:
            return None
        free = {m: list(own) for m, own in problem.usable_by_machine.items()}
        fixed = {m: rng.choice(problem.space.allowed_tp(len(own))) for m, own in free.items()}
        one_degree = rng.random() < 0.5
        groups: list[Group] = []
        while len(groups) < stages * pipelines:
            able = [m for m, own in free.items() if own and (not one_degree or len(own) >= fixed[m])]
            if not able:
                return None
            machine = rng.choice(able)
            own = free[machine]
            degrees = [t for t in problem.space.allowed_tp(len(own)) if t <= len(own)]
            tp = fixed[machine] if one_degree else rng.choice(degrees)
            groups.append(tuple(own[:tp]))
            del own[:tp]
        if rng.random() < 0.5:
            groups.sort()
        slots = tuple(tuple(groups[s * pipelines : (s + 1) * pipelines]) for s in range(stages))
        policy = rng.choice(recompute_policies(problem.workload))
        deal = dealt_batches(batches, pipelines)
        return aligned_plan(slots, rng.choice(layers), policy, deal, size, schedule, sharding)


class _Planner:
    """The search for one problem."""

    def __init__(self, times: AlignedEstimates, sharding: int, worth: Worth) -> None:
        self.times, self.sharding, self.worth = times, sharding, worth
        self.problem = problem = times.problem
        devices = problem.usable_by_machine
        self.members = machine_classes(problem)
        self.classes = [[devices[m] for m in members] for members in self.members]
        self.areas = linked_areas(problem)
        self._fitted: tuple[_Shape | None, Fitting] = (None, [])  # of the latest shape
        self._near = (False, True) if len(self.areas) > 1 else (False,)
        self.sites: list[dict[int, Sites]] = [
            {tp: frozenset([times.pricer.site(own[0][:tp])]) for tp in problem.space.allowed_tp(len(own[0]))}
            for own in self.classes
        ]

    def shapes(self) -> list[tuple[float, _Shape]]:
        """All shapes with a bound on their worth, the least first."""
        problem, found = self.problem, []
        space, workload = problem.space, problem.workload
        usable = len(problem.usable_devices)
        degrees = [None] if space.uneven_tp else sorted({tp for sites in self.sites for tp in sites})
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
                            layer_s = next((s for s, room in offers if room >= stages * pipelines), None)
                            if layer_s is None:
                                continue
                            for layers in splits(problem.model.num_layers, stages):
                                shape = _Shape(pipelines, layers, size, batches, policy, tp)
                                least_s = (shape.longest - 1) * max(layers) * layer_s
                                least_s += problem.model.num_layers * offers[0][0]
                                found.append((self.worth.at_least(stages * pipelines, least_s), shape))
        return sorted((pair for pair in found if pair[0] < float("inf")), key=lambda pair: pair[0])

    def _widths(self, batches: int, most: int) -> list[int]:
        """Data-parallel degrees; of those with equally many micro-batches the least (H3)."""
        asked = self.problem.space.num_pipelines
        if asked is not None:
            return [asked] if asked <= min(most, batches) else []
        return [d for d in range(1, min(most, batches) + 1) if d == 1 or -(-batches // d) < -(-batches // (d - 1))]

    def _offers(self, size: int, policy: str, tp: int | None) -> list[tuple[float, int]]:
        """(seconds of a layer, TP groups in the cluster that are as fast), slowest last."""
        layer_s = [
            {t: self.times.stage_s(site, 1, False, False, size, policy) for t, site in sites.items() if tp in (None, t)}
            for sites in self.sites
        ]
        found = []
        for limit in sorted({s for by_tp in layer_s for s in by_tp.values()}):
            room = 0
            for own, by_tp in zip(self.classes, layer_s, strict=True):
                least = min((t for t, s in by_tp.items() if s <= limit), default=None)
                room += sum(len(machine) // least for machine in own) if least else 0
            found.append((limit, room))
        return found

    def degrees(self, shape: _Shape, area: Area) -> list[Degrees]:
        """TP degrees for some of the least stragglers that may leave enough TP groups in an area."""
        if self._fitted[0] is not shape:
            self._fitted = (shape, self._fitting(shape))
        fitting = self._fitted[1]
        limits_s = sorted({seconds for own in fitting for options in own for _, seconds in options})
        # The longer the straggler may take, the smaller the degrees and the more groups: the least is found by halving.
        first = bisect_left(limits_s, True, key=lambda limit_s: self._enough(shape, area, _least(fitting, limit_s)))
        return [_least(fitting, limit_s) for limit_s in limits_s[first : first + 2 * _STRAGGLERS]]

    def placements(self, shape: _Shape, degrees: Degrees, area: Area) -> Iterator[Slots]:
        """Devices of an area for `shape`, machine classes filling it in every order."""
        devices = self.problem.usable_by_machine
        free = [[devices[m] for m in members if m in area] for members in self.members]
        seen: set[Slots] = set()
        for order, along, near in product(self._orders(), (False, True), self._near):
            wanted = [[(c, own[c]) for c in order if own[c]] for own in degrees]
            slots = filled(self.problem, free, wanted, shape.pipelines, along=along, near=near)
            if slots is not None and slots not in seen:
                seen.add(slots)
                yield slots

    def estimate(self, shape: _Shape, slots: Slots) -> float:
        """What the placement is worth."""
        seconds = self.times.step_s(slots, shape.layers, shape.policy, shape.longest, shape.size)
        return self.worth.of((d for slot in slots for group in slot for d in group), seconds)

    def _fitting(self, shape: _Shape) -> Fitting:
        """Per stage and class, the TP degrees whose memory suffices, ascending, with the stage's seconds."""
        stages = len(shape.layers)
        shards = shape.pipelines if self.sharding else 1
        found = []
        for s, n in enumerate(shape.layers):
            ends = s == 0, s == stages - 1
            held = in_flight(ONE_F_ONE_B, StagePosition(s, stages, shape.longest))
            found.append(
                [
                    [
                        (tp, self.times.stage_s(site, n, *ends, shape.size, shape.policy))
                        for tp, site in by_tp.items()
                        if shape.tp in (None, tp)
                        and self.times.room(site, *ends, shape.size, shape.policy, held, shards) >= n
                    ]
                    for by_tp in self.sites
                ]
            )
        return found

    def _enough(self, shape: _Shape, area: Area, degrees: Degrees) -> bool:
        """Whether there may be enough TP groups: every stage served, and room for all replicas at the least degrees."""
        if not all(any(own) for own in degrees):
            return False
        room = 0
        devices = self.problem.usable_by_machine
        for members, by_stage in zip(self.members, zip(*degrees, strict=True), strict=True):
            least = min((tp for tp in by_stage if tp), default=0)
            room += sum(len(devices[m]) // least for m in members if m in area) if least else 0
        return room >= len(shape.layers) * shape.pipelines

    def _orders(self) -> list[tuple[int, ...]]:
        """Orders in which machine classes fill the stages."""
        classes = tuple(range(len(self.classes)))
        return list(permutations(classes)) if len(classes) <= _MOST_PERMUTED else [classes, classes[::-1]]


def _least(fitting: Fitting, limit_s: float) -> Degrees:
    """The least TP degree of each class in each stage that keeps to `limit_s`; 0 where there is none."""
    return [[next((tp for tp, s in options if s <= limit_s), 0) for options in own] for own in fitting]
