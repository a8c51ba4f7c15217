"""A pipeline on its devices: what its executors take and hold, and what its messages occupy, whatever else runs."""

from dataclasses import dataclass, replace

from hexiopt.cost.context import PipelineContext, refuse_layers_beyond
from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.sharing import PlacedMessage, executor_loads, placed_messages
from hexiopt.errors import InputError
from hexiopt.plan.messages import Message, executor_links, messages_of
from hexiopt.plan.plan import Pipeline, unpriced
from hexiopt.schedules.in_flight import stages_in_flight
from hexiopt.schedules.recurrence import PipelineGraph, pipeline_graph
from hexiopt.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PlacedPipeline:
    """What a pipeline takes apart from others; all seconds and bytes for one micro-batch.

    `network_load` lists (network resource, seconds) of every executor that sends. Of `messages`, `plain_messages` has
    the ends alone.
    """

    schedule: Schedule
    num_micro_batches: int
    stages: tuple[StageCost, ...]
    messages: tuple[PlacedMessage, ...]
    plain_messages: tuple[Message, ...]
    network_load: tuple[tuple[int, float], ...]
    graph: PipelineGraph

    def with_stages(self, stages: tuple[StageCost, ...]) -> "PlacedPipeline":
        """The same pipeline whose executors take other times."""
        graph = _graph(self.schedule, self.num_micro_batches, stages, self.graph.links)
        return replace(self, stages=stages, graph=graph)


def place(pipeline: Pipeline, schedule: Schedule, context: PipelineContext, stages: StageModel) -> PlacedPipeline:
    """`pipeline`, which `schedule` can run, on its devices. Raises InputError for what is not priced yet and for layers
    that the model does not have.
    """
    size, count, batches = pipeline.micro_batch_size, len(pipeline.stages), pipeline.num_micro_batches
    chunks = pipeline.num_chunks
    if feature := unpriced(pipeline):
        raise InputError(feature)
    refuse_layers_beyond(pipeline, stages.problem.model)
    in_flight = stages_in_flight(schedule, count, batches, chunks)
    sharding, contention = context
    costs = []
    for s, stage in enumerate(pipeline.stages):
        holders = sharding.holders(s, len(stage.parameter_copies))
        zero_stage = sharding.zero_stage
        costs.append(
            StageCost(
                stages.executors(stage, size, s == 0, s == count - 1, in_flight[s], zero_stage, holders, contention)
            )
        )
    samples, wraps = tuple([stage.samples(size) for stage in pipeline.stages]), chunks > 1
    layouts = [stage.token_layouts for stage in pipeline.stages]
    messages = placed_messages(layouts, samples, stages.route, stages.message_bytes(1), wraps)
    found = tuple(costs)
    return PlacedPipeline(
        schedule,
        batches,
        found,
        messages,
        messages_of(samples, wraps),
        tuple(executor_loads(messages)),
        _graph(schedule, batches, found, executor_links(samples, wraps)),
    )


def _graph(
    schedule: Schedule, num_micro_batches: int, stages: tuple[StageCost, ...], links: tuple[tuple[bool, int, int], ...]
) -> PipelineGraph:
    return pipeline_graph(
        schedule,
        len(stages),
        num_micro_batches,
        tuple([s for s, stage in enumerate(stages) for _ in stage.executors]),
        tuple([executor.chunk_s for stage in stages for executor in stage.executors]),
        links,
    )
