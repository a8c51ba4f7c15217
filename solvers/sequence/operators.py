"""Random neighbours of shapes: devices, machines, stages and pipelines put together otherwise."""

import random
from collections.abc import Sequence
from dataclasses import replace

from hexiopt.problem.problem import Problem
from solvers.core.zero import sharding_groups
from solvers.sequence.shapes import Line, Seat, Shape, with_sharding, zero_stages

_TRIES = 20


class Moves:
    """Moves within one problem's plan space."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._machine_of = problem.cluster.machine_of.tolist()

    def neighbour(self, shape: Shape, rng: random.Random) -> Shape | None:
        """A shape one move away; None where none was found."""
        moves = (
            self._some_to_another,
            self._some_to_another,
            self._swapped,
            self._stages_joined,
            self._stage_parted,
            self._stages_exchanged,
            self._lines_joined,
            self._line_parted,
            self._resized,
            self._left_out,
            self._taken_in,
        )
        for _ in range(_TRIES):
            moved = rng.choice(moves)(shape, rng)
            found = None if moved is None else with_sharding(self._problem, moved)
            if found is not None and found != shape and self._allowed(found):
                return found
        return None

    def _allowed(self, shape: Shape) -> bool:
        space, workload = self._problem.space, self._problem.workload
        lines, stages = len(shape.lines), {len(line) for line in shape.lines}
        return (
            lines * shape.size <= workload.global_batch
            and space.num_pipelines in (None, lines)
            and (space.num_stages is None or stages == {space.num_stages})
            and max(stages) <= self._problem.model.num_layers
            and all(seat for line in shape.lines for seat in line)
        )

    # ---------------------------------------------------------------- devices

    def _part(self, seat: Seat, rng: random.Random) -> Seat:
        """Some devices of a stage: those of a machine, half of these, or one."""
        machine = self._machine_of[rng.choice(seat)]
        own = tuple(d for d in seat if self._machine_of[d] == machine)
        return own[: rng.choice((len(own), max(1, len(own) // 2), 1))]

    def _some_to_another(self, shape: Shape, rng: random.Random) -> Shape | None:
        (p, k), (q, j) = _places(shape, rng), _places(shape, rng)
        moved = self._part(shape.lines[p][k], rng)
        if (p, k) == (q, j) or len(moved) == len(shape.lines[p][k]):
            return None
        return _exchanged(shape, (p, k), moved, (q, j), ())

    def _swapped(self, shape: Shape, rng: random.Random) -> Shape | None:
        (p, k), (q, j) = _places(shape, rng), _places(shape, rng)
        if (p, k) == (q, j):
            return None
        return _exchanged(shape, (p, k), self._part(shape.lines[p][k], rng), (q, j), self._part(shape.lines[q][j], rng))

    def _left_out(self, shape: Shape, rng: random.Random) -> Shape | None:
        p, k = _places(shape, rng)
        seat = shape.lines[p][k]
        out = set(self._part(seat, rng))
        return _with(shape, p, k, tuple(d for d in seat if d not in out))

    def _taken_in(self, shape: Shape, rng: random.Random) -> Shape | None:
        used = {d for line in shape.lines for seat in line for d in seat}
        free = tuple(d for d in self._problem.usable_devices if d not in used)
        if not free:
            return None
        p, k = _places(shape, rng)
        return _with(shape, p, k, (*shape.lines[p][k], *self._part(free, rng)))

    # ---------------------------------------------------------------- stages

    def _stages_joined(self, shape: Shape, rng: random.Random) -> Shape | None:
        p = rng.randrange(len(shape.lines))
        line = shape.lines[p]
        if len(line) < 2:
            return None
        k = rng.randrange(len(line) - 1)
        return shape.with_line(p, (*line[:k], _seat(line[k] + line[k + 1]), *line[k + 2 :]))

    def _stage_parted(self, shape: Shape, rng: random.Random) -> Shape | None:
        p, k = _places(shape, rng)
        line = shape.lines[p]
        parts = self._parts(line[k], rng)
        return None if parts is None else shape.with_line(p, (*line[:k], *parts, *line[k + 1 :]))

    def _parts(self, seat: Seat, rng: random.Random) -> tuple[Seat, Seat] | None:
        """Two stages of one: cut between machines, or by half."""
        if len(seat) < 2:
            return None
        machines = list(dict.fromkeys(self._machine_of[d] for d in seat))
        if len(machines) > 1:
            rng.shuffle(machines)
            first = set(machines[: rng.randint(1, len(machines) - 1)])
            parts = tuple(d for d in seat if self._machine_of[d] in first)
        else:
            parts = seat[: len(seat) // 2]
        return parts, tuple(d for d in seat if d not in set(parts))

    def _stages_exchanged(self, shape: Shape, rng: random.Random) -> Shape | None:
        p = rng.randrange(len(shape.lines))
        line = list(shape.lines[p])
        if len(line) < 2:
            return None
        a, b = rng.sample(range(len(line)), 2)
        line[a], line[b] = line[b], line[a]
        return shape.with_line(p, tuple(line))

    # ---------------------------------------------------------------- pipelines

    def _lines_joined(self, shape: Shape, rng: random.Random) -> Shape | None:
        if len(shape.lines) < 2:
            return None
        p, q = sorted(rng.sample(range(len(shape.lines)), 2))
        one, two = shape.lines[p], shape.lines[q]
        if len(one) == len(two) and rng.random() < 0.5:
            joined: Line = tuple(_seat(a + b) for a, b in zip(one, two, strict=True))
        else:
            joined = one + two
        return shape.with_line(q).with_line(p, joined)

    def _line_parted(self, shape: Shape, rng: random.Random) -> Shape | None:
        p = rng.randrange(len(shape.lines))
        line = shape.lines[p]
        if len(line) > 1 and rng.random() < 0.5:
            k = rng.randint(1, len(line) - 1)
            return shape.with_line(p, line[:k], line[k:])
        pairs = [self._parts(seat, rng) for seat in line]
        if None in pairs:
            return None
        return shape.with_line(p, tuple(a for a, _ in filter(None, pairs)), tuple(b for _, b in filter(None, pairs)))

    def _resized(self, shape: Shape, rng: random.Random) -> Shape | None:
        problem = self._problem
        if rng.random() < 0.5:
            return replace(shape, size=rng.choice(problem.space.micro_batch_sizes(problem.workload.global_batch)))
        zero = rng.choice(zero_stages(problem, shape))
        return replace(shape, zero=zero, groups=rng.choice(sharding_groups(problem, zero)))


def _places(shape: Shape, rng: random.Random) -> tuple[int, int]:
    p = rng.randrange(len(shape.lines))
    return p, rng.randrange(len(shape.lines[p]))


def _seat(devices: Sequence[int]) -> Seat:
    return tuple(sorted(devices))


def _with(shape: Shape, p: int, k: int, devices: Sequence[int]) -> Shape:
    line = shape.lines[p]
    return shape.with_line(p, (*line[:k], _seat(devices), *line[k + 1 :]))


def _exchanged(shape: Shape, a: tuple[int, int], given: Seat, b: tuple[int, int], got: Seat) -> Shape:
    out, back = set(given), set(got)
    one = [d for d in shape.lines[a[0]][a[1]] if d not in out]
    two = [d for d in shape.lines[b[0]][b[1]] if d not in back]
    return _with(_with(shape, *a, (*one, *got)), *b, (*two, *given))
