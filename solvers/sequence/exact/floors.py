"""Quick floors of forward and backward seconds, from compute alone: what no tokens and heads of a frame can beat."""

from collections.abc import Sequence

import numpy as np

from hexiopt.gpus import Gpu
from hexiopt.sequence import Floats
from solvers.sequence.exact.frames import Frame
from solvers.sequence.exact.grid import Grid


class Floors:
    """Floors on one grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._spec = grid.problem.model
        many = grid.resolution
        before, own = np.meshgrid(np.arange(many + 1.0), np.arange(many + 1.0), indexing="ij")
        self._pairs = {"contiguous": own * (before + 0.5 * own), "zigzag": own * (0.5 * many)}
        self._device: dict[tuple[str, str], tuple[Floats, float]] = {}
        self._group: dict[tuple[object, ...], Floats] = {}

    def of_devices(self, devices: Sequence[int]) -> float:
        """Of any frame of `devices` without recompute.

        A device that takes a share x of all quanta and y of all pairs of queries, keys and heads works for
        x · A + y · B seconds at least. All shares sum to 1, so that for any λ between 0 and 1 and T seconds
        1 ≤ T · Σ max(λ / A, (1-λ) / B); the best λ makes two terms of a device equal.
        """
        many, limits = self._grid.resolution, []
        for d in devices:
            table_s, head_s = self._of_device(self._grid.gpu(d), "none")
            slope_s = many * float(table_s[many] - table_s[many - 1])
            limits.append((slope_s, head_s * self._spec.num_heads * 0.5 * many**2))
        prices = {a / (a + b) for a, b in limits}
        return max(1.0 / sum(max(p / a, (1.0 - p) / b) for a, b in limits) for p in prices)

    def of_frame(self, frame: Frame) -> float:
        """Of one frame: the least, over quanta of the groups, of the longest group's."""
        many = self._grid.resolution
        reached = np.where(np.arange(many + 1) == 0, 0.0, np.inf)  # least longest time to place n quanta
        before, after = np.indices((many + 1, many + 1))
        for own in frame.groups:
            table = self._of_group(tuple(sorted(self._grid.gpu(d).name for d in own)), own, frame.order, frame.policy)
            each = np.where(after > before, table[before, np.maximum(after - before, 0)], np.inf)
            reached = np.maximum(reached[:, None], each).min(axis=0)
        return float(reached[many])

    def _of_group(self, types: tuple[str, ...], own: Sequence[int], order: str, policy: str) -> Floats:
        """Seconds of a group [quanta before it, quanta of its own]."""
        key = (types, order, policy)
        found = self._group.get(key)
        if found is None:
            each = [self._of_device(self._grid.gpu(d), policy) for d in own]
            dense_s = least_largest([table for table, _ in each], self._grid.resolution)
            heads = np.arange(self._spec.num_heads + 1.0)
            head_s = least_largest([rate * heads for _, rate in each], self._spec.num_heads)[-1]
            found = self._group[key] = dense_s[None, :] + head_s * self._pairs[order]
        return found

    def _of_device(self, gpu: Gpu, policy: str) -> tuple[Floats, float]:
        """Seconds of all layers outside attention, and of both ends [quanta]; and of attention for a quantum of
        queries, a quantum of keys before them and a head."""
        found = self._device.get((gpu.name, policy))
        if found is None:
            grid, layers = self._grid, self._spec.num_layers
            dense = grid.dense(gpu)
            dense_s = dense.before_s + dense.after_s + dense.before_back_s + dense.after_back_s
            if policy == "full":
                dense_s = dense_s + dense.before_s + dense.after_again_s
            forward_s, backward_s = (
                sum(term.slope_s for term, _ in grid.attention(gpu, backward)) for backward in (False, True)
            )
            again = 2.0 if policy != "none" else 1.0
            found = layers * dense_s + sum(grid.ends(gpu)), layers * (again * forward_s + backward_s)
            self._device[gpu.name, policy] = found
        return found


def least_largest(tables: Sequence[Floats], total: int) -> Floats:
    """The least largest entry where n parts of at least 1 each, up to `total`, are dealt to ascending `tables`
    [total + 1]; infinite where there are too few."""
    count = len(tables)
    found = np.full(total + 1, np.inf)
    if count <= total:
        least = max(float(table[1]) for table in tables)
        more = np.sort(np.concatenate([table[2 : total + 1] for table in tables]))
        found[count] = least
        found[count + 1 :] = np.maximum(least, more[: total - count])
    return found
