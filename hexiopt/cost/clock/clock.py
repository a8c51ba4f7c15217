"""When the executors of a plan end if messages share the network only while they are in transit."""

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Any

import numpy as np

from hexiopt.cost.clock.folding import Lane, components, fold
from hexiopt.cost.place import PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.schedules.recurrence import PipelineGraph, refuse_deadlock

_MEMO_SIZE = 20_000  # sets of pipelines with their ends

_Set = tuple[tuple[PipelineGraph, tuple[Lane, ...], tuple[tuple[int, ...], ...]], ...]  # of each pipeline


class Clock:
    """The ends of pipelines that run beside each other, remembered by how they share resources."""

    def __init__(self) -> None:
        self._ends = Memo(_ends_s, _MEMO_SIZE)

    def ends_s(self, placed: Sequence[PlacedPipeline]) -> list[tuple[float, ...]]:
        """When each executor ends its last operation [pipelines][executors], in seconds from the step's start.

        Raises InputError where operations wait for each other for ever.
        """
        graphs = [pipeline.graph for pipeline in placed]
        folding = fold(graphs, [lanes_of(pipeline) for pipeline in placed])
        first = [folding.class_of.index(number) for number in range(len(folding.lanes))]
        ends: dict[int, tuple[float, ...]] = {}
        for together in components(folding.lanes):
            number: dict[int, int] = {}  # of resources, in the order in which they come: equal sets have equal keys
            key = tuple([(graphs[first[c]], _renumber(folding.lanes[c], number), folding.flows[c]) for c in together])
            ends |= zip(together, self._ends[key], strict=True)
        return [ends[number] for number in folding.class_of]

    def forget(self) -> None:
        """Free the memory of remembered ends."""
        self._ends.clear()


def _renumber(lanes: Sequence[Lane], number: dict[int, int]) -> tuple[Lane, ...]:
    """`lanes` whose resources are numbered by `number`, to which resources not in it are added."""
    return tuple(
        [
            lane._replace(needs=tuple([(number.setdefault(r, len(number)), need_s) for r, need_s in lane.needs]))
            for lane in lanes
        ]
    )


def lanes_of(pipeline: PlacedPipeline) -> tuple[Lane, ...]:
    """The lane of each message of a pipeline [messages]; inside machines nothing is shared."""
    lanes = []
    for _, route, num_bytes in pipeline.messages:
        port_s = route.port_s_per_byte * num_bytes
        needs = tuple([(resource, s_per_byte * num_bytes) for resource, s_per_byte in route.shared])
        if needs:
            lanes.append(Lane(route.latency_s, 1.0 / port_s if port_s else inf, needs))
        else:
            lanes.append(Lane(route.latency_s + port_s, inf, needs))
    return tuple(lanes)


def _ends_s(key: _Set) -> tuple[tuple[float, ...], ...]:
    """When the executors of a set of pipelines end [pipelines][executors], in seconds from the step's start."""
    from hexiopt.cost.clock.events import ends_s  # here, as importing numba takes a second

    graphs = [graph for graph, _, _ in key]
    programmes, num_queues = _programmes(graphs)
    lanes, num_resources = _lanes(key)
    ends = iter(refuse_deadlock(graphs[0].schedule, ends_s(programmes, lanes, num_queues, num_resources).tolist()))
    return tuple([tuple(islice(ends, len(graph.stages))) for graph in graphs])


def _programmes(graphs: Sequence[PipelineGraph]) -> tuple[Any, int]:
    """The programmes of all pipelines, concatenated, and the number of their queues."""
    from hexiopt.cost.clock.events import Programmes

    parts: list[list[Any]] = [[] for _ in Programmes._fields]
    num_blocks = num_turns = num_operations = num_takes = num_sends = num_queues = num_links = 0
    for graph in graphs:
        first, blocks, turns = graph.order()
        queues, at, takes, sends = graph.wiring()
        per_executor = len(at) // len(graph.stages)
        row = (
            first[:-1] + num_blocks,
            blocks + np.array([num_turns, 0, 0]),
            turns,
            num_operations + per_executor * np.arange(len(graph.stages)),
            np.array([s for chunks in graph.chunk_s for chunk in chunks for s in chunk]),
            at + np.array([num_takes, num_takes, num_sends, num_sends]),
            takes + num_queues,
            sends + np.array([num_links, num_queues]),
        )
        for part, array in zip(parts, row, strict=True):
            part.append(array)
        num_blocks, num_turns, num_operations = (
            num_blocks + len(blocks),
            num_turns + len(turns),
            num_operations + len(at),
        )
        num_takes, num_sends = num_takes + len(takes), num_sends + len(sends)
        num_queues, num_links = num_queues + queues, num_links + len(graph.links)
    parts[0].append(np.array([num_blocks]))
    return Programmes(*map(np.concatenate, parts)), num_queues


def _lanes(key: _Set) -> tuple[Any, int]:
    """The lanes of all pipelines, concatenated, and the number of resources that they cross."""
    from hexiopt.cost.clock.events import LaneArrays

    receivers, num_executors = [], 0
    for graph, _, _ in key:
        receivers += [num_executors + receiver for _, _, receiver in graph.links]
        num_executors += len(graph.stages)
    lanes = [lane for _, line, _ in key for lane in line]
    needs = [need for lane in lanes for need in lane.needs]
    flows = [flow for _, _, line in key for lane in line for flow in lane]
    num_resources = max([resource for resource, _ in needs], default=-1) + 1
    return LaneArrays(
        np.array(receivers, np.int64),
        np.array([lane.fixed_s for lane in lanes]),
        np.array([lane.most for lane in lanes]),
        np.cumsum([0, *[len(lane.needs) for lane in lanes]]),
        np.array([resource for resource, _ in needs], np.int64),
        np.array([s for _, s in needs]),
        np.array(flows, np.float64),
    ), num_resources
