"""Rule-based shapes: grids, with a sequence layout in each stage.

The machines, in some order, are cut into pipelines and these into stages, as equal as possible in capability or in
number of devices. Subsets of the GPU types have grids of their own, which run in parallel and share the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from hexiopt.plan.token_layout import Floats, Ints
from hexiopt.problem.problem import Problem
from solvers.core.zero import LOCKSTEP
from solvers.sequence.estimates import Cells, SequenceEstimates, split_s
from solvers.sequence.grouping import machine_orders
from solvers.sequence.shapes import SequenceShape, ShapePipeline

_SNAP = 0.34  # of a part, by which a cut may move to the border of a machine
_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_PARTS, _FEW_PARTS = 3, 32  # stages in a plan: so many a machine, or so many at least
_BUSY_TOKENS = 8192  # of a micro-batch on a device, beyond which larger ones gain nothing
_MOST_PARALLEL = 6  # most grids of a set of types that are combined with those of others


@dataclass(frozen=True, eq=False)
class _Row:
    """An order of devices, with prefix sums up to each position [devices + 1] of the devices of every type [.., types]
    and of their speed; the index of each device's machine in the order [devices]; the borders of machines; and the
    types present.
    """

    devices: tuple[int, ...]
    types: Ints
    speeds: Floats
    machine: Ints
    borders: Ints

    kinds: frozenset[int]
    share: float  # of the cluster's capability
    kept: dict[int, list[Ints]] = field(default_factory=dict)

    def cuts(self, parts: int) -> list[Ints]:
        """All distinct cuts into `parts`, as the ends of the parts."""
        found = self.kept.get(parts)
        if found is None:
            ways = ((self.speeds, _SNAP), (self.speeds, 0.0), (np.arange(len(self.speeds), dtype=float), 0.0))
            cuts = [self._ends(parts, *way) for way in ways] if parts <= len(self.devices) else []
            found = self.kept[parts] = list({ends.tobytes(): ends for ends in cuts if ends is not None}.values())
        return found

    def _ends(self, parts: int, weights: Floats, snap: float) -> Ints | None:
        """The ends of `parts` consecutive parts of about equal weight [parts + 1]; None where a part would be empty.

        A cut moves to the border of a machine that is within `snap` of a part.
        """
        part = weights[-1] / parts
        targets = part * np.arange(1, parts)
        ends = _nearest(weights, targets)
        near = self.borders[_nearest(weights[self.borders], targets)]
        inside = (near > 0) & (near < len(self.devices))
        ends = np.where(inside & (np.abs(weights[near] - targets) <= snap * part), near, ends)
        found = np.concatenate([[0], ends, [len(self.devices)]])
        return found if (np.diff(found) > 0).all() else None


def _nearest(ascending: Floats, targets: Floats) -> Ints:
    """The index of the value nearest to each target; `ascending` has at least two values."""
    after = np.clip(np.searchsorted(ascending, targets), 1, len(ascending) - 1)
    found: Ints = after - (targets - ascending[after - 1] <= ascending[after] - targets)
    return found


@dataclass(frozen=True, eq=False)
class _Grid:
    """A row cut into stages: `ends` [pipelines · stages + 1], with estimates of fill and period of its pipelines and of
    sync.
    """

    row: _Row
    ends: Ints
    pipelines: int
    fills: Floats
    periods: Floats
    sync_s: float

    @property
    def stages(self) -> int:
        """Of each pipeline."""
        return (len(self.ends) - 1) // self.pipelines


@dataclass(frozen=True, eq=False)
class EstimatedShape:
    """An estimated shape of parallel `grids`: the seconds of a step with micro-batches of `size` sequences and ZeRO
    stage `zero`.
    """

    step_s: float
    grids: tuple[_Grid, ...]
    size: int
    zero: int

    @property
    def kind(self) -> tuple[int, ...]:
        """A key, equal for shapes whose pipelines have the same numbers of stages."""
        return self.zero, self.size, *sorted(stages for grid in self.grids for stages in [grid.stages] * grid.pipelines)

    def shape(self) -> SequenceShape:
        """The devices of every stage."""
        pipelines: list[ShapePipeline] = []
        for grid in self.grids:
            stages = [tuple(sorted(grid.row.devices[a:b])) for a, b in pairwise(grid.ends.tolist())]
            pipelines += [tuple(stages[k : k + grid.stages]) for k in range(0, len(stages), grid.stages)]
        return SequenceShape(tuple(pipelines), self.size, self.zero)


class SequenceStarts:
    """All rule-based shapes with their estimates."""

    def __init__(self, problem: Problem, estimates: SequenceEstimates) -> None:
        self._problem, self._estimates = problem, estimates
        cluster, number = problem.cluster, len(estimates.types)
        machine_type = estimates.type_of_machine
        speed = estimates.speed[machine_type]
        total = sum(len(own) * speed[m] for m, own in problem.usable_by_machine.items())
        self._rows = []
        for order in machine_orders(problem):
            devices = np.array([d for own in order for d in own])
            machine_of = cluster.machine_of[devices]
            types = np.zeros((len(devices) + 1, number), np.int64)
            types[np.arange(1, len(devices) + 1), machine_type[machine_of]] = 1
            ends = np.cumsum([0, *map(len, order)])
            self._rows.append(
                _Row(
                    tuple(devices.tolist()),
                    np.cumsum(types, axis=0),
                    np.concatenate([[0.0], np.cumsum(speed[machine_of])]),
                    np.repeat(np.arange(len(order)), [len(own) for own in order]),
                    ends,
                    frozenset(machine_type[machine_of].tolist()),
                    float(speed[machine_of].sum() / total),
                )
            )

    def rank(self, should_continue: Callable[[], bool]) -> list[EstimatedShape]:
        """The shapes that may fit, best estimate first, as far as time allows."""
        batch, in_lockstep = self._problem.workload.global_batch, self._estimates.zero >= LOCKSTEP
        found: list[EstimatedShape] = []
        own: dict[tuple[int, frozenset[int]], list[tuple[float, _Grid]]] = {}
        for d, s in self._degrees():
            if found and not should_continue():
                break
            cuts = [(row, ends) for row in self._rows for ends in row.cuts(d * s)]
            if not cuts:
                continue
            cells = self._cells(cuts, d, s)
            shares = np.array([row.share for row, _ in cuts])
            for size in self._sizes(d, s):
                if in_lockstep and d > 1 and batch % (d * size):
                    continue
                fills, periods, sync_s = self._estimates.rhythms_s(cells, size)
                seconds = self._estimates.step_s(fills, periods, size) + sync_s
                good = np.flatnonzero(np.isfinite(seconds)).tolist()
                if not good:
                    break  # larger micro-batches need more memory
                grids = {k: _Grid(*cuts[k], d, fills[k], periods[k], float(sync_s[k])) for k in good}
                if self._problem.space.num_pipelines in (None, d):
                    zero = self._estimates.zero
                    found += [EstimatedShape(float(seconds[k]), (grid,), size, zero) for k, grid in grids.items()]
                if in_lockstep:
                    continue  # grids in parallel cannot be in lockstep
                alone_s = split_s(fills, periods, np.maximum(d, np.round(shares * batch / size)))
                for k, grid in grids.items():
                    own.setdefault((size, grid.row.kinds), []).append((float(alone_s[k]), grid))
        if should_continue() and not in_lockstep:
            found += self._side_by_side(own)
        return sorted(found, key=lambda estimated: estimated.step_s)

    def _side_by_side(self, own: dict[tuple[int, frozenset[int]], list[tuple[float, _Grid]]]) -> list[EstimatedShape]:
        """Parallel grids over disjoint sets of GPU types that together are all types."""
        batch, count = self._problem.workload.global_batch, self._problem.space.num_pipelines
        found = []
        for size in sorted({size for size, _ in own}):
            best = {kinds: _best(grids) for (at, kinds), grids in own.items() if at == size}
            for parts in _partitions(frozenset(range(len(self._estimates.types)))):
                if len(parts) < 2 or any(kinds not in best for kinds in parts):
                    continue
                rows = [
                    grids
                    for grids in product(*(best[kinds] for kinds in parts))
                    if sum(grid.pipelines for grid in grids) * size <= batch
                    and count in (None, sum(grid.pipelines for grid in grids))
                ]
                if rows:
                    most = max(sum(grid.pipelines for grid in grids) for grids in rows)
                    fills, periods = np.zeros((len(rows), most)), np.full((len(rows), most), np.inf)
                    for k, grids in enumerate(rows):
                        joined = np.concatenate([grid.fills for grid in grids])
                        fills[k, : len(joined)] = joined
                        periods[k, : len(joined)] = np.concatenate([grid.periods for grid in grids])
                    sync_s = np.array([max(grid.sync_s for grid in grids) for grids in rows])
                    seconds = split_s(fills, periods, -(-batch // size)) + sync_s
                    zero = self._estimates.zero
                    found += [
                        EstimatedShape(second, grids, size, zero)
                        for second, grids in zip(seconds.tolist(), rows, strict=True)
                    ]
        return found

    def _degrees(self) -> Iterator[tuple[int, int]]:
        """Numbers of pipelines and stages."""
        problem = self._problem
        space, count = problem.space, len(problem.usable_devices)
        batch = problem.workload.global_batch
        most = min(batch, count)
        most_parts = min(count, max(_FEW_PARTS, _PARTS * len(problem.usable_by_machine)))
        if space.num_stages:
            most_parts = count
        # As many pipelines as an order has machines: one in each.
        pipelines = {
            *range(1, 9),
            *(1 << k for k in range(most.bit_length())),
            *(len(row.borders) - 1 for row in self._rows),
        }
        if self._estimates.zero >= LOCKSTEP:
            pipelines = {d for d in range(1, most + 1) if batch % d == 0}
        given = {d for d in pipelines if d <= most}
        if space.num_pipelines:
            given = {*range(1, min(8, space.num_pipelines)), space.num_pipelines}
        stages = {space.num_stages} if space.num_stages else set(_STAGES)
        for s, d in sorted(product(stages, given)):  # fewest stages first: least idle time
            if s <= problem.model.num_layers and d * s <= most_parts:
                yield d, s

    def _sizes(self, d: int, s: int) -> list[int]:
        """Micro-batch sizes, up to the first that keeps a device busy."""
        workload = self._problem.workload
        tokens = workload.seq_len * d * s / len(self._problem.usable_devices)
        sizes = self._problem.space.micro_batch_sizes(workload.global_batch // d)
        return [size for size in sizes if size == 1 or (size - 1) * tokens < _BUSY_TOKENS]

    def _cells(self, cuts: Sequence[tuple[_Row, Ints]], d: int, s: int) -> Cells:
        counts, machines, sharers = [], [], []
        for row, ends in cuts:
            counts.append(np.diff(row.types[ends], axis=0))
            first, last = row.machine[ends[:-1]], row.machine[ends[1:] - 1]
            machines.append(last - first + 1)
            # Consecutive stages that span machines and meet in one share its network interfaces.
            crossing = last > first
            meets = (last[:-1] == first[1:]) & crossing[:-1] & crossing[1:]
            sharers.append(1.0 + (np.append(meets, False) | np.append(False, meets)))
        each = np.array(counts, float).reshape(len(cuts), d, s, -1)
        nic_s = self._estimates.slowest_nic_s(each) * np.array(sharers).reshape(len(cuts), d, s)
        return Cells(each, np.array(machines).reshape(len(cuts), d, s), nic_s)


def _best(grids: Sequence[tuple[float, _Grid]]) -> list[_Grid]:
    """The best few grids, at most one for each number of pipelines and stages."""
    found: dict[tuple[int, int], _Grid] = {}
    for _, grid in sorted(grids, key=lambda item: item[0]):
        found.setdefault((grid.pipelines, len(grid.ends)), grid)
    return list(found.values())[:_MOST_PARALLEL]


def _partitions(kinds: frozenset[int]) -> Iterator[tuple[frozenset[int], ...]]:
    """All partitions of a set."""
    if not kinds:
        yield ()
        return
    first, *others = sorted(kinds)
    for chosen in range(1 << len(others)):
        block = frozenset([first, *(kind for k, kind in enumerate(others) if chosen >> k & 1)])
        for rest in _partitions(kinds - block):
            yield (block, *rest)
