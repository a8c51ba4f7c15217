"""What every rank does in a step, in order: the lists of its stage, with the messages and collectives that are its own.

A message between stages is one between each pair of ranks that have tokens in common. They meet in the order of
`PipelineLayout.routes`; so all that ranks do together still has one order, and `check_actions` says so before a run.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hexiopt.cost.sharing import StageOrders
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.schedule import Schedule
from runtime.mapping.buckets import (
    BucketCollective,
    BucketParts,
    CollectiveKind,
    collectives,
    collectives_between,
)
from runtime.mapping.layout import Chunk, Layout, MessageRoute, PipelineLayout, RankExecutor
from runtime.mapping.lowering import (
    COMPUTED,
    Action,
    ActionKind,
    LastBackward,
    Lockstep,
    Reduction,
    StepShape,
    UnitCollective,
    lower,
)
from runtime.mapping.model_parts import EMBEDDING, FINAL_NORM, head_name
from runtime.mapping.one_order import JointEvent, check_inputs, check_one_order, check_units
from runtime.mapping.parts import layer_of
from runtime.mapping.times import StepTimes

RankActions = tuple[Action | BucketCollective, ...]
Unit = tuple[int, int]  # of a virtual stage: how many units come before it in a forward


def rank_actions(
    layout: Layout,
    schedule: Schedule,
    model: ModelSpec,
    seq_len: int,
    buckets: Sequence[BucketParts],
    times: StepTimes | None = None,
) -> list[RankActions]:
    """The actions of every rank, checked.

    Without `times`, pipelines are taken to be balanced. Gradients are summed beside the last backward, which is cut at
    layers for that. Under ZeRO-2 and 3 every backward is cut, and scatters the gradients of
    each unit; under ZeRO-3 every forward too, and all gather weights one unit ahead. Raises InputError where operations
    wait for each other for ever.
    """
    sums, together = list(collectives(buckets)), lockstep(layout, buckets)
    cut = {rank for collective in sums for rank in collective.ranks}
    cut |= {rank for rank, at in enumerate(layout.executor_of) for crew in together if _place(at) in crew.stages}
    expected = StepTimes.even(layout, schedule) if times is None else times
    shapes = []
    for p, (line, chunk_s, message_s) in enumerate(
        zip(layout.lines, expected.chunk_s, expected.message_s, strict=True)
    ):
        parts = tuple(_last_parts(stage, cut) for stage in line.stages)
        shape = StepShape(schedule, line.num_micro_batches, chunk_s, message_s, parts, depths=line.depths)
        if schedule.splits:
            shape = _with_orders(shape, line, expected.orders[p])
        shapes.append(shape)
    waits = [
        frozenset(_waits_for(collective, buckets[collective.bucket], layout, model, shapes)) for collective in sums
    ]
    lists = lower(shapes, waits, together)
    for p, (shape, stages) in enumerate(zip(shapes, lists, strict=True)):
        for s, actions in enumerate(stages):
            check_inputs(actions, shape.num_stages * shape.num_chunks, shape.num_micro_batches)
            for crew in together:
                if (p, s) in crew.stages:
                    check_units(actions, crew.gathers)
    later = list(collectives_between(buckets))
    of_ranks = []
    for rank, executor in enumerate(layout.executor_of):
        units = unit_buckets(executor, rank, buckets, model)
        entries: list[Action | BucketCollective] = []
        for action in lists[executor.pipeline][executor.stage]:
            match action:
                case Action():
                    entries.append(action)
                case Reduction(number):
                    entries += [sums[number]] if rank in sums[number].ranks else []
                case UnitCollective(scatters, part):
                    kind = CollectiveKind.SCATTER if scatters else CollectiveKind.GATHER
                    (unit,) = units_of(part, executor)
                    groups = [(n, _group(buckets[n], rank)) for n in units.get(unit, ()) if buckets[n].zero >= 2]
                    entries += [BucketCollective(kind, n, ranks) for n, ranks in groups if len(ranks) > 1]
        of_ranks.append((*entries, *(collective for collective in later if rank in collective.ranks)))
    check_actions(layout, seq_len, of_ranks)
    return of_ranks


def forward_actions(actions: RankActions, executor: RankExecutor, units: Mapping[Unit, Sequence[int]]) -> RankActions:
    """Of a rank's actions those of the forwards, in the same order: a step that only asks for the loss. `units` are of
    `unit_buckets`; weights are gathered for the part of an operation that next needs them."""
    forwards: list[Action | BucketCollective] = []
    is_for_forward: dict[int, bool] = {}
    for action in reversed(actions):
        if isinstance(action, BucketCollective):
            if action.kind is CollectiveKind.GATHER and is_for_forward[action.bucket]:
                forwards.append(action)
            continue
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            buckets = (number for unit in units_of(action, executor) for number in units.get(unit, ()))
            is_for_forward |= dict.fromkeys(buckets, not action.backward)
        if not action.backward:
            forwards.append(action)
    return tuple(reversed(forwards))


def lockstep(layout: Layout, buckets: Sequence[BucketParts]) -> list[Lockstep]:
    """The stages that run every operation together, because they share gradients of each micro-batch, or weights."""
    crews: list[set[tuple[int, int]]] = []
    for bucket in buckets:
        for ranks in bucket.groups() if bucket.zero >= 2 else ():
            if len(ranks) > 1:
                places = {_place(layout.executor_of[rank]) for rank in ranks}
                crews = [
                    *(crew for crew in crews if not crew & places),
                    places.union(*(crew for crew in crews if crew & places)),
                ]
    gathers = any(bucket.zero == 3 for bucket in buckets)
    return [Lockstep(frozenset(crew), gathers) for crew in sorted(crews, key=min)]


def _place(executor: RankExecutor) -> tuple[int, int]:
    return executor.pipeline, executor.stage


def _group(bucket: BucketParts, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in bucket.groups() if rank in ranks)


def units_of(action: Action, executor: RankExecutor) -> list[Unit]:
    """The units that a forward or backward, or a part of one, runs."""
    (chunk,) = (chunk for chunk in executor.chunks if chunk.number == action.stage)
    count, part = backward_parts(chunk), action.part
    if part is None:
        return [(action.stage, unit) for unit in range(count)]
    return [(action.stage, count - 1 - part if action.backward else part)]


def unit_buckets(
    executor: RankExecutor, rank: int, buckets: Sequence[BucketParts], model: ModelSpec
) -> dict[Unit, list[int]]:
    """The numbers of the buckets that a rank has in each unit. A tied matrix is in two units where a stage is the first
    and the last."""
    by_unit: dict[Unit, list[int]] = defaultdict(list)
    for number, bucket in enumerate(buckets):
        if rank in bucket.held.ranks:
            for chunk in executor.chunks:
                for part in sorted(
                    {part for parameter in bucket.parts for part in _gradient_parts(parameter.name, chunk, model)}
                ):
                    by_unit[chunk.number, backward_parts(chunk) - 1 - part].append(number)
    return dict(by_unit)


def check_actions(layout: Layout, seq_len: int, of_ranks: Sequence[RankActions]) -> None:
    """Raise InputError, which names who waits for whom, unless all messages, computations and sums have one order."""
    routes = {
        (p, boundary): line.routes(boundary, seq_len)
        for p, line in enumerate(layout.lines)
        for boundary in range(len(line.stages) * line.num_chunks - 1)
    }
    check_one_order(
        [list(_joint_events(layout.executor_of[rank], rank, routes, actions)) for rank, actions in enumerate(of_ranks)]
    )


def boundary_of(action: Action) -> tuple[int, bool]:
    """Between which virtual stage and the next a message travels, and whether it goes back."""
    earlier = action.kind in (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD)
    return action.stage - earlier, action.backward


def backward_parts(chunk: Chunk) -> int:
    """In how many parts a backward can be cut: head, layers from the last to the first, embedding. Layers that are
    recomputed together are one part."""
    return chunk.last + len(chunk.groups) + chunk.first


def _last_parts(stage: Sequence[RankExecutor], summing: set[int]) -> tuple[int, ...]:
    is_summed = any(rank in summing for executor in stage for rank in executor.ranks)
    return tuple(backward_parts(chunk) if is_summed else 1 for chunk in stage[0].chunks)


def _with_orders(shape: StepShape, line: PipelineLayout, orders: StageOrders) -> StepShape:
    """A shape whose stages run `orders`."""
    late_parts = []
    for stage, order, most in zip(line.stages, orders, shape.last_parts, strict=True):
        counts = Counter(operation.chunk for operation in order if operation.kind is OperationKind.WEIGHTS)
        late_parts.append(
            tuple(
                tuple(
                    min(_layer_part(chunk, chunk.layers[1] - 1 - k), most[c] - 1)
                    for k in range(counts[c] // shape.num_micro_batches)
                )
                for c, chunk in enumerate(stage[0].chunks)
            )
        )
    return replace(shape, orders=orders, late_parts=tuple(late_parts))


def _layer_part(chunk: Chunk, layer: int) -> int:
    """The part of a backward that runs a layer."""
    return chunk.last + sum(first > layer for first, _ in chunk.groups)


def _waits_for(
    collective: BucketCollective, bucket: BucketParts, layout: Layout, model: ModelSpec, shapes: Sequence[StepShape]
) -> Iterator[LastBackward]:
    """The parts of last backwards in which gradients of a bucket are made."""
    for executor in {layout.executor_of[rank].ranks: layout.executor_of[rank] for rank in collective.ranks}.values():
        for c, chunk in enumerate(executor.chunks):
            most = shapes[executor.pipeline].last_parts[executor.stage][c] - 1
            for parameter in bucket.parts:
                for part in _gradient_parts(parameter.name, chunk, model):
                    yield LastBackward(executor.pipeline, executor.stage, c, min(part, most))


def _gradient_parts(name: str, chunk: Chunk, model: ModelSpec) -> Iterator[int]:
    """The parts of a backward through a layer range that make a parameter's gradients."""
    if chunk.last and name in (FINAL_NORM, head_name(model)):
        yield 0
    if chunk.first and name == EMBEDDING:
        yield backward_parts(chunk) - 1
    layer = layer_of(name)
    if layer is not None and chunk.layers[0] <= layer < chunk.layers[1]:
        yield _layer_part(chunk, layer)


def _joint_events(
    executor: RankExecutor, rank: int, routes: Mapping[tuple[int, int], Sequence[MessageRoute]], actions: RankActions
) -> Iterator[JointEvent]:
    """What a rank does together with others; its executor computes together, as there are collectives in it, and those
    of a cell do."""
    where = f"of pipeline {executor.pipeline}"
    for action in actions:
        if isinstance(action, BucketCollective):
            yield JointEvent(str(action), action.ranks)
        elif action.kind in COMPUTED:
            yield JointEvent(f"{action} {where}", executor.together)
        else:
            boundary, backward = boundary_of(action)
            what = f"{'gradients back to' if backward else 'hidden states of'} {boundary}F{action.micro_batch} {where}"
            for route in routes[executor.pipeline, boundary]:
                if rank in (route.sender, route.receiver):
                    sender, receiver = route.ends(backward)
                    ranks = min(sender, receiver), max(sender, receiver)
                    yield JointEvent(f"{what} from rank {sender} to {receiver}", ranks)
