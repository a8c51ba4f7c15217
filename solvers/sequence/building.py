"""From shapes to plans: layouts, layers, recompute policies and batches of the stages of a shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.cost.memory import Shards, in_flight
from hexiopt.cost.model import CostModel
from hexiopt.plan import Ends, Pipeline, Plan, Replica, SequenceLayout, Sharding, Stage
from solvers.batches import split_batch
from solvers.sequence.allotment import RateTable, whole_parts
from solvers.sequence.layouts import Fitted, LayoutSearch, Need
from solvers.sequence.requirement import one_range_schedule
from solvers.sequence.shapes import Line, Seat, Shape

_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class _Way:
    """A recompute policy of a stage: seconds of a layer and of what the stage holds beside, and layers that fit."""

    policy: str
    layer_s: float
    beside_s: float
    most: int

    def layers_in(self, seconds: float) -> int:
        """Layers that fit memory and `seconds`; negative where not even none do."""
        return min(self.most, int((seconds - self.beside_s) / self.layer_s + 1e-9)) if seconds >= self.beside_s else -1


@dataclass(frozen=True, slots=True)
class _Part:
    """A stage but for its layers."""

    ends: Ends
    ways: tuple[_Way, ...]


class PlanBuilder:
    """Builds plans of one problem."""

    def __init__(self, model: CostModel, layouts: LayoutSearch) -> None:
        self.model, self.problem, self.layouts = model, model.problem, layouts
        self.schedule = one_range_schedule(self.problem)
        rates = RateTable(model).of(range(self.problem.cluster.num_devices), "none")
        spec, workload = self.problem.model, self.problem.workload
        self._speed = 1.0 / rates.of_sequence_s(workload.seq_len, spec.num_heads)

    def build(self, shape: Shape, effort: int = 1) -> Plan | None:
        """The plan of a shape, not yet priced; None where there is none. `effort` as in `LayoutSearch.best`."""
        batch, size = self.problem.workload.global_batch, shape.size
        work = [size / float(self._speed[[d for seat in line for d in seat.devices]].sum()) for line in shape.lines]
        even = not self.problem.space.uneven_batch
        counts = split_batch([0.0] * len(work), work, [size] * len(work), batch, even=even)
        if counts is None:
            return None
        built = []
        for p, line in enumerate(shape.lines):
            one = self._line(shape, p, line, counts[p], effort)
            if one is None:
                return None
            built.append(one)
        fills, beats = zip(*(rhythm for _, rhythm in built), strict=True)
        again = split_batch(fills, beats, [size] * len(work), batch, even=even)
        if again is not None and all(
            in_flight(self.schedule, 0, len(line), a) <= in_flight(self.schedule, 0, len(line), b)
            for line, a, b in zip(shape.lines, again, counts, strict=True)
        ):
            counts = again
        pipelines = tuple(Pipeline(stages, m, size) for (stages, _), m in zip(built, counts, strict=True))
        return Plan(pipelines, self.schedule, Sharding(shape.zero, shape.groups if shape.zero else "all"))

    def _line(
        self, shape: Shape, p: int, line: Line, count: int, effort: int
    ) -> tuple[tuple[Stage, ...], tuple[float, float]] | None:
        """The stages of a pipeline, and (fill, beat): m micro-batches take about fill + m · beat seconds."""
        layers = self.problem.model.num_layers
        if len(line) > layers:
            return None
        speed = [float(self._speed[list(seat.devices)].sum()) for seat in line]
        share = whole_parts(np.array(speed), layers)
        parts = []
        for k, seat in enumerate(line):
            held = in_flight(self.schedule, k, len(line), count)
            need = Need(int(share[k]), k == 0, k == len(line) - 1, held, self._shards(shape, p, seat))
            part = self._part(seat, shape.size, need, effort)
            if part is None:
                return None
            parts.append(part)
        dealt = dealt_layers([part.ways for part in parts], layers)
        if dealt is None:
            return None
        if not self.problem.space.uneven_layers and max(n for n, _ in dealt) - min(n for n, _ in dealt) > 1:
            return None
        stages, seconds, at = [], [], 0
        for part, (n, way) in zip(parts, dealt, strict=True):
            layout = part.ends if isinstance(part.ends, SequenceLayout) else None
            replicas = () if isinstance(part.ends, SequenceLayout) else (Replica(part.ends),)
            stages.append(Stage(replicas, ((at, at + n),), (way.policy,), layout))
            seconds.append(way.beside_s + n * way.layer_s)
            at += n
        return tuple(stages), (sum(seconds) - max(seconds), max(seconds))

    def _shards(self, shape: Shape, p: int, seat: Seat) -> Shards:
        """Over about how many devices the states of a seat are spread."""
        if not shape.zero:
            return Shards()

        def copies(seat: Seat) -> float:
            machine_of = self.problem.cluster.machine_of
            if seat.tensor:
                return 1.0
            if shape.groups == "machine":
                here = machine_of[list(seat.devices)].tolist()
                return float(min(here.count(m) for m in set(here)))
            return float(len(seat.devices))

        own = copies(seat)
        if shape.groups == "all":
            own += sum(sum(map(copies, line)) / len(line) for q, line in enumerate(shape.lines) if q != p)
        return Shards(shape.zero, own)

    def _part(self, seat: Seat, size: int, need: Need, effort: int) -> _Part | None:
        if seat.tensor:
            return self._tensor_part(seat, size, need)
        fitted = self.layouts.best(seat.devices, size, need, effort)
        return None if fitted is None else _Part(fitted.layout, self._ways(fitted, size, need))

    def _tensor_part(self, seat: Seat, size: int, need: Need) -> _Part:
        model, site = self.model, self.model.site(seat.devices)
        ways = []
        for policy in model.policies():
            layer_s = sum(model.layer_s(site, size, policy))
            beside_s = sum(model.stage_s(site, 0, need.first, need.last, size, policy))
            most = model.max_layers(site, need.first, need.last, size, policy, need.held, need.shards)
            ways.append(_Way(policy, layer_s, beside_s, most))
        return _Part(seat.devices, tuple(ways))

    def _ways(self, fitted: Fitted, size: int, need: Need) -> tuple[_Way, ...]:
        """The policies of a layout; only its own where it was made to fit that one."""
        stage = self.model.sequence_stage(fitted.layout, size)
        ways = []
        for policy in self.model.policies():
            bytes_of = [
                stage.memory.stage(((policy,) * n,), need.first, need.last, (need.held,), need.shards).sum(axis=0)
                for n in (1, 2)
            ]
            rooms = (stage.limit_bytes - bytes_of[0]) / (bytes_of[1] - bytes_of[0])
            most = 1 + int((rooms + 1e-9).min() // 1)
            if most < 1:
                continue
            layer_s = sum(stage.layer_s(policy))
            beside_s = sum(stage.stage_s((), need.first, need.last))
            ways.append(_Way(policy, layer_s, beside_s, most))
        return tuple(ways)


def dealt_layers(stages: Sequence[Sequence[_Way]], total: int) -> list[tuple[int, _Way]] | None:
    """Layers of each stage, at least one, and its policy, so that the slowest stage is as fast as may be; None where
    memory has no room for `total`."""
    if not all(stages):
        return None

    def most(seconds: float) -> list[int]:
        return [max(way.layers_in(seconds) for way in ways) for ways in stages]

    high = max(max(way.beside_s + total * way.layer_s for way in ways) for ways in stages)
    if min(most(high)) < 1 or sum(min(n, total) for n in most(high)) < total:
        return None
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        counts = most(middle)
        low, high = (low, middle) if min(counts) >= 1 and sum(counts) >= total else (middle, high)
    counts = most(high)
    while sum(counts) > total:
        # From the stage that this relieves most: the slowest.
        able = [k for k, n in enumerate(counts) if n > 1]
        k = max(able, key=lambda k: _fastest(stages[k], counts[k])[0])
        counts[k] -= 1
    return [(n, _fastest(ways, n)[1]) for ways, n in zip(stages, counts, strict=True)]


def _fastest(ways: Sequence[_Way], layers: int) -> tuple[float, _Way]:
    """Seconds of so many layers by the fastest policy that fits them."""
    return min(
        ((way.beside_s + layers * way.layer_s, way) for way in ways if layers <= way.most), key=lambda item: item[0]
    )
