"""A step as lists of actions: for every stage all that it computes, sends, receives and reduces, in one order.

`lowered` walks all stages together through time, as `_add_send_recv` of torch.distributed.pipelining walks them in
turns. When an operation ends, it enters its stage's list, and at the same moment its message enters the lists of sender
and receiver, and each reduction of gradients that waited for nothing else those of all who take part. So the lists are
parts of one global order, and end even where each rank has a single queue for all that it communicates and its host
waits for everything after every action: whatever is first in that order, of all that is left, is next for everyone who
takes part in it.

A receive stands before the operation during which its message is made, so that the message can come while that runs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from hexiopt.errors import InputError
from hexiopt.schedules.schedule import OperationKind, Schedule, StagePosition, operations


class ActionKind(Enum):
    """What a stage does next for a micro-batch. The values are torch's names (torch.distributed.pipelining)."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    __hash__ = object.__hash__  # as of OperationKind


_KIND_OF = {OperationKind.FORWARD: ActionKind.FORWARD, OperationKind.BACKWARD: ActionKind.BACKWARD}
_MESSAGE = {  # of what is computed: sent, received, and by how many virtual stages on
    ActionKind.FORWARD: (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD, 1),
    ActionKind.BACKWARD: (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD, -1),
}


class Action(NamedTuple):
    """Virtual stage, kind, and micro-batch, written as torch does: `1F0`, `0SEND_F2`.

    A backward may be cut in parts, from the head to the embedding; without a `part` it is whole.
    """

    stage: int
    kind: ActionKind
    micro_batch: int
    part: int | None = None

    @property
    def backward(self) -> bool:
        """Whether gradients are computed, or travel."""
        return self.kind.value.endswith("B")

    @property
    def input(self) -> "Action":
        """The receive of what a forward or backward needs, if its virtual stage is not the first or the last."""
        return Action(self.stage, _MESSAGE[self.kind][1], self.micro_batch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}" + ("" if self.part is None else f".{self.part}")


class Reduction(NamedTuple):
    """A collective that sums gradients: the one of that number."""

    number: int


class LastBackward(NamedTuple):
    """A part of the last backward through a layer range (`chunk`) of a stage of a pipeline. Whole ones have part 0."""

    pipeline: int
    stage: int
    chunk: int
    part: int = 0


ActionList = tuple[Action | Reduction, ...]


@dataclass(frozen=True)
class StepShape:
    """A pipeline's step. `chunk_s` has the seconds of a forward and a backward of each layer range [stages][chunks],
    `message_s` those of a message: they only decide which of several possible orders the lists have. `last_parts`: in
    how many parts the last backward of each is cut [stages][chunks]."""

    schedule: Schedule
    num_micro_batches: int
    chunk_s: tuple[tuple[tuple[float, float], ...], ...]
    message_s: float
    last_parts: tuple[tuple[int, ...], ...]

    @staticmethod
    def even(schedule: Schedule, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> "StepShape":
        """Of a balanced pipeline, whose step takes a second but for its bubble: backwards take twice as long as
        forwards, messages half as long."""
        each_s = 1 / (3 * num_chunks * num_micro_batches)
        chunk_s = (((each_s, 2 * each_s),) * num_chunks,) * num_stages
        return StepShape(schedule, num_micro_batches, chunk_s, each_s / 2, ((1,) * num_chunks,) * num_stages)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.chunk_s)

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage."""
        return len(self.chunk_s[0])


def lowered(
    pipelines: Sequence[StepShape], reductions: Sequence[frozenset[LastBackward]] = ()
) -> tuple[tuple[ActionList, ...], ...]:
    """The list of every stage [pipelines][stages].

    Each of the `reductions` has the parts of last backwards that it waits for; the stages of these take part. Raises
    InputError where operations wait for each other for ever.
    """
    walk = _Walk(pipelines, reductions)
    walk.run()
    return tuple(tuple(tuple(stage.done) for stage in stages) for stages in walk.stages)


@dataclass(eq=False)
class _Stage:
    """A stage on its way: what it has yet to compute, and its list so far."""

    pipeline: int
    number: int
    shape: StepShape
    todo: deque[Action]
    running: bool = False
    done: list[Action | Reduction] = field(default_factory=list)
    came: set[Action] = field(default_factory=set)

    def is_last_part(self, action: Action) -> bool:
        """Whether a forward or a backward ends with it."""
        return action.part is None or action.part + 1 == self.shape.last_parts[self.number][self.chunk(action)]

    def chunk(self, action: Action) -> int:
        """Which of the stage's layer ranges it computes."""
        return action.stage // self.shape.num_stages

    def seconds(self, action: Action) -> float:
        """How long it takes."""
        whole_s = self.shape.chunk_s[self.number][self.chunk(action)][action.backward]
        return whole_s if action.part is None else whole_s / self.shape.last_parts[self.number][self.chunk(action)]


def _computes(shape: StepShape, stage: int) -> deque[Action]:
    found = deque[Action]()
    at = StagePosition(stage, shape.num_stages, shape.num_micro_batches, shape.num_chunks)
    for kind, chunk, micro_batch in operations(shape.schedule, at):
        action = Action(chunk * shape.num_stages + stage, _KIND_OF[kind], micro_batch)
        parts = shape.last_parts[stage][chunk]
        if action.backward and micro_batch == shape.num_micro_batches - 1 and parts > 1:
            found += [action._replace(part=part) for part in range(parts)]
        else:
            found.append(action)
    return found


class _Walk:
    def __init__(self, pipelines: Sequence[StepShape], reductions: Sequence[frozenset[LastBackward]]) -> None:
        self.stages = [
            [_Stage(p, s, shape, _computes(shape, s)) for s in range(shape.num_stages)]
            for p, shape in enumerate(pipelines)
        ]
        # When what happens at which stage of which pipeline: a message comes, or (None) an operation ends.
        self._events: list[tuple[float, int, int, int, Action | None]] = []
        self._count = 0
        self._reductions = reductions
        self._missing = [len(parts) for parts in reductions]
        self._waiting: dict[LastBackward, list[int]] = {}
        for number, parts in enumerate(reductions):
            for part in parts:
                self._waiting.setdefault(part, []).append(number)

    def run(self) -> None:
        for stages in self.stages:
            for stage in stages:
                self._begin(stage, 0.0)
        while self._events:
            now_s, pipeline, number, _, came = heappop(self._events)
            stage = self.stages[pipeline][number]
            if came is None:
                self._end(stage, now_s)
            else:
                stage.came.add(came)
            self._begin(stage, now_s)
        for stages in self.stages:
            for stage in stages:
                if stage.todo:
                    raise InputError(
                        f"schedule {stage.shape.schedule}: operations wait for each other for ever: stage "
                        f"{stage.number} for the input of {stage.todo[0]}; run what they wait for before"
                    )
        assert not any(self._missing), "a reduction waits for a backward that there is not"

    def _begin(self, stage: _Stage, now_s: float) -> None:
        """Start the stage's next operation if it is free, and the input is there."""
        if stage.running or not stage.todo:
            return
        action, shape = stage.todo[0], stage.shape
        source = action.stage - _MESSAGE[action.kind][2]
        waits = action.part in (None, 0) and 0 <= source < shape.num_stages * shape.num_chunks
        if waits and action.input not in stage.came:
            return
        stage.running = True
        self._at(now_s + stage.seconds(action), stage, None)

    def _at(self, time_s: float, stage: _Stage, came: Action | None) -> None:
        self._count += 1
        heappush(self._events, (time_s, stage.pipeline, stage.number, self._count, came))

    def _end(self, stage: _Stage, now_s: float) -> None:
        action = stage.todo.popleft()
        stage.running = False
        stage.done.append(action)
        if stage.is_last_part(action):
            self._pass_on(stage, action, now_s)
        if action.backward and action.micro_batch == stage.shape.num_micro_batches - 1:
            self._reduce(LastBackward(stage.pipeline, stage.number, stage.chunk(action), action.part or 0))

    def _pass_on(self, stage: _Stage, action: Action, now_s: float) -> None:
        """Put what has been computed into the lists of who sends and who receives it."""
        shape, (sent, received, step) = stage.shape, _MESSAGE[action.kind]
        target = action.stage + step
        if 0 <= target < shape.num_stages * shape.num_chunks:
            stage.done.append(Action(action.stage, sent, action.micro_batch))
            receiver = self.stages[stage.pipeline][target % shape.num_stages]
            came = Action(target, received, action.micro_batch)
            receiver.done.append(came)
            self._at(now_s + shape.message_s, receiver, came)

    def _reduce(self, part: LastBackward) -> None:
        for number in self._waiting.get(part, ()):
            self._missing[number] -= 1
            if not self._missing[number]:
                for pipeline, stage in sorted({(p, s) for p, s, _, _ in self._reductions[number]}):
                    self.stages[pipeline][stage].done.append(Reduction(number))
