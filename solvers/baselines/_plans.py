"""Plans from what a search chooses: devices, layers and batches; and what baselines leave to the workload."""

from collections.abc import Callable, Sequence
from itertools import permutations

from hexiopt.plan.parallelism import Replica, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, layer_ranges, schedules, sharding_stages
from hexiopt.schedules.in_flight import InFlight, in_flight
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule, positions
from solvers.completion.allocation import least_bottleneck
from solvers.core.partition import DeviceGroup

_FEW = 4  # stages up to which layers one off are tried too

StageHolders = DeviceGroup | tuple[Replica, ...] | TensorParallel | SequenceParallel  # of a stage of one pipeline
Ranges = tuple[tuple[int, int], ...]  # layers of a stage


# Schedules of published systems, by name: a new one of ours must not widen their spaces.
RUNS_1F1B = (ONE_F_ONE_B, INTERLEAVED)  # where stages hold one layer range
STAGE_SCHEDULES = (GPIPE, *RUNS_1F1B)


def in_flight_of_1f1b(stage: int, num_stages: int, num_micro_batches: int) -> InFlight:
    """What a stage with one layer range has in flight."""
    return in_flight(RUNS_1F1B[0], positions(num_stages, num_micro_batches)[stage])


def one_f_one_b(problem: Problem) -> Schedule | None:
    """The allowed schedule that runs 1F1B (interleaved does so with one layer range a stage); None if there is none."""
    allowed = schedules(problem.workload)
    return next((schedule for schedule in RUNS_1F1B if schedule in allowed), None)


def optimizer_shardings(problem: Problem, holders: int = 2) -> list[int]:
    """The ZeRO stages up to 1 that the workload allows, ascending; only the first where parameters have one of
    `holders`.

    Neither is always faster: ZeRO-1 leaves more memory, but only half of what it sends can run next to a backward.
    """
    return [stage for stage in sharding_stages(problem.workload) if stage <= 1][: 1 if holders == 1 else None]


def even_parts(total: int, count: int) -> list[int]:
    """`total` split into `count` parts within one of each other, the larger ones first."""
    low, extra = divmod(total, count)
    return [low + (k < extra) for k in range(count)]


def dividing_sizes(problem: Problem, num_pipelines: int) -> list[int]:
    """Micro-batch sizes that divide the equal share of every pipeline; none if pipelines do not divide the global
    batch."""
    share, rest = divmod(problem.workload.global_batch, num_pipelines)
    return [] if rest else [size for size in problem.space.micro_batch_sizes(share) if share % size == 0]


def divides_model(problem: Problem, tp: int) -> bool:
    """Whether attention heads and MLP columns divide by `tp`, as the layers of Megatron-LM require."""
    return problem.model.num_heads % tp == 0 and problem.model.ffn_size % tp == 0


# Layers that move between stages.


def stage_pairs(num_stages: int, few: int, reach: int) -> list[tuple[int, int]]:
    """Pairs (giver, taker) of stages: any two of up to `few` stages; of more stages, those at most `reach` apart."""
    if num_stages <= few:
        reach = num_stages
    return [(a, b) for a, b in permutations(range(num_stages), 2) if abs(a - b) <= reach]


def move_layer(layers: Sequence[int], giver: int, taker: int) -> tuple[int, ...]:
    """`layers` per stage with one layer moved."""
    return tuple(n - (s == giver) + (s == taker) for s, n in enumerate(layers))


def neighbouring_layers(
    layers: Sequence[int], max_layers: Sequence[int], few: int = 8, reach: int = 1
) -> list[tuple[int, ...]]:
    """All `layers` per stage with one layer moved, within `max_layers`, between the stages of `stage_pairs`."""
    pairs = stage_pairs(len(layers), few, reach)
    return [move_layer(layers, a, b) for a, b in pairs if layers[a] > 1 and layers[b] < max_layers[b]]


def balanced_layers(times: Sequence[Sequence[float]], total: int) -> list[tuple[int, ...]]:
    """Layers per stage that make the slowest as fast as memory allows and, of a few stages, all splits one layer off.

    `times[s]` are the seconds of 1, 2, ... layers on stage s, as many as fit. Empty where the `total` does not fit.
    """
    if not all(times) or sum(map(len, times)) < total:
        return []
    best = tuple(least_bottleneck(times, total))
    return [best, *neighbouring_layers(best, list(map(len, times)), _FEW, reach=0)]


def shift_layers(
    layers: Sequence[int],
    max_layers: Sequence[int],
    seconds: Callable[[Sequence[int]], float],
    *,
    passes: int = 5,
) -> tuple[tuple[int, ...], float]:
    """Move single layers, within `max_layers`, while `seconds` falls; returns the layers per stage and their seconds.

    Layers move between any two of up to twelve stages and between near ones of more, in at most `passes` passes.
    """
    best, best_s = tuple(layers), seconds(layers)
    pairs = stage_pairs(len(best), few=12, reach=2)
    for _ in range(passes):
        start_s = best_s
        for a, b in pairs:
            if best[a] > 1 and best[b] < max_layers[b]:
                moved = move_layer(best, a, b)
                moved_s = seconds(moved)
                if moved_s < best_s:
                    best, best_s = moved, moved_s
        if best_s == start_s:
            break
    return best, best_s


# Plans.


def pipeline_of(
    stages: Sequence[StageHolders],
    layers: Sequence[int],
    recompute: str | Sequence[Recompute],
    num_micro_batches: int,
    micro_batch_size: int,
    *,
    chunks: int = 1,
) -> Pipeline:
    """A pipeline of `layers` per stage, in `chunks` ranges each; `recompute` is one policy or that of every stage."""
    if isinstance(recompute, str):
        recompute = [(recompute,)] * len(layers)
    parts = zip(stages, layer_ranges(layers, chunks), recompute, strict=True)
    return Pipeline(tuple(_stage(*part) for part in parts), num_micro_batches, micro_batch_size)


def aligned_plan(
    slots: Sequence[Sequence[StageHolders]],
    layers: Sequence[int],
    recompute: str | Sequence[Recompute],
    batches: int | Sequence[int],
    micro_batch_size: int,
    schedule: Schedule,
    sharding: Sharding,
    *,
    chunks: int = 1,
) -> Plan:
    """Pipelines of the same layers and recompute (see `pipeline_of`): `slots[s][k]` is stage s of pipeline k, which has
    `batches[k]` micro-batches, or `batches` as all have."""
    if isinstance(batches, int):
        batches = [batches] * len(slots[0])
    pipelines = (
        pipeline_of(
            [stage_groups[k] for stage_groups in slots], layers, recompute, count, micro_batch_size, chunks=chunks
        )
        for k, count in enumerate(batches)
    )
    return Plan(tuple(pipelines), schedule, sharding)


def _stage(devices: StageHolders, layers: Ranges, recompute: Recompute) -> Stage:
    if isinstance(devices, TensorParallel | SequenceParallel):
        return Stage(devices, layers, recompute)
    if isinstance(devices[0], Replica):
        return Stage.of_replicas(devices, layers, recompute)
    return Stage(TensorParallel(devices), layers, recompute)
