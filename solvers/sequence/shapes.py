"""Shapes of plans with sequence stages: which devices form which stages of which pipelines.

A shape says nothing of layers, layouts and batches: `building.py` finds these. Shapes that people would build cut the
machines, in an order, into pipelines and these into stages, as equal in capability or in devices as they go.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np

from hexiopt.problem import Problem
from hexiopt.sequence import Floats, Ints
from solvers.sequence.estimates import Cells, Estimates
from solvers.sequence.orders import machine_orders

_SNAP = 0.34  # of a part, by which a cut may move to the border of a machine
_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_MOST_LINES = 64
_MOST = 20_000  # shapes kept


Seat = tuple[int, ...]  # a stage's devices, ascending
Line = tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Pipelines of seats, their micro-batch size in sequences, the ZeRO stage and its groups."""

    lines: tuple[Line, ...]
    size: int = 1
    zero: int = 1
    groups: str = "all"

    def with_line(self, p: int, *lines: Line) -> "Shape":
        """The shape with others in place of pipeline p."""
        return replace(self, lines=(*self.lines[:p], *lines, *self.lines[p + 1 :]))


@dataclass(frozen=True)
class _Row:
    """An order of devices: up to each place [devices + 1] the devices of every type [.., types] and their peak FLOP/s;
    the number of each one's machine in the order [devices]; and where machines begin and end."""

    devices: tuple[int, ...]
    types: Ints
    flops: Floats
    machine: Ints
    borders: Ints

    kept: dict[int, list[Ints]] = field(default_factory=dict)

    def cuts(self, parts: int) -> list[Ints]:
        """Both ways of `ends`, where they differ."""
        found = self.kept.get(parts)
        if found is None:
            ways = (self.ends(parts, by_count=way) for way in (False, True)) if parts <= len(self.devices) else ()
            found = self.kept[parts] = list({ends.tobytes(): ends for ends in ways if ends is not None}.values())
        return found

    def ends(self, parts: int, *, by_count: bool) -> Ints | None:
        """Where `parts` consecutive parts of about equal capability, or `by_count` of equally many devices, end
        [parts + 1]; cuts move to borders of machines where one is near. None where a part would be empty."""
        weights = np.arange(len(self.flops), dtype=float) if by_count else self.flops
        part = weights[-1] / parts
        targets = part * np.arange(1, parts)
        ends = _nearest(weights, targets)
        near = self.borders[_nearest(weights[self.borders], targets)]
        inside = (near > 0) & (near < len(self.devices))
        ends = np.where(inside & (np.abs(weights[near] - targets) <= _SNAP * part), near, ends)
        found = np.concatenate([[0], ends, [len(self.devices)]])
        return found if (np.diff(found) > 0).all() else None


def _nearest(ascending: Floats, targets: Floats) -> Ints:
    """The place of the value nearest to each target; two values at least."""
    after = np.clip(np.searchsorted(ascending, targets), 1, len(ascending) - 1)
    found: Ints = after - (targets - ascending[after - 1] <= ascending[after] - targets)
    return found


class HandMade:
    """All shapes that people would build, with estimates; without sequence layouts they would be grids."""

    def __init__(self, problem: Problem, estimates: Estimates) -> None:
        self._problem, self._estimates = problem, estimates
        cluster, number = problem.cluster, {name: k for k, name in enumerate(estimates.types)}
        machine_type = np.array([number.get(m.gpu.name, 0) for m in cluster.machines])
        peak_flops = np.array([m.gpu.peak_flops(problem.workload.precision) or 0.0 for m in cluster.machines])
        self._nic_s = np.zeros(len(number))
        for m in problem.usable_by_machine:
            machine = cluster.machines[m]
            nic_s = 1.0 / (machine.nic_bandwidth_bytes_per_s * machine.num_interfaces)
            self._nic_s[machine_type[m]] = max(self._nic_s[machine_type[m]], nic_s)
        self._rows = []
        for order in machine_orders(problem):
            devices = np.array([d for own in order for d in own])
            machine_of = cluster.machine_of[devices]
            types = np.zeros((len(devices) + 1, len(number)), np.int64)
            types[np.arange(1, len(devices) + 1), machine_type[machine_of]] = 1
            ends = np.cumsum([0, *map(len, order)])
            self._rows.append(
                _Row(
                    tuple(devices.tolist()),
                    np.cumsum(types, axis=0),
                    np.concatenate([[0.0], np.cumsum(peak_flops[machine_of])]),
                    np.repeat(np.arange(len(order)), [len(own) for own in order]),
                    ends,
                )
            )

    def ranked(self, go_on: Callable[[], bool]) -> list[tuple[float, Shape]]:
        """Shapes that may fit, the best estimate first; what there was time for."""
        found: list[tuple[float, _Row, Ints, int, int]] = []
        for d, s in self._degrees():
            if found and not go_on():
                break
            cuts = [(row, ends) for row in self._rows for ends in row.cuts(d * s)]
            if not cuts:
                continue
            cells = self._cells(cuts, d, s)
            for size in self._problem.space.micro_batch_sizes(self._problem.workload.global_batch // d):
                seconds = self._estimates.step_s(cells, size)
                if not np.isfinite(seconds).any():
                    break  # larger micro-batches need more memory
                good = np.flatnonzero(np.isfinite(seconds)).tolist()
                found += [(float(seconds[k]), *cuts[k], d, size) for k in good]
        found.sort(key=lambda item: item[0])
        return [(seconds, _shape(row, ends, d, size)) for seconds, row, ends, d, size in found[:_MOST]]

    def _degrees(self) -> Iterator[tuple[int, int]]:
        """Numbers of pipelines and stages."""
        problem = self._problem
        space, count = problem.space, len(problem.usable_devices)
        most = min(problem.workload.global_batch, count, _MOST_LINES)
        lines = {*range(1, 9), *(1 << k for k in range(most.bit_length())), len(problem.usable_by_machine)}
        given = {space.num_pipelines} if space.num_pipelines else {d for d in lines if d <= most}
        stages = {space.num_stages} if space.num_stages else set(_STAGES)
        for d, s in sorted(product(given, stages), key=lambda pair: (pair[0] * pair[1], pair)):
            if s <= problem.model.num_layers and d * s <= count:
                yield d, s

    def _cells(self, cuts: Sequence[tuple[_Row, Ints]], d: int, s: int) -> Cells:
        counts, machines = [], []
        for row, ends in cuts:
            counts.append(np.diff(row.types[ends], axis=0))
            machines.append(row.machine[ends[1:] - 1] - row.machine[ends[:-1]] + 1)
        each = np.array(counts, float).reshape(len(cuts), d, s, -1)
        nic_s = np.where(each > 0, self._nic_s, 0.0).max(axis=-1)
        return Cells(each, np.array(machines).reshape(len(cuts), d, s), nic_s)


def _shape(row: _Row, ends: Ints, num_lines: int, size: int) -> Shape:
    seats = [tuple(sorted(row.devices[a:b])) for a, b in pairwise(ends.tolist())]
    each = len(seats) // num_lines
    return Shape(tuple(tuple(seats[k : k + each]) for k in range(0, len(seats), each)), size)
