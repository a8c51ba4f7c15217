"""`ring`, `ulysses`, `usp`: the published symmetric sequence layouts, each tuned over its full space.

`ring`: Ring Attention (Liu et al., arXiv 2310.01889), also in zigzag order (Brandon et al., Striped Attention, arXiv
2311.09431, and others): groups of one device. `ulysses`: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): one
group, whose size divides the heads. `usp`: Unified Sequence Parallelism (Fang and Zhao, arXiv 2405.07719): every
product of both, all-to-alls between neighbours and rings across.

All can express: data parallelism over equal pipelines of equal stages, each of them cp groups of hp devices that stand
together; equal shards of the sequence (within a token), equal heads; contiguous or zigzag order; one micro-batch size,
one recompute policy; ZeRO 0 to 3 over all devices or those of a machine. The devices are the machines of any types, in
any order; what does not divide is left out.

None can express unequal shards, heads, groups, layers or batches, so that the slowest device sets the pace.

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

from hexiopt.cost.executors.memory import MemoryModel, StateSharding
from hexiopt.cost.executors.network_load import LinkTable
from hexiopt.cost.executors.sequence.stage import SequenceStage
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import ORDERS, SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.schedule import positions
from hexiopt.solving import Capabilities
from solvers.baselines._frame import Baseline, BestEstimate, PlanCandidate, SearchLimits, best_first
from solvers.baselines._grids import StageGrid, lay_out
from solvers.baselines._plans import aligned_plan, dividing_sizes, even_parts
from solvers.core.search import Search
from solvers.core.zero import LOCKSTEP, sharding_groups
from solvers.sequence.grouping import Signatures, machine_orders
from solvers.sequence.token_allocation import RateTable

_MAX_GRIDS = 4000  # grids estimated in full

StageBlock = tuple[int, ...]  # devices of a stage


@dataclass(frozen=True, slots=True)
class _LayoutGrid:
    """Stages of devices in groups of `hp`; `size` is the micro-batch size."""

    stages: StageGrid
    hp: int
    size: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """The recipe of a grid: d pipelines of s stages, each on the first `used` devices of one of d · s equal parts of a
    row. Neighbouring parts form a pipeline, or with `across` the same stage of all pipelines."""

    devices: StageBlock
    d: int
    s: int
    used: int
    hp: int
    size: int
    across: bool

    def grid(self) -> _LayoutGrid:
        """The grid."""
        room = len(self.devices) // (self.d * self.s)
        blocks = [self.devices[k * room : k * room + self.used] for k in range(self.d * self.s)]
        return _LayoutGrid(lay_out(blocks, self.s, along=not self.across), self.hp, self.size)


class SymmetricLayouts(Baseline):
    """A subclass states its degrees of context parallelism (cp) and head parallelism (hp)."""

    capabilities = Capabilities(kind="baseline", sequence="only")
    limits = SearchLimits(slack=1.1)

    @abstractmethod
    def degrees(self, num_heads: int, most: int) -> Iterable[tuple[int, int]]:
        """Pairs (cp, hp), cp · hp at most `most`; hp divides `num_heads`."""

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """Every grid and order of shards that compute alone does not rule out, each with the first policy that fits."""
        estimate = _Estimate(run)
        seen: set[_LayoutGrid] = set()

        def expand(cut: _Cut) -> Iterator[PlanCandidate]:
            grid = cut.grid()
            if grid in seen or len(seen) == _MAX_GRIDS:
                return
            seen.add(grid)
            for order in ORDERS if grid.stages.tp > grid.hp else ORDERS[:1]:
                if not run.should_continue():
                    return
                for sharding, seconds, policy in estimate.steps_s(grid, order):
                    yield PlanCandidate(seconds, partial(_plan, run.problem, grid, order, sharding, policy))

        cuts = sorted(self._cuts(run, estimate), key=_promise)
        yield from best_first(run, cuts, expand, self.limits, BestEstimate())

    def _cuts(self, run: Search, estimate: "_Estimate") -> Iterator[tuple[float, "_Cut"]]:
        """All cuts whose states fit, each with the least seconds that its slowest device computes."""
        problem = run.problem
        least_bytes = cache(estimate.least_bytes)
        for machines in machine_orders(problem):
            devices = tuple(chain.from_iterable(machines))
            pace = list(accumulate((estimate.sequence_s[d] for d in devices), max))
            limit = list(accumulate((estimate.limit_bytes[d] for d in devices), min))
            for d, s in _degrees_beside(problem, len(devices)):
                if not run.should_continue():
                    return
                room, sizes = len(devices) // (d * s), dividing_sizes(problem, d)
                for cp, hp in self.degrees(problem.model.num_heads, room):
                    seconds = -(-problem.model.num_layers // s) * pace[d * s * room - 1] / (cp * hp)
                    for size in sizes:
                        if least_bytes(d, s, cp * hp, size) > limit[d * s * room - 1]:
                            continue
                        least_s = (problem.workload.global_batch // d + (s - 1) * size) * seconds
                        for across in (False, True) if d > 1 and s > 1 else (False,):
                            yield least_s, _Cut(devices, d, s, cp * hp, hp, size, across)


class RingLayouts(SymmetricLayouts):
    """Ring Attention (2310.01889): context parallelism alone, every device a group."""

    name = "ring"

    def degrees(self, num_heads: int, most: int) -> Iterator[tuple[int, int]]:
        """As many groups of one device as there are devices."""
        yield most, 1


class UlyssesLayouts(SymmetricLayouts):
    """Ulysses (2309.14509): head parallelism alone, one group."""

    name = "ulysses"

    def degrees(self, num_heads: int, most: int) -> Iterator[tuple[int, int]]:
        """One group, as large as divides the heads or smaller."""
        return ((1, hp) for hp in range(min(most, num_heads), 0, -1) if num_heads % hp == 0)


class UspLayouts(SymmetricLayouts):
    """USP (2405.07719): context and head parallelism together."""

    name = "usp"

    def degrees(self, num_heads: int, most: int) -> Iterator[tuple[int, int]]:
        """Groups of every size that divides the heads, as many as there are devices for."""
        return ((most // hp, hp) for hp in range(min(most, num_heads), 0, -1) if num_heads % hp == 0)


class _Estimate:
    """Estimates steps: every stage is priced alone, and the slowest one sets the pace of its pipeline."""

    def __init__(self, run: Search) -> None:
        problem = self._problem = run.problem
        self._model = run.our_model or PlanPricer(problem)
        self._links = LinkTable(problem.cluster)
        self._schedule = default_schedule(problem.workload)
        rates = RateTable(self._model).of(range(problem.cluster.num_devices), "none")
        spec, workload = problem.model, problem.workload
        self.sequence_s: list[float] = rates.of_sequence_s(workload.seq_len, spec.num_heads).tolist()
        self._alone = MemoryModel(spec, workload, problem.cluster.gpu_of(problem.usable_devices[0]), 1, 1)
        self.limit_bytes = [problem.cluster.gpu_of(d).usable_memory_bytes for d in range(problem.cluster.num_devices)]
        self._signatures = Signatures(problem)
        self._signed: Memo[StageBlock, bytes] = Memo(self._signatures.of)
        self._stages: dict[tuple[object, ...], SequenceStage] = {}

    def least_bytes(self, num_lines: int, num_stages: int, num_devices: int, size: int) -> float:
        """The least bytes on each of the `num_devices` of the first stage: states, sharded over all devices of the
        cluster, and the input of every layer."""
        problem = self._problem
        layers = -(-problem.model.num_layers // num_stages)
        spread = StateSharding(max(sharding_stages(problem.workload)), len(problem.usable_devices))
        batches = problem.workload.global_batch // (num_lines * size)
        held = most_in_flight(self._schedule, positions(num_stages, batches)[0])
        tokens = problem.workload.seq_len // num_devices
        inputs = layers * held * size * tokens * problem.model.hidden_size * problem.workload.element_bytes
        return sum(self._alone.states(layers, True, num_stages == 1, spread)) + inputs

    def steps_s(self, grid: _LayoutGrid, order: str) -> Iterator[tuple[Sharding, float, str]]:
        """The seconds of a step and the policy that recomputes least, for each sharding with which the grid fits."""
        problem = self._problem
        count = problem.workload.global_batch // (grid.stages.width * grid.size)
        lines = {
            tuple(map(id, stages)): (line, stages)
            for line in grid.stages.lines()
            for stages in [[self._stage(block, grid.hp, order, grid.size) for block in line]]
        }
        for sharding in _shardings(problem):
            for policy in recompute_policies(problem.workload):
                pairs = [self._line_s(grid, *line, count, sharding, policy) for line in lines.values()]
                if None not in pairs:
                    yield sharding, max(seconds for seconds in pairs if seconds is not None), policy
                    break

    def _line_s(
        self,
        grid: _LayoutGrid,
        line: Sequence[StageBlock],
        stages: Sequence[SequenceStage],
        count: int,
        sharding: Sharding,
        policy: str,
    ) -> float | None:
        """Seconds of a pipeline; None if it does not fit."""
        last = len(stages) - 1
        policies = [(policy,) * count for count in _layers(self._problem, last + 1)]
        for s, (stage, at) in enumerate(zip(stages, positions(last + 1, count), strict=True)):
            held = most_in_flight(self._schedule, at)
            shards = StateSharding(sharding.stage, self._holders(grid, s, line[s], sharding))
            parts = stage.memory.stage((policies[s],), s == 0, s == last, (held,), shards)
            if (parts.sum(axis=0) > stage.limit_bytes).any():
                return None
        seconds = [sum(stage.stage_s(policies[s], s == 0, s == last)) for s, stage in enumerate(stages)]
        return sum(seconds) + (count - 1) * max(seconds)

    def _stage(self, block: StageBlock, hp: int, order: str, size: int) -> SequenceStage:
        key = (self._signed[block], hp, order, size)
        stage = self._stages.get(key)
        if stage is None:
            layout = _layout(self._problem, block, hp, order)
            stage = SequenceStage(self._problem, self._model.framework, layout, size, None, self._links)
            self._stages[key] = stage
        return stage

    def _holders(self, grid: _LayoutGrid, stage: int, block: StageBlock, sharding: Sharding) -> float:
        """The number of devices that share the states of a stage, the fewest of any sharding group."""
        if sharding.groups == "all":
            return float(grid.stages.width * len(block))
        machine_of = self._problem.cluster.machine_of
        _, counts = np.unique(machine_of[[d for line in grid.stages.stages[stage] for d in line]], return_counts=True)
        return float(counts.min())


def _promise(item: tuple[float, _Cut]) -> tuple[int, int]:
    """Key of the order in which cuts are estimated: least compute in steps of 1 %, then small groups, which communicate
    least and are estimated fastest."""
    return round(100 * log(item[0])), item[1].used


def _degrees_beside(problem: Problem, num_devices: int) -> Iterator[tuple[int, int]]:
    """Pairs (pipelines, stages) in which pipelines share the batch equally and every stage has a layer and a device."""
    space, batch = problem.space, problem.workload.global_batch
    for d in range(1, min(batch, num_devices) + 1):
        if batch % d or space.num_pipelines not in (None, d):
            continue
        for s in range(1, min(problem.model.num_layers, num_devices // d) + 1):
            if space.num_stages in (None, s):
                yield d, s


def _shardings(problem: Problem) -> list[Sharding]:
    """Allowed shardings. The estimate leaves out exposed gathers, so those without any come first among equals."""
    stages = sorted(sharding_stages(problem.workload), key=lambda stage: (stage >= LOCKSTEP, abs(stage - 1)))
    return [Sharding(stage, groups) for stage in stages for groups in sharding_groups(problem, stage)]


def _layers(problem: Problem, num_stages: int) -> list[int]:
    return even_parts(problem.model.num_layers, num_stages)


def _layout(problem: Problem, block: StageBlock, hp: int, order: str) -> SequenceParallel:
    low, extra = divmod(problem.workload.seq_len, len(block))
    tokens = [low + (k < extra) for k in range(len(block))]
    heads = (problem.model.num_heads // hp,) * hp
    return SequenceParallel(
        tuple(SequenceGroup(block[k : k + hp], tuple(tokens[k : k + hp]), heads) for k in range(0, len(block), hp)),
        order,
    )


def _plan(problem: Problem, grid: _LayoutGrid, order: str, sharding: Sharding, policy: str) -> Plan:
    count = problem.workload.global_batch // (grid.stages.width * grid.size)
    slots = [[_layout(problem, block, grid.hp, order) for block in blocks] for blocks in grid.stages.stages]
    layers, schedule = _layers(problem, len(slots)), default_schedule(problem.workload)
    return aligned_plan(slots, layers, policy, count, grid.size, schedule, sharding)
