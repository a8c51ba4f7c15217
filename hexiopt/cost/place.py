"""A pipeline on its devices, apart from all others: times and memory of its executors, and the load of its messages."""

from dataclasses import dataclass, replace

from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.context import PipelineContext
from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.network_load import PlacedMessage
from hexiopt.cost.executors.routes import place_messages
from hexiopt.cost.executors.stage_model import StageModel, StagePlace
from hexiopt.cost.extra_communicators import with_communicators
from hexiopt.cost.splits import with_late_weights
from hexiopt.errors import InputError
from hexiopt.plan.messages import Message, executor_links, messages_of
from hexiopt.plan.plan import Pipeline, feature_without_price
from hexiopt.schedules.depth import more_messages
from hexiopt.schedules.graph import PipelineGraph, pipeline_graph
from hexiopt.schedules.in_flight import stages_in_flight
from hexiopt.schedules.schedule import Schedule
from hexiopt.schedules.split import LateWeights


@dataclass(frozen=True, slots=True)
class PlacedPipeline:
    """A pipeline on its devices, apart from all others; all seconds and bytes for one micro-batch.

    Of `messages`, `plain_messages` has the ends alone.
    """

    schedule: Schedule
    num_micro_batches: int
    stages: tuple[StageCost, ...]
    messages: tuple[PlacedMessage, ...]
    plain_messages: tuple[Message, ...]
    lanes: PipelineLanes
    graph: PipelineGraph

    def with_stages(self, stages: tuple[StageCost, ...]) -> "PlacedPipeline":
        """The same pipeline with other costs of its stages."""
        chunk_s = tuple([executor.chunk_s for stage in stages for executor in stage.executors])
        return replace(self, stages=stages, graph=self.graph.with_times(chunk_s))


def place(pipeline: Pipeline, schedule: Schedule, context: PipelineContext, stages: StageModel) -> PlacedPipeline:
    """`pipeline`, which `schedule` can run, on its devices.

    Raises InputError for what is not priced yet and for layers that the model does not have.
    """
    if feature := feature_without_price(pipeline):
        raise InputError(feature)
    size, plan_stages, batches, chunks = (
        pipeline.micro_batch_size,
        pipeline.stages,
        pipeline.num_micro_batches,
        pipeline.num_chunks,
    )
    sharding, contention, communicators = context
    depths, last = pipeline.depths, len(plan_stages) - 1
    in_flight = stages_in_flight(schedule, len(plan_stages), batches, chunks, depths)
    queued = more_messages(schedule, len(plan_stages), batches, depths)
    costs, executor_stages, chunk_s, split = [], [], [], list[LateWeights]()
    num_layers = stages.problem.model.num_layers
    for s, stage in enumerate(plan_stages):
        for begin, end in stage.layers:
            if end > num_layers or begin < 0:
                raise InputError(
                    f"plan: stage {s} has layers {begin} to {end - 1}, the model has {num_layers}; "
                    f"choose layers from 0 to {num_layers - 1}"
                )
        holders = sharding.holders(s, len(stage.parallelism.parameter_copies))
        at = StagePlace(s == 0, s == last, in_flight[s], sharding.zero_stage, queued[s])
        executors = stages.executors(stage, size, at, holders, contention)
        if schedule.splits:
            if communicators:
                executors = with_communicators(StageCost(executors), communicators[s]).executors
            executors, late = zip(*with_late_weights(stage, size, at, executors, stages), strict=True)
            split += late
        costs.append(StageCost(executors))
        for executor in executors:
            executor_stages.append(s)
            chunk_s.append(executor.chunk_s)
    samples, wraps = tuple([stage.parallelism.samples(size) for stage in plan_stages]), chunks > 1
    messages, links = messages_of(samples, wraps), executor_links(samples, wraps)
    layouts = [stage.parallelism.token_layouts for stage in plan_stages]
    placed = place_messages(messages, layouts, stages.routes.between, stages.routes.message_bytes(1))
    return PlacedPipeline(
        schedule,
        batches,
        tuple(costs),
        placed,
        messages,
        PipelineLanes.of(placed),
        pipeline_graph(
            schedule, len(plan_stages), batches, tuple(executor_stages), tuple(chunk_s), links, tuple(split), depths
        ),
    )
