"""Equal pipelines folded: one of each class stands for all of it.

Classes are refined until all pipelines of a class send the same messages over resources of the same classes, and all
resources of a class carry the same messages of the same classes of pipelines: an equitable partition (as of McKay,
Congressus Numerantium 30, 1981). Max-min rates depend on nothing else, so messages of a class go at one rate all the
time, and the times of one pipeline are those of its whole class.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hexiopt.schedules.recurrence import PipelineGraph


class Lane(NamedTuple):
    """The way of a pipeline's messages over one link: seconds of latency, messages a second by all that nobody else
    uses, and (resource, seconds for which a message alone needs it)."""

    fixed_s: float
    most: float
    needs: tuple[tuple[int, float], ...]


class Folding(NamedTuple):
    """`class_of` [pipelines], numbered in their order; `lanes` [classes]: those of its pipelines, resources by their
    classes, each once; `flows` [classes]: to each lane's needs, how many messages like it cross one resource."""

    class_of: list[int]
    lanes: list[tuple[Lane, ...]]
    flows: list[tuple[tuple[int, ...], ...]]


def fold(graphs: Sequence[PipelineGraph], lanes: Sequence[Sequence[Lane]]) -> Folding:
    """Fold pipelines of a plan. `graphs` [pipelines] must be the same object where pipelines are equal."""
    pipelines = range(len(graphs))
    colour = _numbers(
        [
            (id(graph), *[(lane.fixed_s, lane.most, *[s for _, s in lane.needs]) for lane in own])
            for graph, own in zip(graphs, lanes, strict=True)
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
        needs = [tuple(dict.fromkeys([(kind_of[r], s) for r, s in lane.needs])) for lane in lanes[p]]
        folded.append(tuple([lane._replace(needs=own) for lane, own in zip(lanes[p], needs, strict=True)]))
        flows.append(tuple([tuple([flows_of[r][number, k, s] for r, s in own]) for k, own in enumerate(needs)]))
    return Folding(colour, folded, flows)


def _numbers(keys: Sequence[Hashable]) -> list[int]:
    """Numbers of keys, equal for equal ones, in the order in which they first come."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]


def components(lanes: Sequence[Sequence[Lane]]) -> list[list[int]]:
    """The numbers of pipelines in sets that share no resource, in order."""
    parent = list(range(len(lanes)))

    def root(p: int) -> int:
        while parent[p] != p:
            parent[p] = parent[parent[p]]
            p = parent[p]
        return p

    first: dict[int, int] = {}
    for p, own in enumerate(lanes):
        for lane in own:
            for resource, _ in lane.needs:
                a, b = root(p), root(first.setdefault(resource, p))
                parent[max(a, b)] = min(a, b)
    sets: dict[int, list[int]] = {}
    for p in range(len(lanes)):
        sets.setdefault(root(p), []).append(p)
    return list(sets.values())
