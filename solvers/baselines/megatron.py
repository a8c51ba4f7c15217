"""`megatron`: Megatron-LM as an engineer tunes it (Narayanan et al., SC 2021, arXiv 2104.04473).

Can express: a symmetric grid of tensor, pipeline and data parallelism over the machines in any order, or over some
of them where slow ones are better left out (every launched machine runs the same number of processes, or one for
each of its GPUs); ranks in the order tp-dp-pp or, with `--use-tp-pp-dp-mapping`, tp-pp-dp; one micro-batch size;
one recompute policy, or full recompute of the first N layers of every layer range and none of the others
(`--recompute-method block --recompute-num-layers N`); the distributed optimizer (ZeRO-1) on or off; 1F1B, and
interleaved 1F1B with v chunks a stage; equal layers in all stages, or another number in the first and the last
(`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`). Where layers have experts, whole ones
on each rank (`--expert-tensor-parallel-size 1`), shared by any number of the ranks of a stage that divides them
(`--expert-model-parallel-size`): in a machine, or over machines.

Cannot: unequal TP degrees, pipelines, micro-batch counts or policies; layers by speed other than at the two ends;
GPipe; heads or MLP columns that TP does not divide; a global batch that pipelines times micro-batch size does not.
Megatron-LM could, and our plans do not say: experts cut by columns, and experts shared over machines of several GPU
types; more sequences than `space.max_micro_batch_size` at once on all the ranks that share experts.

Megatron-LM has no planner and so no estimate of its own: the ranking here is ours, from the times of our cost model
(`_estimates.py`), and stands for the engineer's trials.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, layer_ranges, recompute_policies, schedules
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Pricer
from solvers.baselines._estimates import GridEstimates, StageTpGroups, one_f_one_b_s
from solvers.baselines._frame import Baseline, BestEstimate, PlanCandidate, SearchLimits, best_first
from solvers.baselines._grids import (
    StageGrid,
    grids,
    machine_orders,
    processes_per_machine,
    rank_groups,
    tp_degrees,
)
from solvers.baselines._plans import (
    RUNS_1F1B,
    Ranges,
    StageHolders,
    aligned_plan,
    dividing_sizes,
    optimizer_shardings,
)
from solvers.core.partition import DeviceGroup
from solvers.core.search import Search

_MAX_ORDERS = 400  # orders of machines
_BOUNDING = 0.25  # share of the time limit for bounds on grids
_BLOCKS = 6  # lengths tried, of layers of a range that recompute
_SPLITS = 3  # layer splits kept of each choice of everything else


@dataclass(frozen=True, slots=True)
class MegatronLayers:
    """Layers of the first, every middle and the last stage, in `chunks` ranges each; a lone stage is the first."""

    first: int
    middle: int
    last: int
    chunks: int = 1

    def per_stage(self, stages: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return (self.first,) if stages == 1 else (self.first, *[self.middle] * (stages - 2), self.last)


@dataclass(frozen=True, slots=True)
class MegatronRecompute:
    """What all stages recompute: `policy` for all layers, or for the first `block` layers of every range and none for
    the others."""

    policy: str
    block: int | None = None

    def of(self, layers: Ranges) -> Recompute:
        """The policies of a stage."""
        if self.block is None:
            return (self.policy,)
        each = [k < self.block for start, end in layers for k in range(end - start)]
        return (self.policy,) if all(each) else tuple(self.policy if recomputes else "none" for recomputes in each)


class Megatron(Baseline):
    """Megatron-LM (SC 2021) as an engineer tunes it: grids, interleaving, end stages and block recompute.

    Opens grids in the order of a lower bound; within a grid, every choice is estimated.
    """

    name = "megatron"
    limits = SearchLimits(slack=1.25)

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """The choices of all grids whose bound is not clearly above the best estimate."""
        times = GridEstimates(run.pricer)
        yield from best_first(run, _bounded_grids(times, run), partial(_choices, times), self.limits, BestEstimate())


def _bounded_grids(times: GridEstimates, run: Search) -> list[tuple[float, StageGrid]]:
    """Grids with a lower bound of their step time from compute alone, the least bound first."""
    problem = times.problem
    bounds: dict[StageGrid, float] = {}
    for order, tp in product(machine_orders(problem, _MAX_ORDERS, subsets=True), tp_degrees(problem)):
        for most in processes_per_machine(problem):
            for grid in expert_grids(times.pricer, rank_groups(problem, order, tp, most)):
                if grid not in bounds:
                    bounds[grid] = _bound_s(times, grid)
        if not run.should_continue(_BOUNDING):
            break
    return sorted(((bound, grid) for grid, bound in bounds.items()), key=lambda pair: pair[0])


def _bound_s(times: GridEstimates, grid: StageGrid) -> float:
    """Seconds of all micro-batches on the slowest stage, with the best split in which the end stages may differ."""
    problem, tp_groups = times.problem, times.tp_groups(grid)
    bounds = []
    for size in _sizes(problem, grid):
        layer_s = [min(times.stage_s(s, 1, False, False, size, p) for p in times.pricer.policies()) for s in tp_groups]
        slowest = max(layer_s[1:-1], default=0.0)
        ends = layer_s if len(layer_s) < 3 else [layer_s[0], layer_s[-1]]
        rate = sum(1 / s for s in ends) + (len(layer_s) - 2) / slowest if slowest else sum(1 / s for s in ends)
        bounds.append(problem.workload.global_batch // (grid.width * size) * problem.model.num_layers / rate)
    return min(bounds, default=math.inf)


def _sizes(problem: Problem, grid: StageGrid) -> list[int]:
    """Micro-batch sizes of a pipeline, of which every replica takes as many sequences."""
    return [size for size in dividing_sizes(problem, grid.width) if size % grid.replicas == 0]


def expert_grids(pricer: Pricer, groups: Sequence[DeviceGroup]) -> Iterator[StageGrid]:
    """The grids of TP groups in rank order, where layers have experts with every expert-parallel degree: TP times the
    replicas that share the experts, which it divides (`megatron/core/transformer/moe/moe_layer.py`).

    These are neighbours in a stage: ranks in the order tp-pp-dp share experts in TP groups only, as the assertions of
    `megatron/core/parallel_state.py` on that order ask.
    """
    problem = pricer.problem
    counts = [kind.experts.count for kind in problem.model.kinds if kind.experts is not None]
    shared = bool(counts) and pricer.features.stages is not None
    for dense in grids(problem, groups, both=True):
        yield dense.sharing(1) if shared else dense
    for dense in grids(problem, groups, both=False) if shared else ():
        for replicas in range(2, dense.width + 1):
            divided = any(count % (dense.tp * replicas) for count in counts)
            if dense.width % replicas or divided:
                continue
            grid = dense.sharing(replicas)
            if all(_may_share(problem, devices) for stage_groups in grid.stages for devices in stage_groups):
                yield grid


def _may_share(problem: Problem, devices: DeviceGroup) -> bool:
    """Whether our plan space lets replicas on these devices share experts: any number in a machine that TP may have, or
    of one GPU type over machines."""
    cluster, machines = problem.cluster, {int(problem.cluster.machine_of[d]) for d in devices}
    if len(machines) > 1:
        return len({cluster.gpu_of(device).type_name for device in devices}) == 1
    return len(devices) in problem.space.allowed_tp(cluster.machines[machines.pop()].num_gpus)


def _choices(times: GridEstimates, grid: StageGrid) -> Iterator[PlanCandidate]:
    """All micro-batch sizes, schedules, shardings, policies and layers that fit memory on a grid."""
    problem, width, stages = times.problem, grid.width, len(grid.stages)
    tp_groups, messages, rings = times.tp_groups(grid), times.messages(grid), times.rings(grid)
    copies = width * grid.replicas
    for size in _sizes(problem, grid):
        count = problem.workload.global_batch // (width * size)
        message_s = messages.seconds(size * times.sequence_bytes)
        by_speed = times.policies_by_speed(tp_groups[0], size)
        for stage in optimizer_shardings(problem, copies):
            shards = copies if stage else 1
            optimizer_s = times.optimizer_s(grid, width if stage else 1)
            for chunks in _chunk_counts(problem, stages, count):
                max_layers_with = partial(
                    times.max_layers_by_stage, tp_groups, size, num_micro_batches=count, shards=shards, chunks=chunks
                )
                for recompute, max_layers in _recomputings(problem, by_speed, chunks, max_layers_with):
                    pipeline = _PipelineTimes.of(times, tp_groups, message_s, size, recompute, count, chunks)
                    for seconds, layers in _best_splits(problem, pipeline, max_layers):
                        per_stage = layers.per_stage(stages)
                        sync_s = rings.sync_s(times.gradient_bytes(per_stage))
                        stage_s = pipeline.stages_s(per_stage)
                        end_s = times.synced_s(seconds, stage_s, message_s, sync_s, per_stage, stage, chunks)
                        make = partial(_plan, grid, layers, recompute, size, count, stage)
                        yield PlanCandidate(end_s + optimizer_s, make)


def _recomputings(
    problem: Problem, by_speed: Sequence[str], chunks: int, max_layers_with: Callable[..., list[int]]
) -> Iterator[tuple[MegatronRecompute, list[int]]]:
    """Recompute worth trying, with the most layers that then fit each stage.

    Where memory binds nowhere, more recompute is only slower. Blocks begin with the shortest with which the model fits;
    a few longer ones let layers move to faster stages.
    """
    num_layers, lengths = problem.model.num_layers, block_lengths(problem, chunks)

    def unbound(max_layers: Sequence[int]) -> bool:
        return min(max_layers) > num_layers - len(max_layers)

    for recompute in map(MegatronRecompute, by_speed):
        max_layers = max_layers_with(recompute.policy)
        yield recompute, max_layers
        if unbound(max_layers):
            break
    if recompute.policy == by_speed[0] or sum(max_layers) < num_layers:
        return
    shortest = bisect_left(lengths, True, key=lambda n: sum(max_layers_with("full", block=n)) >= num_layers)
    for n in lengths[shortest : shortest + _BLOCKS]:
        max_layers = max_layers_with("full", block=n)
        yield MegatronRecompute("full", n), max_layers
        if unbound(max_layers):
            return


def block_lengths(problem: Problem, chunks: int) -> range:
    """Numbers of first layers of each of `chunks` ranges that may recompute while the others do not."""
    space, policies = problem.space, recompute_policies(problem.workload)
    some = space.recompute_per_stage and space.recompute_per_layer and {"none", "full"} <= set(policies)
    return range(1, problem.model.num_layers // chunks) if some else range(0)


def _schedule(chunks: int) -> Schedule:
    return next(schedule for schedule in RUNS_1F1B if schedule.chunked == (chunks > 1))


def _chunk_counts(problem: Problem, stages: int, num_micro_batches: int) -> list[int]:
    """Numbers of layer ranges a stage that the schedules allow; 1 stands for plain 1F1B."""
    allowed = schedules(problem.workload)
    counts = [1] if _schedule(1) in allowed else []
    if _schedule(2) in allowed and stages > 1 and num_micro_batches % stages == 0:
        counts += range(2, min(problem.space.max_chunks, problem.model.num_layers // stages) + 1)
    return [chunks for chunks in counts if problem.model.num_layers % chunks == 0]


@dataclass(frozen=True, slots=True)
class _PipelineTimes:
    """Seconds that make up those of a pipeline: of a layer on each stage, what each of the first `block` layers takes
    longer, what embedding and head add, and of the messages at each boundary."""

    layer_s: list[float]
    longer_s: list[float]
    block: int
    added_s: list[float]
    message_s: Sequence[float]
    num_micro_batches: int
    chunks: int

    @classmethod
    def of(
        cls,
        times: GridEstimates,
        tp_groups: Sequence[StageTpGroups],
        message_s: Sequence[float],
        size: int,
        recompute: MegatronRecompute,
        num_micro_batches: int,
        chunks: int,
    ) -> "_PipelineTimes":
        """The times on the slowest TP group of each stage."""
        layer_s, added_s = times.linear_s(tp_groups, size, recompute.policy if recompute.block is None else "none")
        full_s = (times.stage_s(groups, 1, False, False, size, recompute.policy) for groups in tp_groups)
        longer_s = [full - plain for full, plain in zip(full_s, layer_s, strict=True)]
        block = (recompute.block or 0) * chunks
        return cls(layer_s, longer_s, block, added_s, message_s, num_micro_batches, chunks)

    def stages_s(self, layers: Sequence[int]) -> list[float]:
        """Seconds of each stage for one micro-batch."""
        each = zip(layers, self.layer_s, self.longer_s, self.added_s, strict=True)
        return [n * layer + min(n, self.block) * longer + added for n, layer, longer, added in each]

    def seconds(self, layers: Sequence[int]) -> float:
        """Approximate seconds of the pipelines.

        Interleaving shortens the fill, but sends each micro-batch `chunks` times.
        """
        stage_s = self.stages_s(layers)
        if self.chunks == 1:
            return one_f_one_b_s(stage_s, self.message_s, self.num_micro_batches)
        period_s = max(*stage_s, self.chunks * max(self.message_s) / 2)
        return self.num_micro_batches * period_s + (sum(stage_s) - max(stage_s)) / self.chunks + sum(self.message_s)


def _best_splits(
    problem: Problem, pipeline: _PipelineTimes, max_layers: Sequence[int]
) -> list[tuple[float, MegatronLayers]]:
    """The best few splits within `max_layers`, each with the seconds of the pipelines."""
    stages, num_layers, chunks = len(max_layers), problem.model.num_layers, pipeline.chunks
    estimates: dict[MegatronLayers, float] = {}

    def seconds(layers: MegatronLayers) -> float:
        if layers not in estimates:
            estimates[layers] = pipeline.seconds(layers.per_stage(stages))
        return estimates[layers]

    if stages == 1:
        return (
            [(pipeline.seconds((num_layers,)), MegatronLayers(num_layers, 0, 0))] if max_layers[0] >= num_layers else []
        )
    inner, slowest_s = stages - 2, max(pipeline.layer_s[1:-1], default=0.0)
    for middle in range(chunks, min(max_layers[1:-1]) + 1, chunks) if inner else (0,):
        ends = num_layers - inner * middle
        low, high = max(chunks, ends - max_layers[-1]), min(max_layers[0], ends - chunks)
        if ends < 2 * chunks or pipeline.num_micro_batches * middle * slowest_s > min(
            estimates.values(), default=math.inf
        ):
            break
        if not problem.space.uneven_layers:
            least, most = num_layers // stages, -(-num_layers // stages)
            if inner and not least <= middle <= most:
                continue
            low, high = max(low, least, ends - most), min(high, most, ends - least)
        low, high = -(-low // chunks), high // chunks  # ranges of the first stage
        at = partial(_with_first, middle, ends, chunks)
        # The seconds are convex between the lengths from which on layers of the first or the last stage take less.
        bends = {
            low,
            high,
            *(n for n in (pipeline.block // chunks, (ends - pipeline.block) // chunks) if low < n < high),
        }
        for left, right in pairwise(sorted(bends)) if low < high else [(low, high)]:
            while left < right:
                half = (left + right) // 2
                if seconds(at(half)) <= seconds(at(half + 1)):
                    right = half
                else:
                    left = half + 1
            if left == right:
                seconds(at(left))
    ranked = sorted(((value, layers) for layers, value in estimates.items()), key=lambda pair: pair[0])
    return ranked[:_SPLITS]


def _with_first(middle: int, ends: int, chunks: int, first: int) -> MegatronLayers:
    return MegatronLayers(first * chunks, middle, ends - first * chunks, chunks)


def _plan(
    grid: StageGrid,
    layers: MegatronLayers,
    recompute: MegatronRecompute,
    size: int,
    num_micro_batches: int,
    sharding: int,
) -> Plan:
    per_stage = layers.per_stage(len(grid.stages))
    slots: Sequence[Sequence[StageHolders]] = grid.stages
    if grid.degree is not None:
        slots = [[TensorParallel(devices, None, grid.degree) for devices in groups] for groups in grid.stages]
    return aligned_plan(
        slots,
        per_stage,
        [recompute.of(ranges) for ranges in layer_ranges(per_stage, layers.chunks)],
        num_micro_batches,
        size,
        _schedule(layers.chunks),
        Sharding(sharding),
        chunks=layers.chunks,
    )
