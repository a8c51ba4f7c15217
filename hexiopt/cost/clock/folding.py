"""Lanes of pipelines, and equal pipelines folded: one of each class stands for all of it.

Classes are refined until all pipelines of a class send the same messages over resources of the same classes, and all
resources of a class carry the same messages of the same classes of pipelines: an equitable partition (McKay, Congressus
Numerantium 30, 1981). Max-min rates depend on nothing else, so messages of a class have equal rates at all times, and
the times of a pipeline are those of its whole class.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from hexiopt.cost.executors.network_load import PlacedMessage
from hexiopt.schedules.graph import PipelineGraph


class Lane(NamedTuple):
    """The route of a pipeline's messages over one link: `fixed_s` of each message, `most` messages a second over what
    no other link uses, and `needs`: (shared resource, seconds for which a message alone occupies it)."""

    fixed_s: float
    most: float
    needs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LaneShape:
    """Lanes of a pipeline whatever resources they cross; one object for all that are equal (`lane_shape`).

    `lanes` [messages]: seconds of latency, messages a second, and the seconds of each need.
    """

    lanes: tuple[tuple[float, float, tuple[float, ...]], ...]


lane_shape = lru_cache(maxsize=65_536)(LaneShape)


class PipelineLanes(NamedTuple):
    """The lanes of a pipeline [messages]: their shape, and the resources of all needs, lane by lane."""

    shape: LaneShape
    resources: tuple[int, ...]

    @classmethod
    def of(cls, messages: Iterable[PlacedMessage]) -> "PipelineLanes":
        """The lane of each message of a pipeline; inside machines nothing is shared."""
        lanes, resources = [], list[int]()
        for _, route, num_bytes in messages:
            port_s, needs = route.port_s_per_byte * num_bytes, route.shared
            if needs:
                needs_s = tuple([s_per_byte * num_bytes for _, s_per_byte in needs])
                lanes.append((route.latency_s, 1.0 / port_s if port_s else inf, needs_s))
                resources += [resource for resource, _ in needs]
            else:
                lanes.append((route.latency_s + port_s, inf, ()))
        return cls(lane_shape(tuple(lanes)), tuple(resources))

    @classmethod
    def constant(cls, message_s: Iterable[float]) -> "PipelineLanes":
        """Lanes over which messages take `message_s` [messages], whatever else goes."""
        return cls(lane_shape(tuple([(seconds, inf, ()) for seconds in message_s])), ())

    def by_message(self) -> tuple[Lane, ...]:
        """The lane of each message [messages]."""
        crossing = iter(self.resources)
        return tuple(
            [
                Lane(fixed_s, most, tuple([(next(crossing), need_s) for need_s in needs_s]))
                for fixed_s, most, needs_s in self.shape.lanes
            ]
        )


class Folding(NamedTuple):
    """Pipelines in classes: `class_of` [pipelines], numbered in their order; `lanes` [classes][lanes] of a pipeline of
    the class, whose needs name each class of resources once; `flows` [classes][lanes][needs]: how many equal messages
    cross a resource at once."""

    class_of: list[int]
    lanes: list[tuple[Lane, ...]]
    flows: list[tuple[tuple[int, ...], ...]]


def fold(graphs: Sequence[PipelineGraph], lanes: Sequence[Sequence[Lane]]) -> Folding:
    """Fold the pipelines of a plan; `graphs` [pipelines] are the same object where pipelines are equal, `lanes`
    [pipelines][messages]."""
    pipelines = range(len(graphs))
    colour = _numbers(
        [
            (id(graph), *[(lane.fixed_s, lane.most, *[s for _, s in lane.needs]) for lane in line])
            for graph, line in zip(graphs, lanes, strict=True)
        ]
    )
    users: dict[int, list[tuple[int, int, float]]] = {}  # of each resource: pipeline, lane, seconds
    for p in pipelines:
        for k, lane in enumerate(lanes[p]):
            for resource, need_s in lane.needs:
                users.setdefault(resource, []).append((p, k, need_s))
    resources = list(users)
    while True:
        kinds = _numbers([tuple(sorted([(colour[p], k, s) for p, k, s in users[r]])) for r in resources])
        kind_of = dict(zip(resources, kinds, strict=True))
        finer = _numbers(
            [(colour[p], *[tuple([kind_of[r] for r, _ in lane.needs]) for lane in lanes[p]]) for p in pipelines]
        )
        if finer == colour:
            break
        colour = finer
    flows_of = {kind: Counter([(colour[p], k, s) for p, k, s in users[resource]]) for resource, kind in kind_of.items()}
    folded, flows = [], []
    for number, p in enumerate([colour.index(number) for number in range(max(colour) + 1)]):
        needs_of = [tuple(dict.fromkeys([(kind_of[r], s) for r, s in lane.needs])) for lane in lanes[p]]
        folded.append(tuple([lane._replace(needs=needs) for lane, needs in zip(lanes[p], needs_of, strict=True)]))
        flows.append(tuple([tuple([flows_of[r][number, k, s] for r, s in needs]) for k, needs in enumerate(needs_of)]))
    return Folding(colour, folded, flows)


def _numbers(keys: Sequence[Hashable]) -> list[int]:
    """Numbers of `keys` [keys] in the order of their first occurrence, equal for equal keys."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]


def components(resources: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of pipelines in sets that share none of the `resources` [pipelines][needs], in order."""
    parent = list(range(len(resources)))

    def root(p: int) -> int:
        while parent[p] != p:
            parent[p] = parent[parent[p]]
            p = parent[p]
        return p

    first: dict[int, int] = {}
    for p, crossing in enumerate(resources):
        for resource in crossing:
            other = first.setdefault(resource, p)
            if other != p:
                a, b = root(p), root(other)
                parent[max(a, b)] = min(a, b)
    sets: dict[int, list[int]] = {}
    for p in range(len(parent)):
        sets.setdefault(root(p), []).append(p)
    return list(sets.values())
