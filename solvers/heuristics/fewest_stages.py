"""The fewest stages of a pipeline through blocks of GPUs that hold all layers: a dynamic programme.

Stages are added from the last to the first, because the number of stages behind a stage determines how many
micro-batches it holds. The state is the number of blocks done, of GPUs taken from the next block, and of stages so far;
the value is the most layers that these stages hold.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hexiopt.plan.token_layout import Ints


class StageWay(NamedTuple):
    """How a stage takes GPUs: as so many replicas of a TP degree."""

    tp: int
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """How many it takes."""
        return self.tp * self.replicas


Ways = tuple[tuple[StageWay, ...], ...]  # of each block, those of its stages in order


class StageBlock(NamedTuple):
    """GPUs, and the ways of the stages that they may form.

    `held[w]` is the most layers of such a stage, below 1 where it is impossible: [inner or first stage, number of sides
    (0, 1, 2) next to another block, stages behind it].
    """

    num_gpus: int
    ways: tuple[StageWay, ...]
    held: Ints


def fewest_stages(blocks: Sequence[StageBlock], layers: int) -> Ways | None:
    """The ways of the fewest stages in `blocks` that hold all `layers`; None if no number of stages does.

    All blocks know of as many stages behind. Blocks and GPUs may stay unused.
    """
    from solvers.heuristics.kernel import fewest  # only here, as numba takes a second to start

    kinds = list({id(block): block for block in blocks}.values())
    kind_of = {id(block): k for k, block in enumerate(kinds)}
    most_ways = max(len(block.ways) for block in kinds)
    most = blocks[0].held.shape[-1]
    gpus = np.zeros((len(kinds), most_ways), np.int64)
    held = np.zeros((len(kinds), most_ways, *blocks[0].held.shape[1:]), np.int64)
    for k, block in enumerate(kinds):
        gpus[k, : len(block.ways)] = [way.gpus for way in block.ways]
        held[k, : len(block.ways)] = block.held
    sizes = np.array([block.num_gpus for block in blocks])
    taken = np.zeros((len(blocks), sizes.max() + 1, most + 1), np.int64)
    closed = np.zeros((len(blocks), 2, most + 1), np.int64)
    numbers = np.array([kind_of[id(block)] for block in blocks])
    left, at, u, number = fewest(sizes, numbers, gpus, held, layers, taken, closed).tolist()
    return _ways(left, at, u, number, blocks[::-1], taken, closed) if left else None


def _ways(left: int, at: int, u: int, number: int, blocks: Sequence[StageBlock], taken: Ints, closed: Ints) -> Ways:
    """The ways of the stages, from the first to the last; all by block from the last."""
    found: list[list[StageWay]] = [[] for _ in blocks]
    while True:
        way = blocks[at].ways[number - 1]
        found[at].append(way)
        left -= 1
        if u:
            number = int(taken[at, u, left])
            u -= blocks[at].ways[number - 1].gpus
            continue
        if not left:
            return tuple(tuple(own) for own in reversed(found))
        at -= 1
        while not closed[at, 1, left]:
            at -= 1
        u, number = closed[at, :, left].tolist()
