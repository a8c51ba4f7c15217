"""The best sequence stage on given devices: frames by their floors, each solved by its program, priced and cut.

A program's choice is priced by the cost model. Where its heads are free and the price is higher than the program's
time, these heads are solved on their own, in all alignments, with the rings that they make; then they are cut off, and
the program is asked again, until it has nothing below the best price.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hexiopt.cost.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.plan import SequenceLayout
from solvers.sequence.exact.floors import Floors
from solvers.sequence.exact.frames import Frame, alignments, group_orders
from solvers.sequence.exact.grid import Grid
from solvers.sequence.exact.program import Choice, Need, Program

AGREEMENT = 1e-6  # of a price, by which the program's time may fall behind it
_EFFORT_S = 20.0  # most deterministic seconds of one program
_SLOWEST = 1e3  # times equal shards: slower stages are not looked for


@dataclass(frozen=True)
class Work:
    """What a stage works on: micro-batches of `size` sequences, `held` in flight; ZeRO stage and over how many devices
    each of its devices spreads its states; recompute policies to choose from; by how many resources are shared."""

    size: int
    held: int
    zero: int
    holders: tuple[int, ...]
    policies: tuple[str, ...]
    sharers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Best:
    """No stage on the devices takes less than `bound_s`; one that takes `seconds`, where one is known."""

    bound_s: float
    layout: SequenceLayout | None = None
    policy: str = "none"
    seconds: float = float("inf")

    @property
    def is_exact(self) -> bool:
        """Whether there is nothing better."""
        return self.layout is not None and self.seconds <= self.bound_s * (1 + 2 * AGREEMENT)


class Stages:
    """Stages of one problem at one resolution. `step` counts programs, `left_s` says how much time there is."""

    def __init__(
        self,
        model: CostModel,
        resolution: int,
        go_on: Callable[[], bool],
        step: Callable[[], None],
        left_s: Callable[[], float],
    ) -> None:
        self._model, self._problem, self._resolution = model, model.problem, resolution
        self._go_on, self._step, self._left_s = go_on, step, left_s
        self._grids: dict[int, tuple[Grid, Floors]] = {}
        self._frames: dict[tuple[object, ...], list[tuple[float, Frame]]] = {}

    def floor_s(self, devices: Sequence[int], size: int) -> float:
        """Seconds that every stage on `devices` takes, quickly."""
        return self._tables(size)[1].of_devices(devices)

    def best(self, devices: tuple[int, ...], work: Work, limit_s: float) -> Best:
        """The best stage on all of `devices` that takes less than `limit_s` (infinite: any); if there is none, or time
        runs out, a bound of it."""
        frames = self._ranked(devices, work)
        if not frames:
            return Best(float("inf"))
        found, limited = self._equal(frames, work), limit_s < float("inf")
        if found.seconds >= limit_s:
            found = Best(limit_s)
        elif found.layout is not None:
            limit_s = found.seconds
        if limit_s == float("inf"):
            limit_s = _SLOWEST * max(
                self._priced(f, self._equal_choice(f), work)[0] for _, f in frames[:1] + frames[-1:]
            )
        for floor_s, plain in frames:
            if floor_s >= limit_s:
                break
            for policy in work.policies:
                frame = replace(plain, policy=policy)
                if self._tables(work.size)[1].of_frame(frame) >= limit_s:
                    continue
                better, done = self._solved(frame, work, limit_s)
                if better is not None:
                    found, limit_s = better, better.seconds
                if not done:
                    return replace(found, bound_s=min(floor_s, limit_s))
        if found.layout is None and not limited:
            return Best(float("inf"))
        return replace(found, bound_s=limit_s * (1 - AGREEMENT))

    # ---------------------------------------------------------------- frames

    def _tables(self, size: int) -> tuple[Grid, Floors]:
        found = self._grids.get(size)
        if found is None:
            grid = Grid(self._problem, self._model.framework, self._resolution, size)
            found = self._grids[size] = grid, Floors(grid)
        return found

    def _ranked(self, devices: tuple[int, ...], work: Work) -> list[tuple[float, Frame]]:
        """All frames by their floors, under the first policy, which repeats least."""
        key = (devices, work.size, work.policies[0])
        found = self._frames.get(key)
        if found is None:
            grid, floors = self._tables(work.size)
            rows = []
            for groups in group_orders(self._problem, devices, self._problem.model.num_heads):
                # In a single group order says nothing; quanta of an odd number of tokens have no equal halves.
                orders = ("contiguous",) if len(groups) == 1 or grid.quantum % 2 else ("contiguous", "zigzag")
                for order in orders:
                    frame = Frame(groups, order, work.policies[0])
                    rows.append((floors.of_frame(frame), frame))
            found = self._frames[key] = sorted(rows, key=lambda row: row[0])
        return found

    def _equal_choice(self, frame: Frame) -> Choice:
        """Quanta and heads as equal as they go."""
        count, heads = len(frame.devices), self._problem.model.num_heads
        quanta = tuple(self._resolution // count + (k < self._resolution % count) for k in range(count))
        shares = tuple(heads // len(own) + (k < heads % len(own)) for own in frame.groups for k in range(len(own)))
        return Choice(quanta, shares, 0.0)

    def _equal(self, frames: Sequence[tuple[float, Frame]], work: Work) -> Best:
        """The best of equal shards."""
        found = Best(0.0)
        for floor_s, frame in frames:
            if floor_s >= found.seconds or not self._go_on():
                break
            choice = self._equal_choice(frame)
            for policy in work.policies:
                seconds, fits = self._priced(replace(frame, policy=policy), choice, work)
                if fits:
                    if seconds < found.seconds:
                        found = Best(0.0, self._layout(frame, choice), policy, seconds)
                    break
        return found

    # ---------------------------------------------------------------- one frame

    def _solved(self, frame: Frame, work: Work, limit_s: float) -> tuple[Best | None, bool]:
        """The best of a frame that takes less than `limit_s`; and whether all of the frame was looked at."""
        grid = self._tables(work.size)[0]
        need = self._need(frame, work)
        program, best = Program(grid, frame, need, limit_s), None
        while True:
            if not self._go_on():
                return best, False
            self._step()
            choice, proven = program.least(self._left_s(), _EFFORT_S)
            if choice is None:
                return best, proven
            met = self._met(frame, choice, work)
            if met is not None and met.seconds < limit_s:
                best, limit_s = met, met.seconds
                if proven and met.seconds <= choice.seconds * (1 + AGREEMENT):
                    return best, True
                program.below(limit_s)
            for groups, heads in alignments(self._problem, frame.groups, choice.heads):
                own, done = self._solved_heads(replace(frame, groups=groups), heads, work, limit_s)
                if own is not None:
                    best, limit_s = own, own.seconds
                    program.below(limit_s)
                if not done:
                    return best, False
            program.refute_heads(choice.heads)

    def _met(self, frame: Frame, choice: Choice, work: Work) -> Best | None:
        """The choice in the alignment of its heads that costs least, of those that fit."""
        best: Best | None = None
        held = dict(zip(frame.devices, zip(choice.quanta, choice.heads, strict=True), strict=True))
        for groups, heads in alignments(self._problem, frame.groups, choice.heads):
            turned = replace(frame, groups=groups)
            own = Choice(tuple(held[d][0] for d in turned.devices), heads, 0.0)
            seconds, fits = self._priced(turned, own, work)
            if fits and (best is None or seconds < best.seconds):
                best = Best(0.0, self._layout(turned, own), frame.policy, seconds)
        return best

    def _solved_heads(
        self, frame: Frame, heads: tuple[int, ...], work: Work, limit_s: float
    ) -> tuple[Best | None, bool]:
        """As `_solved`, with given heads."""
        program, best = Program(self._tables(work.size)[0], frame, self._need(frame, work), limit_s, heads), None
        while self._go_on():
            self._step()
            choice, proven = program.least(self._left_s(), _EFFORT_S)
            if choice is None:
                return best, proven
            seconds, fits = self._priced(frame, choice, work)
            if fits and seconds < limit_s:
                best, limit_s = Best(0.0, self._layout(frame, choice), frame.policy, seconds), seconds
                if proven:
                    assert seconds <= choice.seconds * (1 + AGREEMENT), "the program is the cost model"
                    return best, True
            program.refute(choice.quanta)
        return best, False

    # ---------------------------------------------------------------- prices

    def _layout(self, frame: Frame, choice: Choice) -> SequenceLayout:
        quantum = self._problem.workload.seq_len // self._resolution
        return frame.layout([quantum * n for n in choice.quanta], choice.heads)

    def _need(self, frame: Frame, work: Work) -> Need:
        alone = self._model.sequence_stage(self._layout(frame, self._equal_choice(frame)), work.size).alone
        layers = self._problem.model.num_layers
        holders = dict(zip(sorted(frame.devices), work.holders, strict=True))
        states = tuple((d, sum(alone.states(layers, True, True, Shards(work.zero, n)))) for d, n in holders.items())
        return Need(work.held, states, work.sharers)

    def _priced(self, frame: Frame, choice: Choice, work: Work) -> tuple[float, bool]:
        """Forward and backward seconds, and whether every device has room."""
        layout, policies = self._layout(frame, choice), (frame.policy,) * self._problem.model.num_layers
        stage = self._model.sequence_stage(layout, work.size, dict(work.sharers))
        return sum(stage.stage_s(policies, True, True)), self.fits(layout, frame.policy, work)

    def fits(self, layout: SequenceLayout, policy: str, work: Work) -> bool:
        """Whether every device of a layout has room."""
        stage = self._model.sequence_stage(layout, work.size, dict(work.sharers))
        policies = (policy,) * self._problem.model.num_layers
        holders = dict(zip(sorted(layout.devices), work.holders, strict=True))
        for n in set(work.holders):
            totals = stage.memory.stage((policies,), True, True, (work.held,), Shards(work.zero, n)).sum(axis=0)
            for d, room in zip(layout.devices, (stage.limit_bytes - totals).tolist(), strict=True):
                if holders[d] == n and room < 0.0:
                    return False
        return True
