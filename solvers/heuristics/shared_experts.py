"""Plans whose replicas share experts over machines, which candidates of the loop and partitions do not say.

Grids along the machines of each GPU type: cells of replicas in a row, stages of cells, or pipelines of cells. A rough
estimate ranks them; the layers of the first ones are split by what they take and hold, and their prices decide.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from operator import itemgetter

from hexiopt.bounds.stage_cells import shares_across
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.plan.parallelism import Devices, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, broken_rule
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, layer_ranges, sharding_stages
from hexiopt.schedules.schedule import Schedule
from solvers.completion.kinds import split_by_kind
from solvers.completion.pricing import price_plan
from solvers.core.interleaving import interleavings
from solvers.core.search import Allowance, Search
from solvers.frame.starts import cut

_TYPES = 3  # GPU types of which all orders are tried
_SPLIT = 32  # grids whose layers are split and that are priced
_BEST = 8  # of them that are interleaved too, in so many
_CHUNKS = (2, 3, 4)  # layer ranges a stage


@dataclass(frozen=True, slots=True)
class _Grid:
    """Cells [stages][pipelines] of replicas of `degree` devices each, and sequences of a micro-batch."""

    stages: tuple[tuple[Devices, ...], ...]
    degree: int
    size: int


def offer_shared_experts(run: Search, allowance: Allowance) -> None:
    """Offer the best plans with experts shared over machines, each a step, until `allowance` is spent; none where the
    plan space or the pricer has no such plans."""
    problem, ours = run.problem, run.our_model
    if ours is None or problem.space.sequence or not shares_across(problem):
        return
    estimate = _Estimate(ours.stages)
    ranked = heapq.nsmallest(_SPLIT, enumerate(_grids(problem)), key=lambda pair: (estimate.step_s(pair[1]), pair[0]))
    best = list[tuple[float, Plan]]()
    for _, grid in ranked:
        found = list[tuple[float, Plan]]()
        for stage in sharding_stages(problem.workload):
            if not (allowance and run.step()):
                break
            plan = _plan(problem, grid, Sharding(stage))
            found += _priced(run, split_by_kind(plan, ours.stages) or plan) if plan is not None else []
        best = sorted([*best, *sorted(found, key=itemgetter(0))[:1]], key=itemgetter(0))
    for _, plan in best[:_BEST]:
        for schedule, chunks in interleavings(problem, _CHUNKS):
            _climb(run, plan, schedule, chunks, allowance)


def _climb(run: Search, plan: Plan, schedule: Schedule, chunks: int, allowance: Allowance) -> None:
    """Offer the plan with so many layer ranges a stage, and while that is better with a layer in another stage."""
    counts, best_s = [max(chunks, stage.num_layers) for stage in plan.pipelines[0].stages], math.inf
    counts[counts.index(max(counts))] += run.problem.model.num_layers - sum(counts)
    left = [counts]
    while left and allowance and run.step():
        tried = left.pop()
        other = _interleaved(plan, schedule, tried, chunks)
        found = _priced(run, other) if other is not None else []
        if found and found[0][0] < best_s:
            best_s, counts = found[0][0], tried
            moves = permutations(range(len(counts)), 2)
            left = [[n - (s == a) + (s == b) for s, n in enumerate(counts)] for a, b in moves]


def _priced(run: Search, plan: Plan) -> list[tuple[float, Plan]]:
    """Offer a plan; what it costs and the plan as priced, where it fits."""
    priced = price_plan(run.pricer, plan)
    if priced is None:
        return []
    run.offer(priced.plan, priced.cost)
    return [(priced.cost.objective, priced.plan)] if priced.cost.fits else []


def _interleaved(plan: Plan, schedule: Schedule, counts: Sequence[int], chunks: int) -> Plan | None:
    """The plan with `counts` layers of the stages in so many ranges each; None where a rule forbids it."""
    if len(counts) < 2 or min(counts) < chunks:
        return None
    ranges, pipelines = layer_ranges(counts, chunks), []
    for pipeline in plan.pipelines:
        policies = [stage.recompute if len(stage.recompute) == 1 else ("full",) for stage in pipeline.stages]
        rows = zip(pipeline.stages, ranges, policies, strict=True)
        stages = tuple(replace(stage, layers=own, recompute=policy) for stage, own, policy in rows)
        pipelines.append(replace(pipeline, stages=stages))
    sharding = plan.sharding if schedule.lockstep else Sharding(min(1, plan.sharding.stage))
    allowed = broken_rule(tuple(pipelines), schedule, sharding) is None
    return Plan(tuple(pipelines), schedule, sharding) if allowed else None


class _Estimate:
    """Rough seconds of steps: stages with layers by speed, and gradients over the slowest links between machines."""

    def __init__(self, stages: StageModel) -> None:
        self._stages, self._problem = stages, stages.problem
        model, trained, weights = self._problem.model, self._problem.parameters, self._problem.model.weight_of_kinds
        rows = [row for row in trained.trained_groups if row.experts and row.holder == "layer"]
        experts = sum(row.params * weights[row.kind] for row in rows)
        width = 2 * self._problem.workload.states.gradient * model.num_layers
        self._expert_bytes, self._dense_bytes = width * experts, width * (trained.layer_params - experts)

    def step_s(self, grid: _Grid) -> float:
        """Of a grid."""
        groups = self._stages.tp_groups
        cells = [[groups.with_degree(groups.of(devices), grid.degree) for devices in row] for row in grid.stages]
        layer_s = [max(sum(self._stages.layer_s(cell, grid.size, "none")) for cell in set(row)) for row in cells]
        period_s = self._problem.model.num_layers / sum(1.0 / seconds for seconds in layer_s)
        width, cell = len(grid.stages[0]), cells[0][0]
        count = math.ceil(self._problem.workload.global_batch / (grid.size * width))
        held = self._dense_bytes / grid.degree + (self._expert_bytes / cell.tp if width > 1 else 0.0)
        link = min(self._nic(device) for row in grid.stages for devices in row for device in devices[:1])
        return (count + len(layer_s) - 1) * period_s + held / len(layer_s) / link

    def _nic(self, device: int) -> float:
        cluster = self._problem.cluster
        machine = cluster.machines[int(cluster.machine_of[device])]
        return machine.nic_bandwidth_bytes_per_s * machine.num_interfaces / machine.num_gpus


def _grids(problem: Problem) -> Iterator[_Grid]:
    """All grids of cells along the machines of some GPU types, type by type in any order."""
    machines, batch = problem.cluster.machines, problem.workload.global_batch
    types = dict[str, list[Devices]]()
    for m, devices in problem.usable_by_machine.items():
        types.setdefault(machines[m].gpu.type_name, []).append(devices)
    names = sorted(types, key=lambda name: -sum(map(len, types[name])))[:_TYPES]
    orders = [
        order for n in range(1, len(names) + 1) for some in combinations(names, n) for order in permutations(some)
    ]
    sizes, most = problem.space.micro_batch_sizes(batch), max(map(len, problem.usable_by_machine.values()))
    for degree in problem.space.allowed_tp(most):
        for replicas in sizes[1:]:
            cells = {name: list(_cells(problem, own, degree, replicas)) for name, own in types.items()}
            for order in orders:
                row = [devices for name in order for devices in cells[name]]
                for stages in _shapes(row, problem.model.num_layers) if _crosses(problem, row) else ():
                    for size in sizes:
                        if size % replicas == 0 and size * len(stages[0]) <= batch and batch % size == 0:
                            yield _Grid(stages, degree, size)


def _cells(problem: Problem, machines: Sequence[Devices], degree: int, replicas: int) -> Iterator[Devices]:
    """Replicas in a row over `machines` of a GPU type; in one machine only numbers that TP may have there."""
    copies = [copy for devices in machines for copy in cut(devices, degree)]
    for at in range(0, len(copies) - replicas + 1, replicas):
        devices = tuple(device for copy in copies[at : at + replicas] for device in copy)
        own = {int(problem.cluster.machine_of[device]) for device in devices}
        if len(own) > 1 or len(devices) in problem.space.allowed_tp(problem.cluster.machines[own.pop()].num_gpus):
            yield devices


def _crosses(problem: Problem, row: Sequence[Devices]) -> bool:
    machine_of = problem.cluster.machine_of
    return any(machine_of[devices[0]] != machine_of[devices[-1]] for devices in row)


def _shapes(row: Sequence[Devices], num_layers: int) -> Iterator[tuple[tuple[Devices, ...], ...]]:
    """Pipelines of equally many stages: cells in a row in a stage, or in a pipeline."""
    for count in range(1, min(len(row), num_layers) + 1):
        width, rest = divmod(len(row), count)
        if rest:
            continue
        yield tuple(tuple(row[s * width : (s + 1) * width]) for s in range(count))
        if 1 < count < len(row):
            yield tuple(tuple(row[s::count]) for s in range(count))


def _plan(problem: Problem, grid: _Grid, sharding: Sharding) -> Plan | None:
    """The plan of a grid with equal layers, and micro-batches as equal as they go; None where a rule forbids it."""
    space, layers, width, count = problem.space, problem.model.num_layers, len(grid.stages[0]), len(grid.stages)
    if space.num_pipelines not in (None, width) or space.num_stages not in (None, count):
        return None
    batches, more = divmod(problem.workload.global_batch // grid.size, width)
    ends = [layers * s // count for s in range(count + 1)]
    pipelines = []
    for k in range(width):
        stages = tuple(
            Stage(TensorParallel(grid.stages[s][k], None, grid.degree), ((ends[s], ends[s + 1]),), ("none",))
            for s in range(count)
        )
        pipelines.append(Pipeline(stages, batches + (k < more), grid.size))
    schedule = default_schedule(problem.workload)
    return None if broken_rule(tuple(pipelines), schedule, sharding) else Plan(tuple(pipelines), schedule, sharding)
