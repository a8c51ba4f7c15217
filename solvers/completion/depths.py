"""Depths of a priced plan: so many micro-batches in flight in each stage that no round trip bounds the period."""

from collections.abc import Sequence
from dataclasses import replace

from hexiopt.cost.cost import PipelineCost, StageCost
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.numbers.coefficients import FRAGMENTATION
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.schedules.depth import round_trip_depths
from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.schedule import Schedule, positions


def deepen(
    plan: Plan, priced: Sequence[PipelineCost], whole: Sequence[PipelineCost], stages: StageModel
) -> Plan | None:
    """`plan` whose stages hold what its messages ask for (`round_trip_depths`), as far as memory has room, and no less
    than its schedule has; None where nothing would change. `priced` [pipelines] are its costs, `whole` those with
    backwards that are not split, and with the memory of its communicators."""
    pipelines = tuple(
        [_deepen(*line, plan.schedule, stages) for line in zip(plan.pipelines, priced, whole, strict=True)]
    )
    return None if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)


def _deepen(
    pipeline: Pipeline, priced: PipelineCost, whole: PipelineCost, schedule: Schedule, model: StageModel
) -> Pipeline:
    stages, count = pipeline.stages, pipeline.num_micro_batches
    last = len(stages) - 1
    if not last or any(isinstance(stage.parallelism, SequenceParallel) for stage in stages):
        return pipeline
    usual = [most_in_flight(schedule, at) for at in positions(len(stages), count)]
    most = [
        now + _room(stage, cost, pipeline.micro_batch_size, s == 0, s == last, model)
        for s, (now, stage, cost) in enumerate(zip(usual, stages, whole.stages, strict=True))
    ]
    seconds = [stage.forward_s + stage.backward_s for stage in priced.stages]
    late_s = [sum(sum(chunk[2:]) for chunk in stage.chunk_s) for stage in priced.stages]
    trips = list(zip(priced.send_forward_s, priced.send_backward_s, strict=True))
    depths = map(max, round_trip_depths(seconds, late_s, trips, count, most), usual)
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
