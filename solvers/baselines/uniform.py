"""Symmetric sequence parallelism, the frame of the rivals: every device has an equal shard, every group equal heads.

Can express: data parallelism over equal pipelines of equal stages, each of them cp groups of hp devices that stand
together; equal shards of the sequence (within a token), equal heads; contiguous or zigzag order; one micro-batch size,
one recompute policy; ZeRO 0 to 3 over all devices or those of a machine. The devices are the machines of any types, in
any order; what does not divide is left out.

Cannot: unequal shards, heads, groups, layers or batches, so that the slowest device sets the pace.

The systems have no planner of their own: the ranking is ours and stands for the engineer's trials.
"""

import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from math import log

import numpy as np

from hexiopt.cost.executors.links import LinkTable
from hexiopt.cost.executors.memory import MemoryModel, Shards
from hexiopt.cost.executors.sequence_parallel import SequenceStage
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Pipeline, Plan, SequenceGroup, SequenceLayout, Sharding, Stage
from hexiopt.plan.token_layout import ORDERS
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, layer_ranges, recompute_policies, sharding_stages
from hexiopt.result import Result
from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.schedule import StagePosition
from solvers.baselines.frame import Candidate, Rival
from solvers.core.search import Budget, Listener, Pricer, Search
from solvers.core.zero import LOCKSTEP, sharding_groups
from solvers.sequence.orders import Machines, machine_orders
from solvers.sequence.requirement import require_sequences
from solvers.sequence.signatures import Signatures
from solvers.sequence.token_allocation import RateTable

_HOPELESS = 1.1  # of the best estimate so far: grids whose compute alone takes longer are left out
_MOST_GRIDS = 4000  # grids estimated in full

Block = tuple[int, ...]  # devices of a stage


@dataclass(frozen=True, slots=True)
class Grid:
    """`lines[p][s]` are the devices of stage s in pipeline p, in groups of `hp`; `size` is the micro-batch size."""

    lines: tuple[tuple[Block, ...], ...]
    hp: int
    size: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """A grid not yet made: d pipelines of s stages, each the first `used` devices of one of d · s equal parts of a row.

    Neighbouring parts form a pipeline, or `across` pipelines the same stage of each.
    """

    devices: Block
    d: int
    s: int
    used: int
    hp: int
    size: int
    across: bool

    def grid(self) -> Grid:
        """The grid."""
        d, s = self.d, self.s
        room = len(self.devices) // (d * s)
        blocks = [self.devices[k * room : k * room + self.used] for k in range(d * s)]
        if self.across:
            lines = tuple(tuple(blocks[k * d + p] for k in range(s)) for p in range(d))
        else:
            lines = tuple(tuple(blocks[p * s + k] for k in range(s)) for p in range(d))
        return Grid(lines, self.hp, self.size)


class UniformLayouts(Rival):
    """A subclass says which degrees of context (cp) and head parallelism (hp) it has."""

    @abstractmethod
    def degrees(self, num_heads: int, most: int) -> Iterable[tuple[int, int]]:
        """Pairs (cp, hp), cp · hp at most `most`; hp divides `num_heads`."""

    @abstractmethod
    def foreign(self, cp: int, hp: int) -> str | None:
        """What `degrees` would never give of a pair whose hp divides the heads, in words; None if nothing."""

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """As `Rival.solve`. Raises InputError where the problem has no sequence layouts."""
        require_sequences(problem, self.name)
        return super().solve(problem, budget, seed=seed, pricer=pricer, listen=listen)

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """Every grid and order of shards that compute alone does not rule out, with the first policy that fits."""
        estimate = _Estimate(search)
        best_s = float("inf")
        seen: set[Grid] = set()
        for least_s, cut in sorted(self._cuts(search, estimate), key=_promise):
            if least_s > _HOPELESS * best_s:
                continue
            grid = cut.grid()
            if grid in seen:
                continue
            if len(seen) == _MOST_GRIDS:
                return
            seen.add(grid)
            for order in ORDERS if len(grid.lines[0][0]) > grid.hp else ORDERS[:1]:
                if not search.go_on():
                    return
                for sharding, seconds, policy in estimate.steps_s(grid, order):
                    best_s = min(best_s, seconds)
                    yield Candidate(seconds, partial(_plan, search.problem, grid, order, sharding, policy))

    def _cuts(self, search: Search, estimate: "_Estimate") -> Iterator[tuple[float, "_Cut"]]:
        """All cuts whose states fit, and what their slowest device computes at least."""
        problem = search.problem
        least_bytes = cache(estimate.least_bytes)
        for machines in machine_orders(problem):
            devices = tuple(chain.from_iterable(machines))
            pace = list(accumulate((estimate.sequence_s[d] for d in devices), max))
            limit = list(accumulate((estimate.limit_bytes[d] for d in devices), min))
            for d, s in _degrees_beside(problem, len(devices)):
                if not search.go_on():
                    return
                room, sizes = len(devices) // (d * s), list(_sizes(problem, d))
                for cp, hp in self.degrees(problem.model.num_heads, room):
                    seconds = -(-problem.model.num_layers // s) * pace[d * s * room - 1] / (cp * hp)
                    for size in sizes:
                        if least_bytes(d, s, cp * hp, size) > limit[d * s * room - 1]:
                            continue
                        least_s = (problem.workload.global_batch // d + (s - 1) * size) * seconds
                        for across in (False, True) if d > 1 and s > 1 else (False,):
                            yield least_s, _Cut(devices, d, s, cp * hp, hp, size, across)

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        lines = plan.pipelines
        stages = [stage for line in lines for stage in line.stages]
        layouts = [stage.sequence for stage in stages if stage.sequence]
        if len(layouts) < len(stages):
            return "a stage without a sequence layout"
        if len({tuple(stage.layers for stage in line.stages) for line in lines}) > 1:
            return "unequal pipelines"
        held = [stage.num_layers for stage in stages]
        if max(held) - min(held) > 1:
            return "unequal layers"
        groups = [group for layout in layouts for group in layout.groups]
        if len({(len(layout.groups), layout.order) for layout in layouts}) > 1 or len(set(map(_size, groups))) > 1:
            return "unequal groups or orders"
        if len({heads for group in groups for heads in group.heads}) > 1:
            return "unequal heads"
        tokens = [count for group in groups for count in group.tokens]
        if max(tokens) - min(tokens) > 1:
            return "unequal shards"
        if len({(line.num_micro_batches, line.micro_batch_size) for line in lines}) > 1:
            return "unequal batches"
        if len({policy for stage in stages for policy in stage.recompute}) > 1:
            return "several recompute policies"
        return self.foreign(len(layouts[0].groups), _size(groups[0]))

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """Random machines in random order, and everything else at random."""
        own = list(problem.usable_by_machine.values())
        machines: Machines = tuple(rng.sample(own, rng.randint(1, len(own))))
        devices = tuple(chain.from_iterable(machines))
        beside = list(_degrees_beside(problem, len(devices)))
        if not beside:
            return None
        d, s = rng.choice(beside)
        room = len(devices) // (d * s)
        degrees, sizes = list(self.degrees(problem.model.num_heads, room)), list(_sizes(problem, d))
        if not degrees or not sizes:
            return None
        cp, hp = rng.choice(degrees)
        across = d > 1 and s > 1 and rng.random() < 0.5
        grid = _Cut(devices, d, s, cp * hp, hp, rng.choice(sizes), across).grid()
        policy, sharding = rng.choice(recompute_policies(problem.workload)), rng.choice(_shardings(problem))
        return _plan(problem, grid, rng.choice(ORDERS), sharding, policy)


class _Estimate:
    """Seconds of a step: of every stage as priced alone, in a pipeline that the slowest paces."""

    def __init__(self, search: Search) -> None:
        problem = self._problem = search.problem
        self._model = search.pricer if isinstance(search.pricer, CostModel) else CostModel(problem)
        self._wires = LinkTable(problem.cluster)
        self._schedule = default_schedule(problem.workload)
        rates = RateTable(self._model).of(range(problem.cluster.num_devices), "none")
        spec, workload = problem.model, problem.workload
        self.sequence_s: list[float] = rates.of_sequence_s(workload.seq_len, spec.num_heads).tolist()
        self._alone = MemoryModel(spec, workload, problem.cluster.gpu_of(problem.usable_devices[0]), 1, 1)
        self.limit_bytes = [problem.cluster.gpu_of(d).usable_memory_bytes for d in range(problem.cluster.num_devices)]
        self._signatures = Signatures(problem)
        self._signed: dict[Block, bytes] = {}
        self._kept: dict[tuple[object, ...], SequenceStage] = {}

    def least_bytes(self, num_lines: int, num_stages: int, num_devices: int, size: int) -> float:
        """Bytes that a device of the first stage holds at least, of `num_devices`: states, spread over all devices of
        the cluster, and the input of every layer."""
        problem = self._problem
        layers = -(-problem.model.num_layers // num_stages)
        spread = Shards(max(sharding_stages(problem.workload)), len(problem.usable_devices))
        batches = problem.workload.global_batch // (num_lines * size)
        held = most_in_flight(self._schedule, StagePosition(0, num_stages, batches))
        tokens = problem.workload.seq_len // num_devices
        inputs = layers * held * size * tokens * problem.model.hidden_size * problem.workload.element_bytes
        return sum(self._alone.states(layers, True, num_stages == 1, spread)) + inputs

    def steps_s(self, grid: Grid, order: str) -> Iterator[tuple[Sharding, float, str]]:
        """Each sharding with which the grid fits, the seconds of a step, and the policy that is least."""
        problem = self._problem
        count = problem.workload.global_batch // (len(grid.lines) * grid.size)
        lines = {
            tuple(map(id, stages)): (line, stages)
            for line in grid.lines
            for stages in [[self._stage(block, grid.hp, order, grid.size) for block in line]]
        }
        for sharding in _shardings(problem):
            for policy in recompute_policies(problem.workload):
                pairs = [self._line_s(grid, *one, count, sharding, policy) for one in lines.values()]
                if None not in pairs:
                    yield sharding, max(seconds for seconds in pairs if seconds is not None), policy
                    break

    def _line_s(
        self,
        grid: Grid,
        line: Sequence[Block],
        stages: Sequence[SequenceStage],
        count: int,
        sharding: Sharding,
        policy: str,
    ) -> float | None:
        """Seconds of a pipeline; None where it does not fit."""
        last = len(stages) - 1
        policies = [(policy,) * (end - first) for ((first, end),) in _layers(self._problem, last + 1)]
        for s, stage in enumerate(stages):
            held = most_in_flight(self._schedule, StagePosition(s, last + 1, count))
            shards = Shards(sharding.stage, self._holders(grid, s, line[s], sharding))
            parts = stage.memory.stage((policies[s],), s == 0, s == last, (held,), shards)
            if (parts.sum(axis=0) > stage.limit_bytes).any():
                return None
        seconds = [sum(stage.stage_s(policies[s], s == 0, s == last)) for s, stage in enumerate(stages)]
        return sum(seconds) + (count - 1) * max(seconds)

    def _stage(self, block: Block, hp: int, order: str, size: int) -> SequenceStage:
        at = self._signed.get(block)
        if at is None:
            at = self._signed[block] = self._signatures.of(block)
        key = (at, hp, order, size)
        found = self._kept.get(key)
        if found is None:
            layout = _layout(self._problem, block, hp, order)
            found = SequenceStage(self._problem, self._model.framework, layout, size, None, self._wires)
            self._kept[key] = found
        return found

    def _holders(self, grid: Grid, stage: int, block: Block, sharding: Sharding) -> float:
        """Devices that share the states of a stage's layers, the fewest on any machine."""
        if sharding.groups == "all":
            return float(len(grid.lines) * len(block))
        machine_of = self._problem.cluster.machine_of
        _, counts = np.unique(machine_of[[d for line in grid.lines for d in line[stage]]], return_counts=True)
        return float(counts.min())


def _promise(item: tuple[float, _Cut]) -> tuple[int, int]:
    """The sooner to be estimated, the smaller: least compute, in steps of 1 %, then small groups, which say least to
    each other and are estimated soonest."""
    return round(100 * log(item[0])), item[1].used


def _size(group: SequenceGroup) -> int:
    return len(group.devices)


def _degrees_beside(problem: Problem, num_devices: int) -> Iterator[tuple[int, int]]:
    """Numbers of pipelines and of stages: pipelines share the batch equally, every stage has a layer and a device."""
    space, batch = problem.space, problem.workload.global_batch
    for d in range(1, min(batch, num_devices) + 1):
        if batch % d or space.num_pipelines not in (None, d):
            continue
        for s in range(1, min(problem.model.num_layers, num_devices // d) + 1):
            if space.num_stages in (None, s):
                yield d, s


def _sizes(problem: Problem, num_pipelines: int) -> Iterator[int]:
    share = problem.workload.global_batch // num_pipelines
    return (size for size in problem.space.micro_batch_sizes(share) if share % size == 0)


def _shardings(problem: Problem) -> list[Sharding]:
    """Of plans that take equally long by the estimate, which leaves out what gathers show, those without come first."""
    stages = sorted(sharding_stages(problem.workload), key=lambda stage: (stage >= LOCKSTEP, abs(stage - 1)))
    return [Sharding(stage, groups) for stage in stages for groups in sharding_groups(problem, stage)]


def _layers(problem: Problem, num_stages: int) -> list[tuple[tuple[int, int], ...]]:
    low, extra = divmod(problem.model.num_layers, num_stages)
    return layer_ranges([low + (s < extra) for s in range(num_stages)], 1)


def _layout(problem: Problem, block: Block, hp: int, order: str) -> SequenceLayout:
    low, extra = divmod(problem.workload.seq_len, len(block))
    tokens = [low + (k < extra) for k in range(len(block))]
    heads = (problem.model.num_heads // hp,) * hp
    return SequenceLayout(
        tuple(SequenceGroup(block[k : k + hp], tuple(tokens[k : k + hp]), heads) for k in range(0, len(block), hp)),
        order,
    )


def _plan(problem: Problem, grid: Grid, order: str, sharding: Sharding, policy: str) -> Plan:
    count = problem.workload.global_batch // (len(grid.lines) * grid.size)
    layers = _layers(problem, len(grid.lines[0]))
    pipelines = tuple(
        Pipeline(
            tuple(
                Stage(_layout(problem, block, grid.hp, order), own, (policy,))
                for own, block in zip(layers, line, strict=True)
            ),
            count,
            grid.size,
        )
        for line in grid.lines
    )
    return Plan(pipelines, default_schedule(problem.workload), sharding)
