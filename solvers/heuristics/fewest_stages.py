"""The fewest stages of a pipeline through blocks of GPUs that hold all layers: a dynamic programme.

Stages are added from the last to the first, because the number of stages behind a stage determines how many
micro-batches it holds. The state is the number of blocks done, of GPUs taken from the next block, and of stages so far;
the value is the most layers that these stages hold.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from hexiopt.plan.token_layout import Ints

Degrees = tuple[tuple[int, ...], ...]  # of each block, the TP degrees of its stages in order
_NONE = -(1 << 20)  # layers where there is no way


def fewest_stages(gpus: Sequence[int], held: Sequence[Mapping[int, Ints]], layers: int) -> Degrees | None:
    """TP degrees of the fewest stages in blocks of `gpus` GPUs that hold all `layers`; None if no number of stages
    does.

    `held[b][t]` is the most layers of a stage of t GPUs in block b, below 1 where it is impossible: [inner or first
    stage, number of sides (0, 1, 2) next to another block, stages behind it]. Blocks and GPUs may stay unused.
    """
    most = max((n.shape[2] for own in held for n in own.values()), default=0)
    done = np.full(most + 1, _NONE)  # by stages so far, the most layers in whole blocks
    done[0] = 0
    # By block from the last. `taken`, by GPUs taken and stages so far: TP degree of the foremost stage. `closed`, by
    # stages so far: GPUs behind the foremost stage of the block, and its degree, 0 if the block has none.
    taken: list[list[Ints]] = []
    closed: list[tuple[Ints, Ints]] = []
    fewest: tuple[int, int, int, int] | None = None  # stages, block, GPUs behind the first stage, its degree
    for size, own in zip(reversed(gpus), reversed(held), strict=True):
        value = [done, *(np.full(most + 1, _NONE) for _ in range(size))]
        degrees = [np.zeros(most + 1, np.int64) for _ in range(size + 1)]
        after, behind, degree = done.copy(), np.zeros(most + 1, np.int64), np.zeros(most + 1, np.int64)
        for u in range(size):
            for t, (inner, first) in own.items():
                if u + t > size:
                    continue
                # The block's last stage has another behind it, unless it is the pipeline's last.
                sides = int(u == 0)
                _keep(value[u + t], _plus(value[u], inner, sides), (degrees[u + t], t))
                _keep(after, _plus(value[u], inner, sides + 1), (behind, u), (degree, t))
                enough = np.flatnonzero(_plus(value[u], first, sides) >= layers)
                if len(enough) and (fewest is None or enough[0] + 1 < fewest[0]):
                    fewest = int(enough[0]) + 1, len(taken), u, t
        taken.append(degrees)
        closed.append((behind, degree))
        done = after
    return None if fewest is None else _degrees(*fewest, taken, closed)


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


def _degrees(
    left: int, at: int, u: int, t: int, taken: Sequence[Sequence[Ints]], closed: Sequence[tuple[Ints, Ints]]
) -> Degrees:
    """The TP degrees, from the first stage to the last."""
    found: list[list[int]] = [[] for _ in taken]
    while True:
        found[at].append(t)
        left -= 1
        if u:
            t = int(taken[at][u][left])
            u -= t
            continue
        if not left:
            return tuple(tuple(own) for own in reversed(found))
        at -= 1
        while not closed[at][1][left]:
            at -= 1
        u, t = int(closed[at][0][left]), int(closed[at][1][left])
