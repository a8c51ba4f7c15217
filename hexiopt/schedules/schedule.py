"""What a pipeline schedule is: the order in which the stages of a pipeline run the operations of their micro-batches.

A schedule states this order once, as a `Programme` for every stage. All else follows from it: the operations one by
one (`operations`), what a stage has in flight (`in_flight.py`), and when it ends (`recurrence.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import ClassVar, NamedTuple

from hexiopt.schedules.operation import Operation, OperationKind, Turn

# What a stage runs in a step: blocks of turns, in order, and how often it runs each block. The micro-batches of each
# kind and layer range count up from 0.
Programme = tuple[tuple[tuple[Turn, ...], int], ...]
# The most micro-batches that each stage of a pipeline may have in flight [stages], where a plan states them; None: as
# many as the schedule gives it. Empty: that holds for all stages.
Depths = tuple[int | None, ...]


class StagePosition(NamedTuple):
    """Which stage of its pipeline a stage is, and what comes to it: all that its programme depends on."""

    stage: int
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1  # layer ranges of every stage
    depth: int | None = None  # of `Depths`

    @property
    def first(self) -> bool:
        """Whether the stage holds the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the stage holds the LM head."""
        return self.stage == self.num_stages - 1

    @property
    def num_after(self) -> int:
        """Stages after this one."""
        return self.num_stages - 1 - self.stage


@lru_cache(maxsize=4096)
def positions(
    num_stages: int, num_micro_batches: int, num_chunks: int = 1, depths: Depths = ()
) -> tuple[StagePosition, ...]:
    """The positions of all stages of a pipeline, in order; `num_chunks` layer ranges in every stage."""
    by_stage = enumerate(depths or (None,) * num_stages)
    return tuple([StagePosition(stage, num_stages, num_micro_batches, num_chunks, depth) for stage, depth in by_stage])


class BoundTerms(NamedTuple):
    """What holds for a stage in every pipeline of a class, whatever its times: the law that lower bounds rest on.

    *Latest return.* Between the forward of the first micro-batch through its last layer range and its first backward, a
    stage runs at most `forwards_ahead` forwards of a layer range more than the last stage does there. So the step takes
    at least J + M · t − forwards_ahead · f seconds: M micro-batches, t the forward and backward of one in the stage, f
    the forward of its longest layer range, and J the forward and backward of one layer range in each other stage, the
    last of those after it and the first of those before it.

    Where backwards may be `split`, t has the weight gradients, which follow the stage's first backward, and J has none.
    The stage may end with weight gradients, which the stages before do not wait for: of those J has the forward alone.

    *Least memory.* Before its first backward the stage holds so many micro-batches of each layer range at once, or all
    of them where the pipeline has fewer: `last_in_flight` of its last range, `in_flight` of the others, `first_again`
    more of the first.
    """

    forwards_ahead: int
    in_flight: int
    last_in_flight: int
    first_again: int = 0
    split: bool = False

    def with_micro_batches(self, count: int) -> "BoundTerms":
        """The same where the pipeline has so many micro-batches only."""
        return BoundTerms(
            self.forwards_ahead,
            min(self.in_flight, count),
            min(self.last_in_flight, count),
            max(0, min(self.first_again, count - self.in_flight)),
            self.split,
        )

    def weakest(self, other: "BoundTerms") -> "BoundTerms":
        """What holds under either of two schedules."""
        return BoundTerms(
            max(self.forwards_ahead, other.forwards_ahead),
            min(self.in_flight, other.in_flight),
            min(self.last_in_flight, other.last_in_flight),
            min(self.first_again, other.first_again),
            self.split or other.split,
        )


@dataclass(frozen=True)
class Schedule(ABC):
    """The order of operations of a pipeline. Schedules are values: equal ones order alike."""

    name: ClassVar[str]  # in files and on the command line
    chunked: ClassVar[bool] = False  # stages may hold several layer ranges
    lockstep: ClassVar[bool] = False  # pipelines may gather and scatter states in every micro-batch (ZeRO-2 and 3)
    # Whether `cycle_s` is `largest_cycle_mean_s` with one forward ahead: neighbours may divide the wait for a message
    # in any way, so that searches can choose the layers of the least period.
    shares_waits: ClassVar[bool] = False
    takes_depths: ClassVar[bool] = False  # programmes follow `StagePosition.depth`
    draw_weight: ClassVar[int] = 1  # how often random searches draw it, relative to others
    # In their order. Where there are WEIGHTS, no programme has them: they are placed by the rule of `split.py`.
    kinds: ClassVar[tuple[OperationKind, ...]] = (OperationKind.FORWARD, OperationKind.BACKWARD)

    @abstractmethod
    def programme(self, at: StagePosition) -> Programme:
        """What a stage runs, in order; the position must not break the rule of `broken_rule`."""

    def change_in_flight(self, kind: OperationKind) -> int:
        """By how many micro-batches an operation changes what its stage has in flight: the first kind stores their
        activations, the last one of programmes frees them."""
        return (kind is self.kinds[0]) - (kind is self.kinds[-2 if self.splits else -1])

    @property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return OperationKind.WEIGHTS in self.kinds

    def broken_rule(self, num_stages: int, num_chunks: int, num_micro_batches: int) -> str | None:
        """What a pipeline of this shape has that the schedule cannot run, with a remedy; None if it can run."""
        if num_chunks > 1 and not self.chunked:
            return f"several layer ranges a stage under {self.name}; take the interleaved schedule"
        return None

    def micro_batch_multiple(self, num_stages: int, num_chunks: int) -> int:
        """Of what a pipeline's number of micro-batches must be a multiple."""
        return 1

    def saturates_at(self, num_stages: int, num_chunks: int) -> int | None:
        """The number of micro-batches from which on more of them mean no more in flight in any stage. None: always
        more, as far as is known."""
        return None

    @property
    def saturates(self) -> bool:
        """Whether what stages have in flight is limited, however many micro-batches there are."""
        return self.saturates_at(1, 1) is not None

    def distinct_micro_batches(self, num_micro_batches: int, num_stages: int, num_chunks: int) -> int:
        """`num_micro_batches`, or fewer with which stages have as much in flight, for tables; they need not be a
        multiple of `micro_batch_multiple`."""
        return min(num_micro_batches, self.saturates_at(num_stages, num_chunks) or num_micro_batches)

    def plain(self) -> "Schedule":
        """The schedule that orders alike where stages hold one layer range each, and does so only."""
        return self

    def whole(self) -> "Schedule":
        """The schedule of the same forwards and backwards that does not split them."""
        return self

    @property
    def all_forwards_first(self) -> bool:
        """Whether a stage begins no backward before the last forward, however many micro-batches there are."""
        return math.isinf(forwards_ahead(self, 1, 1))

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms | None:
        """What holds for a stage with `num_after` others behind it, in all pipelines of at least `num_stages` stages.

        `num_chunks` is the number of layer ranges of a stage; what is said of two holds for more. None: nothing is
        proved.
        """
        return None

    @property
    def is_bounded(self) -> bool:
        """Whether lower bounds may speak of the schedule, and oracles where its backwards are whole."""
        return self.bound_terms(0, 1, 1) is not None

    def cycle_s(self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int) -> float:
        """About the seconds between micro-batches in the steady state, for searches.

        `stage_s`: forward and backward of a micro-batch in each stage [stages]; `round_trip_s`: both messages between
        a stage and the next [stages - 1]. Layer ranges are taken to be equal.
        """
        ahead = forwards_ahead(self, len(stage_s), num_chunks)
        if math.isinf(ahead):  # nothing waits for what comes back
            return max(*stage_s, *round_trip_s, 0.0)
        if num_chunks == 1:
            return largest_cycle_mean_s(stage_s, round_trip_s, ahead)
        return num_chunks * largest_cycle_mean_s([s / num_chunks for s in stage_s], round_trip_s, ahead)

    def fill_s(
        self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int, period_s: float
    ) -> float:
        """About the seconds that a step takes beyond M periods of `period_s`, M being its micro-batches, for searches;
        arguments as of `cycle_s`."""
        return max(0.0, (sum(stage_s) - period_s) / num_chunks + sum(round_trip_s))

    def __str__(self) -> str:
        return self.name


def weakest_terms(schedules: Sequence[Schedule], num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
    """What `Schedule.bound_terms` says of all `schedules`, which must be bounded."""
    all_terms = [schedule.bound_terms(num_after, num_stages, num_chunks) for schedule in schedules]
    proved = [terms for terms in all_terms if terms is not None]
    assert len(proved) == len(all_terms), "nothing is proved about one of the schedules"
    return reduce(BoundTerms.weakest, proved)


def largest_cycle_mean_s(stage_s: Sequence[float], round_trip_s: Sequence[float], ahead: float = 1) -> float:
    """The largest cycle mean of the event graph of a schedule that alternates forwards and backwards, in seconds.

    A cycle goes forward from stage i to j and back, through all stages and messages between. It takes `ahead` rounds
    for every stage that it moves on, and one for the last; see `forwards_ahead`.
    """
    p = len(stage_s)
    best = 0.0
    for i in range(p):
        length, rounds = 0.0, 1.0
        for j in range(i, p):
            length += stage_s[j]
            mean = length / rounds
            if mean > best:
                best = mean
            if j < p - 1:
                length += round_trip_s[j]
                rounds += ahead
    return best


@lru_cache(maxsize=65_536)
def forwards_before_backward(schedule: Schedule, at: StagePosition) -> int:
    """Forwards of a layer range each that a stage runs before its first backward."""
    count = 0
    for turns, repeats in schedule.programme(at):
        if repeats:
            forwards = next((k for k, turn in enumerate(turns) if turn.kind is OperationKind.BACKWARD), None)
            if forwards is not None:
                return count + forwards
            count += repeats * len(turns)
    return count


@lru_cache(maxsize=4096)
def forwards_ahead(schedule: Schedule, num_stages: int, num_chunks: int) -> float:
    """Forwards of a layer range that a stage has run more than the next one, at most, when each begins its first
    backward; at least 1, and infinite where all forwards come first.

    With many micro-batches: one in 1F1B, two in interleaved 1F1B, no limit in GPipe.
    """
    enough = 4 * num_stages * num_chunks
    run = [forwards_before_backward(schedule, at) for at in positions(num_stages, enough, num_chunks)]
    return math.inf if run[-1] >= enough else max([1, *(a - b for a, b in pairwise(run))])


def stage_orders(schedule: Schedule, places: Sequence[StagePosition]) -> tuple[tuple[Operation, ...], ...]:
    """The `operations` of stages [stages]."""
    return tuple([tuple(operations(schedule, at)) for at in places])


def operations(schedule: Schedule, at: StagePosition) -> list[Operation]:
    """All operations of a stage's programme, in order."""
    begun: dict[Turn, int] = {}
    in_order = []
    for turns, repeats in schedule.programme(at):
        for turn in turns * repeats:
            number = begun[turn] = begun.get(turn, -1) + 1
            in_order.append(Operation(turn.kind, turn.chunk, number))
    return in_order
