"""Shapes of plans with sequence stages: which devices form which stages of which pipelines; and quick estimates.

A shape says nothing of layers, layouts and batches: `building.py` finds these. Shapes that people would build cut the
machines, in an order, into pipelines and these into stages, as equal in capability or in devices as they go.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, zip_longest

import numpy as np

from hexiopt.cost.model import CostModel
from hexiopt.problem import Problem
from hexiopt.sequence import Floats
from solvers.batches import split_batch
from solvers.sequence.allotment import RateTable
from solvers.sequence.clustering import by_machine

_SNAP = 0.34  # of a part, by which a cut may move to the border of a machine
_MOST_STAGES = 16


@dataclass(frozen=True, slots=True)
class Seat:
    """A stage's devices, ascending, and whether they share each layer by tensor parallelism."""

    devices: tuple[int, ...]
    tensor: bool = False


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


def hand_made(problem: Problem) -> Iterator[Shape]:
    """All shapes that people would build; without sequence layouts they would be grids."""
    workload, space = problem.workload, problem.space
    orders = list(dict.fromkeys(_orders(problem)))
    most = min(workload.global_batch, len(problem.usable_devices))
    sizes = space.micro_batch_sizes(workload.global_batch)
    stage_counts = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= min(_MOST_STAGES, problem.model.num_layers)]
    seen = set()
    for order, size in product(orders, sizes):
        counts = {1 << k for k in range(most.bit_length())} | {len(order), len(order) // 2, 3, 5, 6, 7}
        for d, s in product(sorted(counts), stage_counts):
            count = sum(map(len, order))
            if not 1 <= d * size <= workload.global_batch or d * s > count:
                continue
            if space.num_pipelines not in (None, d) or space.num_stages not in (None, s):
                continue
            for by_count in (False, True):
                lines = [cut(problem, part, s, by_count=by_count) for part in _dealt(problem, order, d, by_count)]
                if all(lines) and len(lines) == d:
                    shape = Shape(tuple(tuple(map(Seat, line)) for line in lines), size)
                    if shape not in seen:
                        seen.add(shape)
                        yield shape


def _orders(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Machines fast first, also without the slowest types, and with the types mixed."""
    machines = by_machine(problem, problem.usable_devices)
    types: dict[str, list[tuple[int, ...]]] = {}
    for own in machines:
        types.setdefault(problem.cluster.gpu_of(own[0]).name, []).append(own)
    rows = list(types.values())
    for count in range(len(rows), 0, -1):
        yield tuple(own for row in rows[:count] for own in row)
        if count > 1:
            yield tuple(own for turn in zip_longest(*rows[:count]) for own in turn if own is not None)
            yield tuple(own for row in reversed(rows[:count]) for own in row)


def _dealt(
    problem: Problem, machines: Sequence[tuple[int, ...]], count: int, by_count: bool
) -> list[list[tuple[int, ...]]]:
    """Machines, or parts of them, in `count` consecutive runs."""
    runs = cut(problem, machines, count, by_count=by_count)
    machine_of = problem.cluster.machine_of
    found = []
    for run in runs:
        parts: dict[int, list[int]] = {}
        for d in run:
            parts.setdefault(int(machine_of[d]), []).append(d)
        order = {int(machine_of[own[0]]): k for k, own in enumerate(machines)}
        found.append([tuple(parts[m]) for m in sorted(parts, key=order.__getitem__)])
    return found


def cut(
    problem: Problem, machines: Sequence[tuple[int, ...]], count: int, *, by_count: bool = False
) -> list[tuple[int, ...]]:
    """The devices in `count` consecutive parts of about equal capability, or `by_count` of equally many; cuts move to
    borders of machines where one is near. Empty where that leaves a part empty."""
    devices = [d for own in machines for d in own]
    precision = problem.workload.precision
    weights = [1.0 if by_count else problem.cluster.gpu_of(d).peak_flops(precision) or 0.0 for d in devices]
    ends = np.cumsum(weights)
    borders = np.cumsum([len(own) for own in machines])[:-1]
    cuts = [0]
    for k in range(1, count):
        target = ends[-1] * k / count
        at = int(np.argmin(np.abs(ends - target))) + 1
        if len(borders):
            near = int(borders[np.argmin(np.abs(ends[borders - 1] - target))])
            if abs(ends[near - 1] - target) <= _SNAP * ends[-1] / count:
                at = near
        cuts.append(at)
    cuts.append(len(devices))
    parts = [tuple(sorted(devices[a:b])) for a, b in pairwise(cuts)]
    return parts if all(parts) else []


class Estimate:
    """About how long a step of a shape takes, from rates and the slowest interfaces; and whether its states fit."""

    def __init__(self, model: CostModel) -> None:
        problem = self._problem = model.problem
        devices = list(range(problem.cluster.num_devices))
        rates = RateTable(model).of(devices, "none")
        spec, workload = problem.model, problem.workload
        self._speed: Floats = 1.0 / rates.of_sequence_s(workload.seq_len, spec.num_heads)
        self._machine_of = problem.cluster.machine_of
        machines = problem.cluster.machines
        self._nic_s = np.array([1.0 / (m.nic_bandwidth_bytes_per_s * m.num_interfaces) for m in machines])
        self._limit = np.array([machines[m].gpu.usable_memory_bytes for m in self._machine_of.tolist()])
        width, dim = workload.element_bytes, spec.head_dim
        self._kv_bytes = 2.0 * workload.seq_len * spec.num_kv_heads * dim * width
        self._qo_bytes = 2.0 * workload.seq_len * spec.num_heads * dim * width
        self._params = float(spec.num_params)
        self._cells: dict[tuple[int, ...], tuple[float, int, float, float]] = {}

    def _cell(self, devices: tuple[int, ...]) -> tuple[float, int, float, float]:
        """Seconds of a layer for a sequence, machines, seconds a byte of the slowest interface, least memory."""
        found = self._cells.get(devices)
        if found is None:
            own = list(devices)
            machines = np.unique(self._machine_of[own])
            compute_s, nic_s, k = 1.0 / self._speed[own].sum(), float(self._nic_s[machines].max()), len(machines)
            seconds = compute_s
            if k > 1:
                # A ring takes keys and values through every machine, three times in all, beside attention; an
                # all-to-all takes everything to one of k machines, there and back.
                ring_s = 3.0 * self._kv_bytes * nic_s * (k - 1) / k
                exchange_s = 2.0 * (self._kv_bytes + self._qo_bytes) * nic_s * (k - 1) / k**2
                seconds = max(compute_s, ring_s)
                if len(own) <= self._problem.model.num_heads:
                    seconds = min(seconds, compute_s + exchange_s)
            found = self._cells[devices] = (seconds, k, nic_s, float(self._limit[own].min()))
        return found

    def step_s(self, shape: Shape) -> float:
        """Seconds; infinite where model states alone do not fit, or the batch does not divide."""
        problem = self._problem
        layers, workload = problem.model.num_layers, problem.workload
        fills, beats, sync_s = [], [], 0.0
        total = sum(len(seat.devices) for line in shape.lines for seat in line)
        for line in shape.lines:
            cells = [self._cell(seat.devices) for seat in line]
            rate = sum(1.0 / cell[0] for cell in cells)
            beat = shape.size * layers / rate
            if len(line) > layers:
                return float("inf")
            beats.append(beat)
            fills.append((len(line) - 1) * beat)
            for cell in cells:
                params = self._params * (1.0 / cell[0]) / rate
                kept = workload.element_bytes + workload.stored_gradient_bytes
                spread = workload.master_bytes + workload.optimizer_bytes
                if params * (kept + spread / (total if shape.zero else 1)) > cell[3]:
                    return float("inf")
                if cell[1] > 1 or len(shape.lines) > 1:
                    sync_s = max(sync_s, 2.0 * params * workload.stored_gradient_bytes * cell[2])
        counts = split_batch(fills, beats, [shape.size] * len(beats), workload.global_batch)
        if counts is None:
            return float("inf")
        return max(f + b * m for f, b, m in zip(fills, beats, counts, strict=True)) + sync_s
