"""When the executors of pipelines end that are stated by their seconds alone, whatever devices they run on."""

from collections.abc import Sequence
from dataclasses import dataclass

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.place import PlacedPipeline
from hexiopt.schedules.graph import PipelineGraph, pipeline_graph
from hexiopt.schedules.schedule import Schedule
from hexiopt.schedules.split import Footprint, LateWeights


@dataclass(frozen=True, slots=True)
class Executor:
    """One replica of a stage: forward and backward seconds of each of its layer ranges. Where backwards are split, each
    puts off a layer, whose weight gradients take equally many seconds in all ranges."""

    stage: int
    chunk_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ExecutorLink:
    """Messages of one direction between two executors (by index), seconds each."""

    backward: bool
    sender: int
    receiver: int
    seconds: float


def graph_ends_s(graph: PipelineGraph, message_s: Sequence[float]) -> tuple[float, ...]:
    """When each executor of a pipeline ends its last operation, if the messages on each link take `message_s`."""
    lanes = PipelineLanes.constant(message_s)
    placed = PlacedPipeline(graph.schedule, graph.num_micro_batches, (), (), (), lanes, graph)
    return Clock().times([placed])[0].executor_end_s


def chain_ends_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
    num_micro_batches: int,
) -> tuple[float, ...]:
    """When each stage ends its last operation, where every stage is one executor with one layer range.

    Seconds from the step's start [stages]. `send_forward_s[i]` is from stage i to i + 1, `send_backward_s[i]` from
    stage i + 1 to i [stages - 1].
    """
    last = len(forward_s) - 1
    links = (*((False, s, s + 1) for s in range(last)), *((True, s + 1, s) for s in range(last)))
    chunk_s = tuple([((f, b),) for f, b in zip(forward_s, backward_s, strict=True)])
    graph = pipeline_graph(schedule, last + 1, num_micro_batches, tuple(range(last + 1)), chunk_s, links)
    return graph_ends_s(graph, [*send_forward_s, *send_backward_s])


def executor_ends_s(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    executors: tuple[Executor, ...],
    links: tuple[ExecutorLink, ...],
) -> tuple[float, ...]:
    """When each executor ends its last operation, in seconds from the step's start.

    The pipeline must not break the schedule's rule. Raises InputError where operations wait for each other for ever.
    """
    chunks = len(executors[0].chunk_s)
    late = [
        LateWeights((1,) * chunks, executor.chunk_s[0][-1], Footprint((0.0,) * chunks, 0.0, 0.0, 0.0))
        for executor in executors
    ]
    graph = pipeline_graph(
        schedule,
        num_stages,
        num_micro_batches,
        tuple([executor.stage for executor in executors]),
        tuple([executor.chunk_s for executor in executors]),
        tuple([(link.backward, link.sender, link.receiver) for link in links]),
        tuple(late) if schedule.splits else (),
    )
    return graph_ends_s(graph, [link.seconds for link in links])
