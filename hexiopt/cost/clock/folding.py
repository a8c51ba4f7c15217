"""Folding of equal pipelines into classes, of which a single pipeline is timed.

Classes are refined until all pipelines of a class send the same messages over resources of the same classes, and all
resources of a class carry the same messages of the same classes of pipelines: an equitable partition (McKay, Congressus
Numerantium 30, 1981). Max-min rates depend on nothing else, so messages of a class have equal rates at all times, and
the times of a pipeline are those of its whole class.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hexiopt.schedules.recurrence import PipelineGraph


class Lane(NamedTuple):
    """The route of a pipeline's messages over one link: `fixed_s` of each message, `most` messages a second over what
    no other link uses, and `needs`: (shared resource, seconds for which a message alone occupies it)."""

    fixed_s: float
    most: float
    needs: tuple[tuple[int, float], ...]


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


def components(lanes: Sequence[Sequence[Lane]]) -> list[list[int]]:
    """Sets of pipelines, by ascending number, that share no resource with other sets; `lanes` [pipelines][lanes]."""
    parent = list(range(len(lanes)))

    def root(p: int) -> int:
        while parent[p] != p:
            parent[p] = parent[parent[p]]
            p = parent[p]
        return p

    first: dict[int, int] = {}
    for p, line in enumerate(lanes):
        for lane in line:
            for resource, _ in lane.needs:
                a, b = root(p), root(first.setdefault(resource, p))
                parent[max(a, b)] = min(a, b)
    sets: dict[int, list[int]] = {}
    for p in range(len(lanes)):
        sets.setdefault(root(p), []).append(p)
    return list(sets.values())
