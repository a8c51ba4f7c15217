"""When the executors of a plan end if messages share the network while they are under way."""

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.clock.folding import Lane, components, fold
from hexiopt.cost.place import PlacedPipeline
from hexiopt.memo import Memo
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.recurrence import PipelineGraph, refuse_deadlock
from hexiopt.schedules.split import turnovers

Ints = NDArray[np.int64]
_KEPT = 20_000  # sets of pipelines with their ends

_Set = tuple[tuple[PipelineGraph, tuple[Lane, ...], tuple[tuple[int, ...], ...]], ...]  # graph, lanes, flows of each


class Run(NamedTuple):
    """A pipeline's step: when each executor ends its last operation [executors], in seconds from the step's start.

    Where backwards are split, `orders` [executors] has the turns of each, of which replicas of a stage have the same:
    layer range · kinds + kind of an operation, or `events.LATE`.
    """

    ends_s: tuple[float, ...]
    orders: tuple[Ints, ...] = ()


class Clock:
    """The steps of pipelines beside each other, remembered where they share resources in the same way."""

    def __init__(self) -> None:
        self._runs = Memo(_runs, _KEPT)

    def runs(self, placed: Sequence[PlacedPipeline]) -> list[Run]:
        """The step of each pipeline. Raises InputError where operations wait for each other for ever."""
        graphs = [pipeline.graph for pipeline in placed]
        folding = fold(graphs, [lanes_of(pipeline) for pipeline in placed])
        first = [folding.class_of.index(number) for number in range(len(folding.lanes))]
        runs: dict[int, Run] = {}
        for together in components(folding.lanes):
            number: dict[int, int] = {}  # of resources, in the order in which they come: equal sets have equal keys
            key = tuple([(graphs[first[c]], _numbered(folding.lanes[c], number), folding.flows[c]) for c in together])
            runs |= zip(together, self._runs[key], strict=True)
        return [runs[number] for number in folding.class_of]

    def alone(self, graph: PipelineGraph, message_s: Sequence[float]) -> Run:
        """The step of a pipeline whose messages take `message_s`. Raises as `runs`."""
        lanes = tuple([Lane(seconds, inf, ()) for seconds in message_s])
        (run,) = self._runs[((graph, lanes, ((),) * len(lanes)),)]
        return run

    def forget(self) -> None:
        """Forget all steps."""
        self._runs.clear()


def _numbered(lanes: Sequence[Lane], number: dict[int, int]) -> tuple[Lane, ...]:
    """`lanes` whose resources have the numbers of `number`, to which new ones are added."""
    return tuple(
        [
            lane._replace(needs=tuple([(number.setdefault(r, len(number)), need_s) for r, need_s in lane.needs]))
            for lane in lanes
        ]
    )


def lanes_of(pipeline: PlacedPipeline) -> tuple[Lane, ...]:
    """The lane of each message of a pipeline; inside machines nothing is shared."""
    lanes = []
    for _, route, num_bytes in pipeline.messages:
        port_s = route.port_s_per_byte * num_bytes
        needs = tuple([(resource, s_per_byte * num_bytes) for resource, s_per_byte in route.shared])
        if needs:
            lanes.append(Lane(route.latency_s, 1.0 / port_s if port_s else inf, needs))
        else:
            lanes.append(Lane(route.latency_s + port_s, inf, needs))
    return tuple(lanes)


def _runs(key: _Set) -> tuple[Run, ...]:
    """The steps of a set of pipelines."""
    from hexiopt.cost.clock.events import ends_s  # only here, as numba takes a second to start

    graphs = [graph for graph, _, _ in key]
    splits, (lanes, num_resources) = _splits(graphs), _lanes(key)
    programmes, num_queues = _programmes(graphs)
    ends = ends_s(programmes, lanes, splits, num_queues, num_resources).tolist()
    refuse_deadlock(graphs[0].schedule, ends)
    orders = _orders(graphs, splits)
    if any(_differ(graph, own) for graph, own in zip(graphs, orders, strict=True)):
        # Replicas compute and communicate together with all of the neighbours: they keep to the order of the first.
        orders = [_agreed(graph, own) for graph, own in zip(graphs, orders, strict=True)]
        programmes, num_queues = _programmes(graphs, orders)
        ends = ends_s(programmes, lanes, _splits(()), num_queues, num_resources).tolist()
    left = iter(ends)
    return tuple(
        [Run(tuple(islice(left, len(graph.stages))), tuple(own)) for graph, own in zip(graphs, orders, strict=True)]
    )


def _programmes(graphs: Sequence[PipelineGraph], orders: Sequence[Sequence[Ints]] = ()) -> tuple[Any, int]:
    """The programmes of pipelines after one another, or their `orders`, and how many queues they have."""
    from hexiopt.cost.clock.events import Programmes

    parts: list[list[Any]] = [[] for _ in Programmes._fields]
    num_blocks = num_turns = num_operations = num_takes = num_sends = num_queues = num_links = 0
    for k, graph in enumerate(graphs):
        first, blocks, turns = _listed(graph, orders[k]) if orders else graph.order()
        queues, at, takes, sends = graph.wiring()
        each = len(at) // len(graph.stages)
        row = (
            first[:-1] + num_blocks,
            blocks + np.array([num_turns, 0, 0]),
            turns,
            num_operations + each * np.arange(len(graph.stages)),
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
    own = [late for graph in graphs for late in graph.split]
    rows = [row for late in own for row in turnovers(late.layers, late.room)]
    ends = [0]
    for graph in graphs:
        for late in graph.split:
            ends.append(ends[-1] + graph.num_micro_batches * (2 * len(late.layers) + sum(late.layers)))
    return Splits(
        np.array([row.layers for row in rows], np.int64),
        np.array([row.stored for row in rows], np.float64),
        np.array([row.begin for row in rows], np.float64),
        np.array([row.end for row in rows], np.float64),
        np.array([late.weights_s for late in own], np.float64),
        np.array([late.room.layer for late in own], np.float64),
        np.array(ends, np.int64),
        np.zeros(ends[-1], np.int64),
    )


def _orders(graphs: Sequence[PipelineGraph], splits: Any) -> list[list[Ints]]:
    """The order of each executor, as the kernel has written it down [pipelines][executors]."""
    if not len(splits.delayed):
        return [[] for _ in graphs]
    orders = iter(np.split(splits.orders, splits.first[1:-1]))
    return [list(islice(orders, len(graph.stages))) for graph in graphs]


def _agreed(graph: PipelineGraph, orders: Sequence[Ints]) -> list[Ints]:
    """The orders of a pipeline's executors, of each stage that of the first."""
    return [orders[graph.stages.index(stage)] for stage in graph.stages]


def _differ(graph: PipelineGraph, orders: Sequence[Ints]) -> bool:
    """Whether replicas of a stage have different orders."""
    return bool(orders) and any(not np.array_equal(a, b) for a, b in zip(orders, _agreed(graph, orders), strict=True))


def _listed(graph: PipelineGraph, orders: Sequence[Ints]) -> tuple[Ints, Ints, Ints]:
    """As `PipelineGraph.order`, of executors that run `orders`."""
    turns, lengths = np.concatenate(orders), list(map(len, orders))
    turns[turns < 0] = graph.schedule.kinds.index(OperationKind.WEIGHTS)  # of any layer range: all take as long
    blocks = [(sum(lengths[:e]), length, 1) for e, length in enumerate(lengths)]
    return np.arange(len(orders) + 1), np.array(blocks), turns


def _lanes(key: _Set) -> tuple[Any, int]:
    """The lanes of pipelines after one another, and how many resources they cross."""
    from hexiopt.cost.clock.events import LaneArrays

    receivers, num_executors = [], 0
    for graph, _, _ in key:
        receivers += [num_executors + receiver for _, _, receiver in graph.links]
        num_executors += len(graph.stages)
    lanes = [lane for _, own, _ in key for lane in own]
    needs = [need for lane in lanes for need in lane.needs]
    flows = [flow for _, _, own in key for lane in own for flow in lane]
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
