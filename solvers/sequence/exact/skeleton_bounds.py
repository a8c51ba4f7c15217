"""Quick lower bounds on forward and backward seconds that hold for all tokens and heads of a skeleton.

They count compute, the all-to-alls of one machine of a group that spans several, and the gradients of keys and values,
which travel all the way round the rings in the backward pass.
"""

from collections.abc import Sequence

import numpy as np

from hexiopt.memo import Memo
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.token_layout import Floats
from solvers.core.partition import devices_by_machine
from solvers.sequence.exact.layout_skeletons import LayoutSkeleton
from solvers.sequence.exact.quanta_grid import QuantaGrid

_Type = tuple[Floats, float, float]


class SkeletonBounds:
    """Floors on one grid."""

    def __init__(self, grid: QuantaGrid) -> None:
        self._grid, self._cluster = grid, grid.problem.cluster
        self._spec = grid.problem.model
        self._each = self._spec.num_heads // self._spec.num_kv_heads
        many = grid.resolution
        before, own = np.meshgrid(np.arange(many + 1.0), np.arange(many + 1.0), indexing="ij")
        self._pairs = {"contiguous": own * (before + 0.5 * own), "zigzag": own * (0.5 * many)}
        self._after = own.astype(int) - before.astype(int)  # quanta from one column of a table to another
        self._device: Memo[tuple[Gpu, str], _Type] = Memo(lambda key: self._of_device(*key))
        self._group: dict[tuple[object, ...], Floats] = {}

    def of_devices(self, devices: Sequence[int]) -> float:
        """A bound for all skeletons of `devices`.

        A device that takes a share x of all quanta and y of all products of queries, keys and heads works for at least
        x · A + y · B seconds. The shares sum to 1, so for any λ between 0 and 1 and T seconds 1 ≤ T · Σ max(λ / A,
        (1-λ) / B); the best λ makes the two terms of some device equal.
        """
        many, limits = self._grid.resolution, []
        for d in devices:
            table_s, forward_s, backward_s = self._device[self._grid.gpu(d), "none"]
            slope_s = many * float(table_s[many] - table_s[many - 1])
            limits.append((slope_s, (forward_s + backward_s) * self._spec.num_heads * 0.5 * many**2))
        prices = {a / (a + b) for a, b in limits}
        return max(1.0 / sum(max(p / a, (1.0 - p) / b) for a, b in limits) for p in prices)

    def of_skeleton(self, skeleton: LayoutSkeleton) -> float:
        """A bound for one skeleton: the longest group's, minimised over the groups' quanta."""
        many = self._grid.resolution
        reached = np.where(np.arange(many + 1) == 0, 0.0, np.inf)  # least longest time to place n quanta
        rows, forward = np.arange(many + 1)[:, None], self._after > 0
        for own, ring_s in zip(skeleton.groups, self._rings_s(skeleton), strict=True):
            table = self._of_group(own, skeleton.order, skeleton.policy, ring_s)
            each = np.where(forward, table[rows, np.maximum(self._after, 0)], np.inf)
            reached = np.maximum(reached[:, None], each).min(axis=0)
        return float(reached[many])

    # ---------------------------------------------------------------- rings

    def _rings_s(self, skeleton: LayoutSkeleton) -> list[float]:
        """For each group, the seconds in which gradients of keys and values pass an interface that none of them can
        avoid.
        """
        count = len(skeleton.groups)
        found = [0.0] * count
        if count == 1:
            return found
        grid = self._grid
        num_bytes = 2.0 * grid.head_bytes * grid.resolution * self._spec.num_kv_heads * self._spec.num_layers
        machines = [{int(self._cluster.machine_of[d]) for d in own} for own in skeleton.groups]
        for g in range(count):
            after = (g + 1) % count
            if machines[g] & machines[after]:
                continue
            for end in (g, after):
                if len(machines[end]) == 1:
                    seconds = num_bytes / min(self._ports(skeleton.groups[end]))
                    found[g], found[after] = max(found[g], seconds), max(found[after], seconds)
        return found

    def _ports(self, devices: Sequence[int]) -> tuple[float, float]:
        """Bytes per second that devices of one machine can send to other machines, and receive from them."""
        network = self._cluster.network
        sending, receiving = (
            sum(float(network.capacity[r]) for r in {int(ports[d]) for d in devices})
            for ports in (network.transmitters, network.receivers)
        )
        return sending, receiving

    # ---------------------------------------------------------------- groups

    def _of_group(self, own: Sequence[int], order: str, policy: str, ring_s: float) -> Floats:
        """Seconds of a group [quanta before it, quanta of its own]."""
        parts = devices_by_machine(self._cluster, own)
        names = sorted(
            (tuple(sorted(self._grid.gpu(d).name for d in part)), self._ports(part)) for part in parts.values()
        )
        key = (tuple(names), order, policy, ring_s)
        found = self._group.get(key)
        if found is None:
            rows = [own] if len(parts) == 1 else list(parts.values())
            tables = [self._of_part(own, part, order, policy, ring_s) for part in rows]
            found = self._group[key] = np.maximum.reduce(tables)
        return found

    def _of_part(self, own: Sequence[int], part: Sequence[int], order: str, policy: str, ring_s: float) -> Floats:
        """As `_of_group`, counting only the messages between `part`, devices of one machine, and the rest of the
        group.
        """
        many, num_heads = self._grid.resolution, self._spec.num_heads
        rest = [d for d in own if d not in part]
        mine_s, theirs_s = self._shared(part, policy), self._shared(rest, policy)
        quanta, heads = np.arange(many + 1), np.arange(num_heads + 1)
        left = quanta[:, None] - quanta[None, :]  # quanta of the rest [of the group, of the part]
        dense_s = np.where(left >= 0, np.maximum(mine_s[0][None, :], theirs_s[0][np.maximum(left, 0)]), np.inf)
        forward_s, backward_s = (np.maximum(mine_s[k], theirs_s[k][::-1]) for k in (1, 2))
        total_s = dense_s[:, :, None]
        if rest:
            # Two all-to-alls of queries, keys and values, two of results; each in both directions.
            sending, receiving = self._ports(part)
            byte = self._grid.head_bytes * self._spec.num_layers * (4.0 + 4.0 / self._each)
            away = quanta[None, :, None] * (num_heads - heads)
            home = np.maximum(left, 0)[:, :, None] * heads
            total_s = total_s + byte / max(sending, receiving) * np.maximum(away, home)
        outside_s = total_s.min(axis=1)  # [quanta, heads of the part]
        pairs, able = self._pairs[order][:, :, None], np.isfinite(forward_s)
        attention_s = forward_s[able] * pairs + np.maximum(backward_s[able] * pairs, ring_s)
        found: Floats = (np.broadcast_to(outside_s, (many + 1, num_heads + 1))[None, :, able] + attention_s).min(axis=2)
        return found

    def _shared(self, devices: Sequence[int], policy: str) -> tuple[Floats, Floats, Floats]:
        """Least seconds of the slowest of `devices` for quanta outside attention [resolution + 1], and for heads in
        attention forward and backward, per pair of quanta [heads + 1].
        """
        many, num_heads = self._grid.resolution, self._spec.num_heads
        types = [self._device[self._grid.gpu(d), policy] for d in devices]
        heads = np.arange(num_heads + 1.0)
        return (
            least_largest([table for table, _, _ in types], many),
            least_largest([rate * heads for _, rate, _ in types], num_heads),
            least_largest([rate * heads for _, _, rate in types], num_heads),
        )

    def _of_device(self, gpu: Gpu, policy: str) -> _Type:
        """Seconds of all layers outside attention and of embedding and head [quanta]; and of attention forward and
        backward for one quantum of queries, one quantum of keys before them, and one head.
        """
        grid, layers = self._grid, self._spec.num_layers
        dense = grid.dense[gpu]
        dense_s = dense.before_s + dense.after_s + dense.before_back_s + dense.after_back_s
        if policy == "full":
            dense_s = dense_s + dense.before_s + dense.after_again_s
        forward_s, backward_s = (
            sum(term.slope_s for term, _ in grid.attention(gpu, backward)) for backward in (False, True)
        )
        again = 2.0 if policy != "none" else 1.0
        return layers * dense_s + sum(grid.ends[gpu]), layers * again * forward_s, layers * backward_s


def least_largest(tables: Sequence[Floats], total: int) -> Floats:
    """The least largest entry when n parts, up to `total`, are allocated to ascending `tables` [total + 1], at least 1
    to each.

    Infinite where n is smaller than the number of tables. Without tables, 0 for n = 0.
    """
    count = len(tables)
    found = np.full(total + 1, np.inf)
    if not count:
        found[0] = 0.0
    elif count <= total:
        least = max(float(table[1]) for table in tables)
        more = np.sort(np.concatenate([table[2 : total + 1] for table in tables]))
        found[count] = least
        found[count + 1 :] = np.maximum(least, more[: total - count])
    return found
