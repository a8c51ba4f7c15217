"""Shapes of plans with sequence stages: which devices form which stages of which pipelines; and operators on shapes.

A shape says nothing about layers, layouts and batches, which `plan_builder.py` finds. To add an operator, write a
function `(near, shape, rng) -> shape or None` and a line of `SHAPE_OPERATORS`; results that the plan space forbids are
filtered out for all of them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from solvers.core.operators import Lottery, Operator, OperatorStatistics, OperatorTally
from solvers.core.zero import LOCKSTEP, sharding_groups

StageDevices = tuple[int, ...]  # a stage's devices, ascending
ShapePipeline = tuple[StageDevices, ...]


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Pipelines of stages, their micro-batch size in sequences, the ZeRO stage and its groups."""

    pipelines: tuple[ShapePipeline, ...]
    size: int = 1
    zero: int = 1
    groups: str = "all"

    def with_pipeline(self, p: int, *pipelines: ShapePipeline) -> "SequenceShape":
        """The shape with pipeline p replaced by others."""
        return replace(self, pipelines=(*self.pipelines[:p], *pipelines, *self.pipelines[p + 1 :]))


def may_lockstep(problem: Problem, shape: SequenceShape) -> bool:
    """Whether the pipelines of a shape can run in lockstep: equally many stages and micro-batches in each."""
    batches_even = problem.workload.global_batch % (len(shape.pipelines) * shape.size) == 0
    return len(shape.pipelines) == 1 or (batches_even and len(set(map(len, shape.pipelines))) == 1)


def zero_stages(problem: Problem, shape: SequenceShape) -> tuple[int, ...]:
    """The ZeRO stages that a plan of the shape may use."""
    own = sharding_stages(problem.workload)
    return tuple(stage for stage in own if stage < LOCKSTEP or may_lockstep(problem, shape))


def with_sharding(problem: Problem, shape: SequenceShape) -> SequenceShape | None:
    """The shape, its ZeRO stage replaced where `zero_stages` does not allow it; None where that allows none."""
    allowed = zero_stages(problem, shape)
    if shape.zero in allowed:
        return shape
    return replace(shape, zero=allowed[-1]) if allowed else None


_TRIES = 20  # operators drawn for one candidate


class ShapeNeighbourhood:
    """What operators on shapes know of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.machine_of: list[int] = problem.cluster.machine_of.tolist()

    def allows(self, shape: SequenceShape) -> bool:
        """Whether every stage of a shape has devices and the shape respects the plan space."""
        space, workload = self.problem.space, self.problem.workload
        pipelines, stages = len(shape.pipelines), {len(pipeline) for pipeline in shape.pipelines}
        return (
            pipelines * shape.size <= workload.global_batch
            and space.num_pipelines in (None, pipelines)
            and (space.num_stages is None or stages == {space.num_stages})
            and max(stages) <= self.problem.model.num_layers
            and all(devices for pipeline in shape.pipelines for devices in pipeline)
        )


Change: TypeAlias = Callable[[ShapeNeighbourhood, SequenceShape, random.Random], SequenceShape | None]


# Devices.


def _part(near: ShapeNeighbourhood, devices: StageDevices, rng: random.Random) -> StageDevices:
    """Some devices of a stage: all in one machine, half of these, or a single one."""
    machine = near.machine_of[rng.choice(devices)]
    own = tuple(d for d in devices if near.machine_of[d] == machine)
    return own[: rng.choice((len(own), max(1, len(own) // 2), 1))]


def move_devices(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Some devices of a stage go to another."""
    (p, k), (q, j) = _places(shape, rng), _places(shape, rng)
    moved = _part(near, shape.pipelines[p][k], rng)
    if (p, k) == (q, j) or len(moved) == len(shape.pipelines[p][k]):
        return None
    return _exchange(shape, (p, k), moved, (q, j), ())


def swap_devices(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Some devices of two stages change places."""
    (p, k), (q, j) = _places(shape, rng), _places(shape, rng)
    if (p, k) == (q, j):
        return None
    return _exchange(
        shape, (p, k), _part(near, shape.pipelines[p][k], rng), (q, j), _part(near, shape.pipelines[q][j], rng)
    )


def leave_unused(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Some devices of a stage fall out of use."""
    p, k = _places(shape, rng)
    devices = shape.pipelines[p][k]
    out = set(_part(near, devices, rng))
    return _with(shape, p, k, tuple(d for d in devices if d not in out))


def use_idle(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Idle devices join a stage."""
    used = {d for pipeline in shape.pipelines for devices in pipeline for d in devices}
    free = tuple(d for d in near.problem.usable_devices if d not in used)
    if not free:
        return None
    p, k = _places(shape, rng)
    return _with(shape, p, k, (*shape.pipelines[p][k], *_part(near, free, rng)))


# Stages.


def join_stages(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Two neighbouring stages become one."""
    p = rng.randrange(len(shape.pipelines))
    pipeline = shape.pipelines[p]
    if len(pipeline) < 2:
        return None
    k = rng.randrange(len(pipeline) - 1)
    return shape.with_pipeline(p, (*pipeline[:k], _ascending(pipeline[k] + pipeline[k + 1]), *pipeline[k + 2 :]))


def part_stage(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """A stage becomes two."""
    p, k = _places(shape, rng)
    pipeline = shape.pipelines[p]
    parts = _parts(near, pipeline[k], rng)
    return None if parts is None else shape.with_pipeline(p, (*pipeline[:k], *parts, *pipeline[k + 1 :]))


def _parts(
    near: ShapeNeighbourhood, devices: StageDevices, rng: random.Random
) -> tuple[StageDevices, StageDevices] | None:
    """A stage cut in two, between machines or in the middle; None where it has one device."""
    if len(devices) < 2:
        return None
    machines = list(dict.fromkeys(near.machine_of[d] for d in devices))
    if len(machines) > 1:
        rng.shuffle(machines)
        first = set(machines[: rng.randint(1, len(machines) - 1)])
        parts = tuple(d for d in devices if near.machine_of[d] in first)
    else:
        parts = devices[: len(devices) // 2]
    return parts, tuple(d for d in devices if d not in set(parts))


def swap_stages(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Two stages of a pipeline change places."""
    p = rng.randrange(len(shape.pipelines))
    pipeline = list(shape.pipelines[p])
    if len(pipeline) < 2:
        return None
    a, b = rng.sample(range(len(pipeline)), 2)
    pipeline[a], pipeline[b] = pipeline[b], pipeline[a]
    return shape.with_pipeline(p, tuple(pipeline))


# Pipelines.


def join_pipelines(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Two pipelines become one, merged stage by stage or one after the other."""
    if len(shape.pipelines) < 2:
        return None
    p, q = sorted(rng.sample(range(len(shape.pipelines)), 2))
    one, two = shape.pipelines[p], shape.pipelines[q]
    if len(one) == len(two) and rng.random() < 0.5:
        joined: ShapePipeline = tuple(_ascending(a + b) for a, b in zip(one, two, strict=True))
    else:
        joined = one + two
    return shape.with_pipeline(q).with_pipeline(p, joined)


def part_pipeline(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """A pipeline becomes two, cut along its length or in every stage."""
    p = rng.randrange(len(shape.pipelines))
    pipeline = shape.pipelines[p]
    if len(pipeline) > 1 and rng.random() < 0.5:
        k = rng.randint(1, len(pipeline) - 1)
        return shape.with_pipeline(p, pipeline[:k], pipeline[k:])
    pairs = [_parts(near, devices, rng) for devices in pipeline]
    if None in pairs:
        return None
    return shape.with_pipeline(p, tuple(a for a, _ in filter(None, pairs)), tuple(b for _, b in filter(None, pairs)))


def change_size_or_sharding(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
    """Another micro-batch size, or another ZeRO stage and its groups."""
    problem = near.problem
    if rng.random() < 0.5:
        return replace(shape, size=rng.choice(problem.space.micro_batch_sizes(problem.workload.global_batch)))
    zero = rng.choice(zero_stages(problem, shape))
    return replace(shape, zero=zero, groups=rng.choice(sharding_groups(problem, zero)))


def _places(shape: SequenceShape, rng: random.Random) -> tuple[int, int]:
    p = rng.randrange(len(shape.pipelines))
    return p, rng.randrange(len(shape.pipelines[p]))


def _ascending(devices: Sequence[int]) -> StageDevices:
    return tuple(sorted(devices))


def _with(shape: SequenceShape, p: int, k: int, devices: Sequence[int]) -> SequenceShape:
    pipeline = shape.pipelines[p]
    return shape.with_pipeline(p, (*pipeline[:k], _ascending(devices), *pipeline[k + 1 :]))


def _exchange(
    shape: SequenceShape, a: tuple[int, int], given: StageDevices, b: tuple[int, int], got: StageDevices
) -> SequenceShape:
    out, back = set(given), set(got)
    one = [d for d in shape.pipelines[a[0]][a[1]] if d not in out]
    two = [d for d in shape.pipelines[b[0]][b[1]] if d not in back]
    return _with(_with(shape, *a, (*one, *got)), *b, (*two, *given))


def _legal(change: Change) -> Change:
    """The operator followed by a ZeRO stage that suits its result; None where the plan space forbids that."""

    def apply(near: ShapeNeighbourhood, shape: SequenceShape, rng: random.Random) -> SequenceShape | None:
        moved = change(near, shape, rng)
        found = None if moved is None else with_sharding(near.problem, moved)
        return None if found is None or not near.allows(found) else found

    return apply


SHAPE_OPERATORS: tuple[Operator[ShapeNeighbourhood, SequenceShape, SequenceShape], ...] = (
    Operator("move_devices", 2, _legal(move_devices)),
    Operator("swap_devices", 1, _legal(swap_devices)),
    Operator("join_stages", 1, _legal(join_stages)),
    Operator("part_stage", 1, _legal(part_stage)),
    Operator("swap_stages", 1, _legal(swap_stages)),
    Operator("join_pipelines", 1, _legal(join_pipelines)),
    Operator("part_pipeline", 1, _legal(part_pipeline)),
    Operator("change_size_or_sharding", 1, _legal(change_size_or_sharding)),
    Operator("leave_unused", 1, _legal(leave_unused)),
    Operator("use_idle", 1, _legal(use_idle)),
)


class ShapeProposals:
    """Proposes candidates near a shape."""

    def __init__(self, problem: Problem, statistics: OperatorStatistics) -> None:
        self.lottery = Lottery(SHAPE_OPERATORS, ShapeNeighbourhood(problem), problem, statistics)

    def draw(self, shape: SequenceShape, rng: random.Random) -> tuple[OperatorTally, SequenceShape] | None:
        """A candidate and the tally of its operator; None where several draws give none."""
        tries = (self.lottery.draw(shape, rng) for _ in range(_TRIES))
        return next((found for found in tries if found is not None), None)
