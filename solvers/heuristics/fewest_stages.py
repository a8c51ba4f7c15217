"""The fewest stages of a pipeline through blocks of GPUs that hold all layers: a dynamic programme.

Stages are added from the last to the first, because the number of stages behind a stage determines how many
micro-batches it holds. The state is the number of blocks done, of GPUs taken from the next block, and of stages so far;
the value is the most layers that these stages hold.
"""

from collections.abc import Mapping, Sequence
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
_NONE = -(1 << 20)  # layers where there is no way


def fewest_stages(gpus: Sequence[int], held: Sequence[Mapping[StageWay, Ints]], layers: int) -> Ways | None:
    """The ways of the fewest stages in blocks of `gpus` GPUs that hold all `layers`; None if no number of stages does.

    `held[b][way]` is the most layers of such a stage in block b, below 1 where it is impossible: [inner or first
    stage, number of sides (0, 1, 2) next to another block, stages behind it]. Blocks and GPUs may stay unused.
    """
    most = max((n.shape[2] for own in held for n in own.values()), default=0)
    done = np.full(most + 1, _NONE)  # by stages so far, the most layers in whole blocks
    done[0] = 0
    # By block from the last. `taken`, by GPUs taken and stages so far: the way of the foremost stage, as its place in
    # `held`, from 1. `closed`, by stages so far: GPUs behind the foremost stage of the block, and its way, 0 if the
    # block has none.
    taken: list[list[Ints]] = []
    closed: list[tuple[Ints, Ints]] = []
    fewest: tuple[int, int, int, int] | None = None  # stages, block, GPUs behind the first stage, its way
    for size, own in zip(reversed(gpus), reversed(held), strict=True):
        value = [done, *(np.full(most + 1, _NONE) for _ in range(size))]
        ways = [np.zeros(most + 1, np.int64) for _ in range(size + 1)]
        after, behind, foremost = done.copy(), np.zeros(most + 1, np.int64), np.zeros(most + 1, np.int64)
        for u in range(size):
            for number, (way, (inner, first)) in enumerate(own.items(), 1):
                end = u + way.gpus
                if end > size:
                    continue
                # The block's last stage has another behind it, unless it is the pipeline's last.
                sides = int(u == 0)
                _keep(value[end], _plus(value[u], inner, sides), (ways[end], number))
                _keep(after, _plus(value[u], inner, sides + 1), (behind, u), (foremost, number))
                enough = np.flatnonzero(_plus(value[u], first, sides) >= layers)
                if len(enough) and (fewest is None or enough[0] + 1 < fewest[0]):
                    fewest = int(enough[0]) + 1, len(taken), u, number
        taken.append(ways)
        closed.append((behind, foremost))
        done = after
    listed = [tuple(own) for own in reversed(held)]
    return None if fewest is None else _ways(*fewest, listed, taken, closed)


def _plus(layers: Ints, held: Ints, sides: int) -> Ints:
    """Layers after adding one stage, by the number of stages behind it; the last stage of a pipeline has none
    behind.
    """
    more = held[sides].copy()
    more[0] = held[max(0, sides - 1), 0]
    return np.where(more > 0, layers[:-1] + more, _NONE)


def _keep(best: Ints, other: Ints, *notes: tuple[Ints, int]) -> None:
    """Update `best` where `other`, which has one stage more, is better, and record the choice in `notes`."""
    better = other > best[1:]
    best[1:][better] = other[better]
    for where, value in notes:
        where[1:][better] = value


def _ways(
    left: int,
    at: int,
    u: int,
    number: int,
    listed: Sequence[Sequence[StageWay]],
    taken: Sequence[Sequence[Ints]],
    closed: Sequence[tuple[Ints, Ints]],
) -> Ways:
    """The ways of the stages, from the first to the last."""
    found: list[list[StageWay]] = [[] for _ in taken]
    while True:
        found[at].append(listed[at][number - 1])
        left -= 1
        if u:
            number = int(taken[at][u][left])
            u -= listed[at][number - 1].gpus
            continue
        if not left:
            return tuple(tuple(own) for own in reversed(found))
        at -= 1
        while not closed[at][1][left]:
            at -= 1
        u, number = int(closed[at][0][left]), int(closed[at][1][left])
