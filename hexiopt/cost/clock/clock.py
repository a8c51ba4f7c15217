"""When the executors of a plan end, and how long its messages take, if these share the network while they are under
way."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.clock.folding import Folding, LaneShape, PipelineLanes, components, fold
from hexiopt.cost.place import PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.schedules.graph import PipelineGraph, refuse_deadlock
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.split import Order, turnovers

Ints = NDArray[np.int64]

_MEMO_SIZE = 20_000  # sets of pipelines with their times

_Set = tuple[tuple[PipelineGraph, LaneShape, tuple[int, ...]], ...]  # pipelines with their `PipelineLanes`


class PipelineTimes(NamedTuple):
    """When each executor ends its last operation [executors], in seconds from the step's start, and how long each
    message takes on average, from its start to its end [messages].

    Where backwards are split, `orders` [executors] has the order of each, of which replicas of a stage have equal ones.
    """

    executor_end_s: tuple[float, ...]
    message_s: tuple[float, ...]
    orders: tuple[Order, ...] = ()


class Clock:
    """The times of pipelines beside each other, remembered for sets that share resources in the same way."""

    def __init__(self) -> None:
        self._times = Memo(_times, _MEMO_SIZE)

    def times(self, placed: Sequence[PlacedPipeline]) -> list[PipelineTimes]:
        """The times of each pipeline [pipelines]. Raises InputError where operations wait for each other for ever."""
        times: dict[int, PipelineTimes] = {}
        for together in components([line.lanes.resources for line in placed]):
            number: dict[int, int] = {}  # of resources, in the order in which they come: equal sets have equal keys
            key = []
            for p in together:
                graph, (shape, resources) = placed[p].graph, placed[p].lanes
                key.append((graph, shape, tuple([number.setdefault(r, len(number)) for r in resources])))
            times |= zip(together, self._times[tuple(key)], strict=True)
        return [times[p] for p in range(len(placed))]

    def forget(self) -> None:
        """Forget all times."""
        self._times.clear()


def _times(key: _Set) -> tuple[PipelineTimes, ...]:
    """The times of each of a set of pipelines: of one of each class."""
    from hexiopt.cost.clock.events import ends_s  # only here, as numba takes a second to start

    folding = fold(
        [graph for graph, _, _ in key], [PipelineLanes(shape, resources).by_message() for _, shape, resources in key]
    )
    graphs = [key[folding.class_of.index(number)][0] for number in range(len(folding.lanes))]
    lanes, splits = _lanes(graphs, folding), _splits(graphs)
    programmes, num_queues = _programmes(graphs)
    ended_s, sent_s = ends_s(programmes, splits, *lanes, num_queues)
    refuse_deadlock(graphs[0].schedule, ended_s.tolist())
    orders = _orders(graphs, splits)
    if any(_differ(graph, turns) for graph, turns in zip(graphs, orders, strict=True)):
        # Replicas compute and communicate together with all of the neighbours: they follow the order of the first.
        orders = [_first_orders(graph, turns) for graph, turns in zip(graphs, orders, strict=True)]
        programmes, num_queues = _programmes(graphs, orders)
        ended_s, sent_s = ends_s(programmes, _splits(()), *lanes, num_queues)
    ends, messages = iter(ended_s.tolist()), iter(sent_s.tolist())
    times = [
        PipelineTimes(
            tuple(islice(ends, len(graph.stages))), tuple(islice(messages, len(graph.links))), tuple(map(Order, turns))
        )
        for graph, turns in zip(graphs, orders, strict=True)
    ]
    return tuple([times[number] for number in folding.class_of])


def _programmes(graphs: Sequence[PipelineGraph], orders: Sequence[Sequence[Ints]] = ()) -> tuple[Any, int]:
    """The programmes of pipelines after one another, or their `orders`, and how many queues they have."""
    from hexiopt.cost.clock.events import Programmes

    parts: list[list[Any]] = [[] for _ in Programmes._fields]
    num_blocks = num_turns = num_operations = num_takes = num_sends = num_queues = num_links = 0
    for k, graph in enumerate(graphs):
        first, blocks, turns = _order_arrays(graph, orders[k]) if orders else graph.order()
        queues, at, takes, sends = graph.wiring()
        width = len(at) // len(graph.stages)  # operations of an executor
        row = (
            first[:-1] + num_blocks,
            blocks + np.array([num_turns, 0, 0]),
            turns,
            num_operations + width * np.arange(len(graph.stages)),
            np.array([s for chunks in graph.operation_s() for chunk in chunks for s in chunk]),
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


def _splits(graphs: Sequence[PipelineGraph]) -> Any:
    """What pipelines put off, after one another; without executors where backwards are whole."""
    from hexiopt.cost.clock.events import Splits

    graphs = [graph for graph in graphs if graph.split]
    executors = [late for graph in graphs for late in graph.split]
    rows = [row for late in executors for row in turnovers(late.layers, late.shares)]
    ends = [0]
    for graph in graphs:
        for late in graph.split:
            ends.append(ends[-1] + graph.num_micro_batches * (2 * len(late.layers) + sum(late.layers)))
    return Splits(
        np.array([row.layers for row in rows], np.int64),
        np.array([row.stored for row in rows], np.float64),
        np.array([row.begin for row in rows], np.float64),
        np.array([row.end for row in rows], np.float64),
        np.array([late.weights_s for late in executors], np.float64),
        np.array([late.shares.layer for late in executors], np.float64),
        np.array(ends, np.int64),
        np.zeros(ends[-1], np.int64),
    )


def _orders(graphs: Sequence[PipelineGraph], splits: Any) -> list[list[Ints]]:
    """The order of each executor, as the kernel has written it down [pipelines][executors]."""
    if not len(splits.delayed):
        return [[] for _ in graphs]
    orders = iter(np.split(splits.orders, splits.first[1:-1]))
    return [list(islice(orders, len(graph.stages))) for graph in graphs]


def _first_orders(graph: PipelineGraph, orders: Sequence[Ints]) -> list[Ints]:
    """The orders of a pipeline's executors, of each stage that of the first."""
    return [orders[graph.stages.index(stage)] for stage in graph.stages]


def _differ(graph: PipelineGraph, orders: Sequence[Ints]) -> bool:
    """Whether replicas of a stage have different orders."""
    return bool(orders) and any(
        not np.array_equal(a, b) for a, b in zip(orders, _first_orders(graph, orders), strict=True)
    )


def _order_arrays(graph: PipelineGraph, orders: Sequence[Ints]) -> tuple[Ints, Ints, Ints]:
    """As `PipelineGraph.order`, of executors that run `orders`."""
    turns, lengths = np.concatenate(orders), list(map(len, orders))
    turns[turns < 0] = graph.schedule.kinds.index(OperationKind.WEIGHTS)  # of any layer range: all take as long
    blocks = [(sum(lengths[:e]), length, 1) for e, length in enumerate(lengths)]
    return np.arange(len(orders) + 1), np.array(blocks), turns


def _lanes(graphs: Sequence[PipelineGraph], folding: Folding) -> tuple[Any, int]:
    """The lanes of classes after one another, and how many resources they cross."""
    from hexiopt.cost.clock.events import LaneArrays

    receivers, num_executors = [], 0
    for graph in graphs:
        receivers += [num_executors + receiver for _, _, receiver in graph.links]
        num_executors += len(graph.stages)
    lanes = [lane for class_lanes in folding.lanes for lane in class_lanes]
    needs = [need for lane in lanes for need in lane.needs]
    flows = [flow for class_flows in folding.flows for lane_flows in class_flows for flow in lane_flows]
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
