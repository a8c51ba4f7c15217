"""Depths of a priced plan: so many micro-batches in flight in each stage that no round trip bounds the period, or more,
as long as these make the step shorter."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import TypeVar

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.numbers.coefficients import FRAGMENTATION
from hexiopt.plan.parallelism import ExpertParallel, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.schedules.depth import round_trip_depths
from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.schedule import Schedule, positions

# A period is shortened in steps that change the depths of most pipelines, down to a share at which none was better.
_SHORTER, _SHORTEST = 0.85, 0.3

_Deeper = TypeVar("_Deeper")


def best_depths(
    deepen: Callable[[float], _Deeper | None], step_s: Callable[[_Deeper], float], usual_s: float, enough_s: float = inf
) -> _Deeper | None:
    """The best of what `deepen` makes for ever smaller shares of a period, as long as it gets better, by the seconds
    `step_s`; None where none takes less than `usual_s`. Only the first is tried where it takes `enough_s` or longer."""
    best, least_s, last, share = None, usual_s, None, 1.0
    while share > _SHORTEST:
        deeper = deepen(share)
        if deeper is not None and deeper != last:
            last, seconds = deeper, step_s(deeper)
            if seconds < least_s:
                best, least_s = deeper, seconds
            elif share < 1.0:
                break
        if least_s >= enough_s:
            break
        share *= _SHORTER
    return best


def with_depths(
    plan: Plan, priced: Sequence[PipelineCost], whole: Sequence[PipelineCost], stages: StageModel, share: float
) -> Plan | None:
    """`plan` whose stages hold what its messages ask for in a `share` of the period (`round_trip_depths`), as far as
    memory has room, and no less than its schedule has; None where nothing would change. `priced` [pipelines] are its
    costs, `whole` those with backwards that are not split, and with the memory of its communicators."""
    pipelines = tuple(
        [_with_depths(*line, plan.schedule, stages, share) for line in zip(plan.pipelines, priced, whole, strict=True)]
    )
    return None if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)


def _with_depths(
    pipeline: Pipeline, priced: PipelineCost, whole: PipelineCost, schedule: Schedule, model: StageModel, share: float
) -> Pipeline:
    stages, count = pipeline.stages, pipeline.num_micro_batches
    last = len(stages) - 1
    if not last or any(isinstance(stage.parallelism, SequenceParallel | ExpertParallel) for stage in stages):
        return pipeline
    usual = [most_in_flight(schedule, at) for at in positions(len(stages), count)]
    most = [
        now + _room(stage, cost, pipeline.micro_batch_size, s == 0, s == last, model)
        for s, (now, stage, cost) in enumerate(zip(usual, stages, whole.stages, strict=True))
    ]
    seconds = [stage.forward_s + stage.backward_s for stage in priced.stages]
    late_s = [sum(sum(chunk[2:]) for chunk in stage.chunk_s) for stage in priced.stages]
    trips = list(zip(priced.send_forward_s, priced.send_backward_s, strict=True))
    depths = map(max, round_trip_depths(seconds, late_s, trips, count, most, share), usual)
    changed = [
        stage if depth == now else replace(stage, in_flight=depth)
        for stage, depth, now in zip(stages, depths, usual, strict=True)
    ]
    return replace(pipeline, stages=tuple(changed))


def _room(stage: Stage, cost: StageCost, size: int, first: bool, last: bool, model: StageModel) -> int:
    """How many micro-batches more than it has in flight a stage has memory for, each with a message in a queue."""
    rooms = []
    executors = zip(stage.parallelism.executors, stage.parallelism.samples(size), cost.executors, strict=True)
    for devices, samples, executor in executors:
        group = model.tp_groups.of(devices)
        (stored,) = model.footprint(group, samples, stage.policies(), first, last).stored
        message = model.memory_model(group, samples).activations.message
        rooms.append(int(-executor.excess_bytes / (1 + FRAGMENTATION) / (stored + message)))
    return max(0, min(rooms))
