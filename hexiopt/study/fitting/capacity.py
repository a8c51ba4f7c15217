"""What one pipeline holds, exactly: the most layers of any chain of stages, by a recursion over its devices.

A stage is a device or a TP group. Under a schedule whose backwards are whole, what it has in flight depends on the
stages behind it alone, and what it holds beside on its GPU type, its degree and whether it is the first or the last. So
the most layers of the stages in front of it depend on how many devices of each machine are used, and on how many stages
they are: equal machines count as one kind, in any order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import comb, prod
from typing import NamedTuple

from hexiopt.cost.executors.memory import UNSHARDED
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.architectures import RANGES
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from hexiopt.problem.workload import MAX_SEQ_LEN
from hexiopt.schedules.in_flight import holding, most_in_flight_before
from hexiopt.study.bisection import largest
from hexiopt.study.price import certify
from hexiopt.study.solution import PlacedPlan

MAX_MICRO_BATCH = 1024  # sequences, the largest that a plan space may allow
SEQ_LEN_GRAIN = 128
_MOST_STATES = 100_000  # beyond, a search is the faster way
_NOTHING = -1

Used = tuple[tuple[int, ...], ...]  # of each kind of machine: the devices used of each machine, ascending


class _Kind(NamedTuple):
    """Machines of equal TP groups: the devices of each, and the group of each degree that they allow."""

    machines: tuple[tuple[int, ...], ...]
    groups: dict[int, TpGroup]


class _Link(NamedTuple):
    """A stage of a chain: the kind and degree of its group, and the most layers that it holds, under which policy."""

    kind: int
    used: int  # devices used before of its machine
    degree: int
    layers: int
    policy: str


def is_exact(problem: Problem) -> bool:
    """Whether `Capacity` answers for every single pipeline of the plan space, in reasonable time: with layers of one
    kind, no limit on its stages, and every freedom that chains of stages use."""
    space, model = problem.space, problem.model
    free = space.uneven_layers and space.uneven_tp and space.recompute_per_stage and not space.sequence
    bounded = space.num_stages is not None or space.num_pipelines not in (None, 1)
    if not free or bounded or len(model.kinds) > 1 or model.shares_experts or problem.default_schedule.splits:
        return False
    kinds = Counter((problem.cluster.machines[m].gpu, len(devices)) for m, devices in problem.usable_by_machine.items())
    states = prod(comb(size + count, count) for (_, size), count in kinds.items())
    return states * len(problem.usable_devices) <= _MOST_STATES


@dataclass(frozen=True)
class Capacity:
    """The most layers of one pipeline of a problem for which `is_exact` holds, at a micro-batch of `size` sequences."""

    problem: Problem
    size: int = 1

    @cached_property
    def most_layers(self) -> int:
        """The most layers that any chain of stages holds; negative where none holds one."""
        return self._best(None)[0]

    @property
    def fits(self) -> bool:
        """Whether one pipeline fits as asked."""
        return self._best(self.problem.model.num_layers)[0] >= self.problem.model.num_layers

    def plan(self) -> Plan | None:
        """A pipeline that fits, its stages as full as they can be from the end; None where none does."""
        problem, layers = self.problem, self.problem.model.num_layers
        most, chain = self._best(layers)
        if most < layers:
            return None
        excess, counts = most - layers, list[int]()
        for link in chain[::-1]:
            less = min(excess, link.layers - 1)
            counts.append(link.layers - less)
            excess -= less
        kinds, used_of = self._kinds, dict[tuple[int, int], int]()
        stages, end = list[Stage](), layers
        for link, count in zip(chain, counts[::-1], strict=True):
            # Any machine of the kind of which so many devices are used.
            machines = kinds[link.kind].machines
            m = next(m for m in range(len(machines)) if used_of.get((link.kind, m), 0) == link.used)
            devices = machines[m][link.used : link.used + link.degree]
            used_of[link.kind, m] = link.used + link.degree
            stages.append(Stage.of(devices, end - count, end, link.policy))
            end -= count
        pipeline = Pipeline(tuple(stages[::-1]), problem.workload.global_batch // self.size, self.size)
        return Plan((pipeline,), problem.default_schedule, Sharding(0))

    @cached_property
    def _stages(self) -> StageModel:
        return StageModel(self.problem)

    @cached_property
    def _kinds(self) -> list[_Kind]:
        problem, kinds = self.problem, dict[object, _Kind]()
        for m, devices in problem.usable_by_machine.items():
            key = problem.cluster.machines[m].gpu, len(devices)
            if key in kinds:
                kinds[key] = kinds[key]._replace(machines=(*kinds[key].machines, tuple(devices)))
            else:
                degrees = problem.space.allowed_tp(len(devices))
                groups = {tp: self._stages.tp_group(tuple(devices[:tp])) for tp in degrees}
                kinds[key] = _Kind((tuple(devices),), groups)
        return list(kinds.values())

    def _best(self, most_stages: int | None) -> tuple[int, tuple[_Link, ...]]:
        """The most layers of a chain of at most so many stages, and the chain from its last stage to its first."""
        kinds, schedule, batches = (
            self._kinds,
            self.problem.default_schedule,
            self.problem.workload.global_batch // self.size,
        )
        policies, rooms = recompute_policies(self.problem.workload), dict[object, tuple[int, str]]()
        known = dict[tuple[Used, int], tuple[int, tuple[_Link, ...]]]()
        if not batches or batches * self.size != self.problem.workload.global_batch:
            return _NOTHING, ()

        def stage_layers(group: TpGroup, first: bool, behind: int) -> tuple[int, str]:
            key = group, first, behind
            if key not in rooms:
                memory = self._stages.memory_model(group, self.size)
                held = holding(most_in_flight_before(schedule, behind, batches))
                at = group.gpu.usable_memory_bytes, first, behind == 0
                rooms[key] = max((memory.max_layers(*at, policy, held, UNSHARDED), policy) for policy in policies)
            return rooms[key]

        def best(used: Used, behind: int) -> tuple[int, tuple[_Link, ...]]:
            """The most layers of the stages that have `behind` behind them and of all before those."""
            key = used, behind
            if key in known or behind == most_stages:
                return known.get(key, (_NOTHING, ()))
            most: tuple[int, tuple[_Link, ...]] = (_NOTHING, ())
            for k, n, tp, group in _choices(kinds, used):
                alone = stage_layers(group, True, behind)
                if alone[0] >= 1 and alone[0] > most[0]:
                    most = alone[0], (_Link(k, n, tp, *alone),)
                inner = stage_layers(group, False, behind)
                if inner[0] >= 1:
                    before, chain = best(_take(used, k, n, tp), behind + 1)
                    if before >= 1 and inner[0] + before > most[0]:
                        most = inner[0] + before, (_Link(k, n, tp, *inner), *chain)
            known[key] = most
            return most

        return best(tuple((0,) * len(kind.machines) for kind in kinds), 0)


def _choices(kinds: list[_Kind], used: Used) -> Iterator[tuple[int, int, int, TpGroup]]:
    """The kinds and TP groups that another stage may have, and how many devices of their machine are used before."""
    for k, kind in enumerate(kinds):
        size = len(kind.machines[0])
        for n in dict.fromkeys(used[k]):
            for tp, group in kind.groups.items():
                if n + tp <= size:
                    yield k, n, tp, group


def _take(used: Used, kind: int, before: int, degree: int) -> Used:
    counts = list(used[kind])
    counts[counts.index(before)] += degree
    return (*used[:kind], tuple(sorted(counts)), *used[kind + 1 :])


# --------------------------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """The longest context, the largest micro-batch in sequences within the batch, and the most layers of one pipeline,
    each with all else as asked, and a plan that proves it; None where nothing fits."""

    seq_len: PlacedPlan | None
    micro_batch: PlacedPlan | None
    num_layers: PlacedPlan | None

    @classmethod
    def of(cls, problem: Problem) -> "PipelineLimits":
        """Those of a problem for which `is_exact` holds."""
        return cls(longest_context(problem), _largest_micro_batch(problem), _most_layers(problem))


def proof(problem: Problem, size: int = 1) -> PlacedPlan | None:
    """The pipeline that `Capacity` finds, priced without a kernel, where it obeys all rules; else None."""
    plan = Capacity(problem, size).plan()
    return None if plan is None else certify(problem, plan, PlanPricer(problem, network=FairShares(compiled=False)))


def longest_context(problem: Problem) -> PlacedPlan | None:
    """The pipeline with the longest context, within `SEQ_LEN_GRAIN` tokens."""
    model = problem.model
    top = min(MAX_SEQ_LEN, model.max_positions) if model.learned_positions else MAX_SEQ_LEN

    def with_seq_len(seq_len: int) -> Problem:
        return problem.replace(workload=problem.workload.replace(seq_len=seq_len))

    first = min(problem.workload.seq_len, top)
    return _largest_proof(with_seq_len, first, SEQ_LEN_GRAIN, top)


def _most_layers(problem: Problem) -> PlacedPlan | None:
    most = min(Capacity(problem).most_layers, RANGES["num_layers"][1])
    while most >= 1:
        plan = proof(problem.replace(model=problem.model.with_num_layers(most)))
        if plan is not None:
            return plan
        most -= 1
    return None


def _largest_micro_batch(problem: Problem) -> PlacedPlan | None:
    wide = problem.replace(space=problem.space.replace(max_micro_batch_size=MAX_MICRO_BATCH))
    sizes = wide.space.micro_batch_sizes(problem.workload.global_batch)
    plans = (proof(wide, size) for size in sizes[::-1] if Capacity(wide, size).fits)
    return next((plan for plan in plans if plan is not None), None)


def _largest_proof(problem_of: Callable[[int], Problem], first: int, grain: int, top: int) -> PlacedPlan | None:
    """The pipeline of the largest value that fits."""

    def fits(value: int) -> bool:
        try:
            return Capacity(problem_of(value)).fits
        except InputError:
            return False

    most = largest(fits, first, grain, top, 0.0)
    while most is not None and most >= 1:
        plan = proof(problem_of(most))
        if plan is not None:
            return plan
        most = most - grain if most > grain else None
    return None
