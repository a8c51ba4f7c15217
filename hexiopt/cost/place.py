"""A pipeline on its devices: what its executors take and hold, and what its messages occupy, whatever else runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hexiopt.cost.context import PipelineContext
from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.routes import NetworkLoad, Route
from hexiopt.cost.executors.stage_model import StageModel, StagePlace
from hexiopt.errors import InputError
from hexiopt.plan.messages import Message, executor_links, messages_of
from hexiopt.plan.messages import messages as messages_in
from hexiopt.plan.parallelism import TokenLayout
from hexiopt.plan.plan import Pipeline, unpriced
from hexiopt.schedules.in_flight import stages_in_flight
from hexiopt.schedules.recurrence import PipelineGraph, pipeline_graph
from hexiopt.schedules.schedule import Schedule


class PlacedMessage(NamedTuple):
    """A message of a pipeline, its route, and its size in bytes."""

    message: Message
    route: Route
    num_bytes: float

    def seconds(self, load_s: NetworkLoad) -> float:
        """Seconds from its start to its end while the resources are loaded with `load_s`, its own part included."""
        _, route, num_bytes = self
        slowest = route.port_s_per_byte * num_bytes
        for resource, _ in route.shared:
            if load_s[resource] > slowest:
                slowest = load_s[resource]
        return slowest + route.latency_s


def placed_messages(
    messages: Iterable[Message],
    layouts: Sequence[Sequence[TokenLayout]],
    route_of: Callable[[TokenLayout, TokenLayout], Route],
    sample_bytes: float,
) -> tuple[PlacedMessage, ...]:
    """`messages` of a pipeline whose executor r of stage s is `layouts[s][r]`.

    `sample_bytes` are the hidden states of one sequence.
    """
    count = len(layouts)
    return tuple(
        [
            PlacedMessage(
                one,
                route_of(layouts[one.stage][one.sender], layouts[one.target(count)][one.receiver]),
                one.samples * sample_bytes,
            )
            for one in messages
        ]
    )


def pipeline_messages(
    pipeline: Pipeline, route_of: Callable[[TokenLayout, TokenLayout], Route], sample_bytes: float
) -> tuple[PlacedMessage, ...]:
    """As `placed_messages`, all of a pipeline of a plan."""
    layouts = [stage.parallelism.token_layouts for stage in pipeline.stages]
    return placed_messages(messages_in(pipeline), layouts, route_of, sample_bytes)


def network_load(messages: Iterable[PlacedMessage]) -> tuple[tuple[int, float], ...]:
    """(network resource, seconds per micro-batch) for which the messages of every executor occupy it.

    Forward and backward messages of an executor alternate, so the slower direction counts.
    """
    load_s: dict[tuple[int, int, int], list[float]] = {}
    for message, route, num_bytes in messages:
        for resource, s_per_byte in route.shared:
            both = load_s.setdefault((message.stage, message.sender, resource), [0.0, 0.0])
            both[message.backward] += s_per_byte * num_bytes
    return tuple([(resource, max(both)) for (_, _, resource), both in load_s.items()])


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
        chunk_s = tuple([executor.chunk_s for stage in stages for executor in stage.executors])
        return replace(self, stages=stages, graph=self.graph.with_times(chunk_s))


def place(pipeline: Pipeline, schedule: Schedule, context: PipelineContext, stages: StageModel) -> PlacedPipeline:
    """`pipeline`, which `schedule` can run, on its devices. Raises InputError for what is not priced yet and for layers
    that the model does not have.
    """
    if feature := unpriced(pipeline):
        raise InputError(feature)
    size, own, batches, chunks = (
        pipeline.micro_batch_size,
        pipeline.stages,
        pipeline.num_micro_batches,
        pipeline.num_chunks,
    )
    sharding, contention = context
    in_flight, last = stages_in_flight(schedule, len(own), batches, chunks), len(own) - 1
    costs, executor_stages, chunk_s = [], [], []
    num_layers = stages.problem.model.num_layers
    for s, stage in enumerate(own):
        for begin, end in stage.layers:
            if end > num_layers or begin < 0:
                said = f"plan: stage {s} has layers {begin} to {end - 1}, the model has {num_layers}"
                raise InputError(f"{said}; choose layers from 0 to {num_layers - 1}")
        holders = sharding.holders(s, len(stage.parallelism.parameter_copies))
        at = StagePlace(s == 0, s == last, in_flight[s], sharding.zero_stage)
        executors = stages.executors(stage, size, at, holders, contention)
        costs.append(StageCost(executors))
        for executor in executors:
            executor_stages.append(s)
            chunk_s.append(executor.chunk_s)
    samples, wraps = tuple([stage.parallelism.samples(size) for stage in own]), chunks > 1
    messages, links = messages_of(samples, wraps), executor_links(samples, wraps)
    layouts = [stage.parallelism.token_layouts for stage in own]
    placed = placed_messages(messages, layouts, stages.routes.between, stages.routes.message_bytes(1))
    return PlacedPipeline(
        schedule,
        batches,
        tuple(costs),
        placed,
        messages,
        network_load(placed),
        pipeline_graph(schedule, len(own), batches, tuple(executor_stages), tuple(chunk_s), links),
    )
