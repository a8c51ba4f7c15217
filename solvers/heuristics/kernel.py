"""The dynamic programme of `fewest_stages.py`, compiled."""

import numba
import numpy as np

from hexiopt.plan.token_layout import Floats, Ints

_NONE = -(1 << 20)  # layers where there is no way


@numba.njit(cache=True, nogil=True)
def fewest(sizes: Ints, kinds: Ints, gpus: Ints, held: Ints, layers: int, taken: Ints, closed: Ints) -> Ints:
    """Stages, block from the last, GPUs behind the first stage and its way, from 1; no stages where none hold all.

    Block b has `sizes[b]` GPUs and is of kind `kinds[b]`, of which way w takes `gpus[kind, w]` and holds `held[kind, w,
    first, sides, behind]` layers. Notes, by block from the last, the choice for each number of stages so far: in
    `taken`, by GPUs taken too, the way of the foremost stage; in `closed`, of the whole block, GPUs behind its foremost
    stage and the way of that, 0 if it has none.
    """
    most = held.shape[-1]
    found = np.array([0, 0, 0, 0])
    done = np.full(most + 1, _NONE)  # by stages so far, the most layers in whole blocks
    done[0] = 0
    for at in range(len(sizes)):
        block = len(sizes) - 1 - at
        size, kind = sizes[block], kinds[block]
        value = np.full((size + 1, most + 1), _NONE)
        value[0] = done
        after = done.copy()
        for u in range(size):
            # The block's last stage has another behind it, unless it is the pipeline's last.
            sides = int(u == 0)
            for way in range(gpus.shape[1]):
                end = u + gpus[kind, way]
                if end == u or end > size:
                    continue
                for behind in range(most):
                    before = value[u, behind]
                    if before < 0:
                        continue
                    own = sides if behind else 0
                    inner = held[kind, way, 0, own, behind]
                    if inner > 0 and before + inner > value[end, behind + 1]:
                        value[end, behind + 1] = before + inner
                        taken[at, end, behind + 1] = way + 1
                    inner = held[kind, way, 0, own + 1 if behind else sides, behind]
                    if inner > 0 and before + inner > after[behind + 1]:
                        after[behind + 1] = before + inner
                        closed[at, 0, behind + 1], closed[at, 1, behind + 1] = u, way + 1
                    first = held[kind, way, 1, own, behind]
                    fewer = not found[0] or behind + 1 < found[0]
                    if fewer and first > 0 and before + first >= layers:
                        found[:] = behind + 1, at, u, way + 1
        done = after
    return found


@numba.njit(cache=True, nogil=True)
def most_layers(times_s: Floats, limits_s: Floats) -> Ints:
    """How many of the ascending `times_s` [way, first, stages behind, layers] are within each of `limits_s` [sides];
    [way, first, sides, stages behind]."""
    ways, firsts, most, layers = times_s.shape
    found = np.empty((ways, firsts, len(limits_s), most), np.int64)
    for way in range(ways):
        for first in range(firsts):
            for sides in range(len(limits_s)):
                for behind in range(most):
                    low, high = 0, layers
                    while low < high:
                        middle = (low + high) // 2
                        if times_s[way, first, behind, middle] <= limits_s[sides]:
                            low = middle + 1
                        else:
                            high = middle
                    found[way, first, sides, behind] = low
    return found
