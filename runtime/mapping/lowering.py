"""A step as lists of actions: for every stage all that it computes, sends, receives and reduces, in one order.

`lower` walks all stages together through time, as `_add_send_recv` of torch.distributed.pipelining walks them in
turns. When an operation ends, it enters its stage's list, and at the same moment its message enters the lists of sender
and receiver, and each reduction of gradients that waited for nothing else those of all who take part. So the lists are
parts of one global order, and end even where each rank has a single queue for all that it communicates and its host
waits for everything after every action: whatever is first in that order, of all that is left, is next for everyone who
takes part in it.

A receive stands before the operation during which its message is made, so that the message can come while that runs.

Stages *in lockstep* share the weights or gradients of their units (embedding, layers, LM head), as under ZeRO-2 and 3:
they run each part of an operation together, a unit a part. The weights of a unit are gathered one part before it is
run, and its gradients are scattered after its backward, while the next part runs. At any moment a stage holds the
weights of at most two units whole.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from hexiopt.cost.sharing import StageOrders
from hexiopt.errors import InputError
from hexiopt.schedules.operation import Operation, OperationKind
from hexiopt.schedules.schedule import Depths, Schedule, operations, positions


class ActionKind(Enum):
    """What a stage does next for a micro-batch. The values are torch's names (torch.distributed.pipelining)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHTS = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    __hash__ = object.__hash__  # as of OperationKind


_KIND_OF = {
    OperationKind.FORWARD: ActionKind.FORWARD,
    OperationKind.BACKWARD: ActionKind.BACKWARD,
    OperationKind.WEIGHTS: ActionKind.WEIGHTS,
}
COMPUTED = {*_KIND_OF.values(), ActionKind.INPUT}
"""What a stage computes; all else is sent or received."""
_MESSAGE = {  # of what is computed: sent, received, and by how many virtual stages on
    ActionKind.FORWARD: (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD, 1),
    ActionKind.BACKWARD: (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD, -1),
    ActionKind.INPUT: (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD, -1),
}


class Action(NamedTuple):
    """Virtual stage, kind, and micro-batch, written as torch does: `1F0`, `0SEND_F2`.

    A backward may be cut in parts, from the head to the embedding, a forward from the embedding to the head; without a
    `part` it is whole. One that puts off gradients of weights is an INPUT, followed by WEIGHTS, of which each part is a
    layer, from the last one on.
    """

    stage: int
    kind: ActionKind
    micro_batch: int
    part: int | None = None

    @property
    def backward(self) -> bool:
        """Whether gradients are computed, or travel."""
        return self.kind.value.endswith(("B", "I", "W"))

    @property
    def input(self) -> "Action":
        """The receive of what a forward or backward needs, if its virtual stage is not the first or the last."""
        return Action(self.stage, _MESSAGE[self.kind][1], self.micro_batch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}" + ("" if self.part is None else f".{self.part}")


class Reduction(NamedTuple):
    """A collective that sums gradients: the one of that number."""

    number: int


class UnitCollective(NamedTuple):
    """What stages in lockstep do together for the unit of a part of a forward or backward: gather the weights that it
    needs, or, if it `scatters`, scatter the gradients that it has made."""

    scatters: bool
    part: Action

    def __str__(self) -> str:
        return f"{'scatter of gradients of' if self.scatters else 'gather of weights for'} {self.part}"


class LastBackward(NamedTuple):
    """A part of the last backward through a layer range (`chunk`) of a stage of a pipeline. Whole ones have part 0."""

    pipeline: int
    stage: int
    chunk: int
    part: int = 0


class Lockstep(NamedTuple):
    """Stages (pipeline, stage) that run every part of a backward together and scatter its gradients; with `gathers`,
    also every part of a forward, and gather weights for each."""

    stages: frozenset[tuple[int, int]]
    gathers: bool


ActionList = tuple[Action | Reduction | UnitCollective, ...]


@dataclass(frozen=True)
class StepShape:
    """A pipeline's step. `chunk_s` has the seconds of a forward and a backward of each layer range [stages][chunks],
    `message_s` those of a message from each stage to the next and to the one before [stages]: they only decide which of
    several possible orders the lists have. `last_parts`: in
    how many parts the last backward of each is cut [stages][chunks], and of stages in lockstep every operation.

    Where backwards are split, `orders` [stages] has what each stage runs, and `late_parts` [stages][chunks] the part of
    a backward that each layer put off would belong to. `depths` are the micro-batches in flight that stages state.
    """

    schedule: Schedule
    num_micro_batches: int
    chunk_s: tuple[tuple[tuple[float, ...], ...], ...]
    message_s: tuple[tuple[float, float], ...]
    last_parts: tuple[tuple[int, ...], ...]
    orders: StageOrders = ()
    late_parts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    depths: Depths = ()

    @staticmethod
    def even(schedule: Schedule, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> "StepShape":
        """Of a balanced pipeline, whose step takes a second but for its bubble: backwards take twice as long as
        forwards, messages half as long."""
        each_s = 1 / (3 * num_chunks * num_micro_batches)
        kinds_s = (each_s, each_s, each_s) if schedule.splits else (each_s, 2 * each_s)
        chunk_s = ((kinds_s,) * num_chunks,) * num_stages
        message_s = ((each_s / 2, each_s / 2),) * num_stages
        return StepShape(schedule, num_micro_batches, chunk_s, message_s, ((1,) * num_chunks,) * num_stages)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.chunk_s)

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage."""
        return len(self.chunk_s[0])


def lower(
    pipelines: Sequence[StepShape],
    reductions: Sequence[frozenset[LastBackward]] = (),
    lockstep: Sequence[Lockstep] = (),
) -> tuple[tuple[ActionList, ...], ...]:
    """The list of every stage [pipelines][stages].

    Each of the `reductions` has the parts of last backwards that it waits for; the stages of these take part. Of
    `lockstep`, each stage is in one at most. Raises InputError where operations wait for each other for ever, and where
    stages in lockstep run different ones.
    """
    walk = _Walk(pipelines, reductions, lockstep)
    walk.run()
    return tuple(tuple(tuple(stage.done) for stage in stages) for stages in walk.stages)


@dataclass(eq=False)
class _Stage:
    """A stage on its way: its list so far, and what has come to it."""

    pipeline: int
    number: int
    shape: StepShape
    done: list[Action | Reduction | UnitCollective] = field(default_factory=list)
    came: set[Action] = field(default_factory=set)

    def parts(self, action: Action) -> int:
        """In how many parts a forward or a backward is cut, if it is."""
        return self.shape.last_parts[self.number][self.chunk(action)]

    def chunk(self, action: Action) -> int:
        """Which of the stage's layer ranges it computes."""
        return action.stage // self.shape.num_stages

    def seconds(self, action: Action) -> float:
        """How long it takes."""
        chunk_s = self.shape.chunk_s[self.number][self.chunk(action)]
        if action.kind is ActionKind.WEIGHTS:
            return chunk_s[-1] / len(self._late(action))
        whole_s = chunk_s[action.backward]
        return whole_s if action.part is None else whole_s / self.parts(action)

    def _late(self, action: Action) -> tuple[int, ...]:
        return self.shape.late_parts[self.number][self.chunk(action)]

    def complete_parts(self, action: Action) -> list[int]:
        """The parts of a backward all of whose gradients are made when it ends."""
        match action.kind:
            case ActionKind.INPUT:
                return [part for part in range(self.parts(action)) if part not in self._late(action)]
            case ActionKind.WEIGHTS:
                _, *after = self._late(action)[action.part or 0 :]
                part = self._late(action)[action.part or 0]
                return [] if part in after else [part]
            case _:
                return [action.part or 0]

    def lacks_input(self, action: Action) -> bool:
        """Whether what it begins with has not come yet."""
        if action.kind is ActionKind.WEIGHTS:
            return False
        source, shape = action.stage - _MESSAGE[action.kind][2], self.shape
        is_sent = action.part in (None, 0) and 0 <= source < shape.num_stages * shape.num_chunks
        return is_sent and action.input not in self.came


@dataclass(eq=False)
class _Crew:
    """Stages that run each operation together, and what they have yet to compute. Most are of one stage."""

    stages: list[_Stage]
    todo: deque[Action]
    lockstep: Lockstep | None
    running: bool = False

    def is_last_part(self, action: Action) -> bool:
        """Whether a forward or a backward ends with it."""
        return action.part is None or action.part + 1 == self.stages[0].parts(action)

    def put(self, entry: Action | Reduction | UnitCollective) -> None:
        """Put it into the lists of all."""
        for stage in self.stages:
            stage.done.append(entry)

    def gather(self, action: Action) -> None:
        """Gather the weights of the part after this one; of a first part, its own before."""
        parts = 1 if action.part is None else self.stages[0].parts(action)
        first = action.part or 0
        for part in range(first + (first > 0), min(first + 2, parts)):
            self.put(UnitCollective(False, action if parts == 1 else action._replace(part=part)))


def _computes(shape: StepShape, stage: int, lockstep: Lockstep | None) -> deque[Action]:
    actions = deque[Action]()
    if shape.orders:
        order: Sequence[Operation] = shape.orders[stage]
    else:
        stage_positions = positions(shape.num_stages, shape.num_micro_batches, shape.num_chunks, shape.depths)
        order = operations(shape.schedule, stage_positions[stage])
    begun = Counter[Operation]()
    for operation in order:
        kind, chunk, micro_batch = operation
        action = Action(chunk * shape.num_stages + stage, _KIND_OF[kind], micro_batch)
        if shape.orders and shape.late_parts[stage][chunk] and kind is not OperationKind.FORWARD:
            if kind is OperationKind.BACKWARD:
                actions.append(action._replace(kind=ActionKind.INPUT))
            else:
                actions.append(action._replace(part=begun[operation]))
                begun[operation] += 1
            continue
        parts = shape.last_parts[stage][chunk]
        if lockstep is None:
            is_cut = action.backward and micro_batch == shape.num_micro_batches - 1
        else:
            is_cut = action.backward or lockstep.gathers
        if is_cut and parts > 1:
            actions += [action._replace(part=part) for part in range(parts)]
        else:
            actions.append(action)
    return actions


class _Walk:
    def __init__(
        self,
        pipelines: Sequence[StepShape],
        reductions: Sequence[frozenset[LastBackward]],
        lockstep: Sequence[Lockstep],
    ) -> None:
        self.stages = [[_Stage(p, s, shape) for s in range(shape.num_stages)] for p, shape in enumerate(pipelines)]
        joined = {at for crew in lockstep for at in crew.stages}
        self._crews = [self._crew(sorted(crew.stages), crew) for crew in lockstep]
        self._crews += [
            self._crew([(stage.pipeline, stage.number)], None)
            for stages in self.stages
            for stage in stages
            if (stage.pipeline, stage.number) not in joined
        ]
        self._crew_of = {(stage.pipeline, stage.number): crew for crew in self._crews for stage in crew.stages}
        # When what happens to which crew: a message comes to one of its stages, or (None) an operation ends.
        self._events: list[tuple[float, int, int, int, _Crew, tuple[_Stage, Action] | None]] = []
        self._count = 0
        self._reductions = reductions
        self._missing = [len(parts) for parts in reductions]
        self._waiting: dict[LastBackward, list[int]] = {}
        for number, parts in enumerate(reductions):
            for part in parts:
                self._waiting.setdefault(part, []).append(number)

    def _crew(self, places: Sequence[tuple[int, int]], lockstep: Lockstep | None) -> _Crew:
        stages = [self.stages[p][s] for p, s in places]
        stage_actions = [_computes(stage.shape, stage.number, lockstep) for stage in stages]
        for stage, todo in zip(stages, stage_actions, strict=True):
            if todo != stage_actions[0]:
                first = stages[0]
                raise InputError(
                    f"a step would hang: stage {stage.number} of pipeline {stage.pipeline}, with "
                    f"{stage.shape.num_micro_batches} micro-batches, gathers or scatters another number of times than "
                    f"stage {first.number} of pipeline {first.pipeline}, with {first.shape.num_micro_batches}; give "
                    "pipelines equally many stages, layers and micro-batches"
                )
        return _Crew(stages, stage_actions[0], lockstep)

    def run(self) -> None:
        for crew in self._crews:
            self._begin(crew, 0.0)
        while self._events:
            now_s, _, _, _, crew, came = heappop(self._events)
            if came is None:
                self._end(crew, now_s)
            else:
                stage, action = came
                stage.came.add(action)
            self._begin(crew, now_s)
        for crew in self._crews:
            for stage in crew.stages:
                if crew.todo:
                    raise InputError(
                        f"schedule {stage.shape.schedule}: operations wait for each other for ever: stage "
                        f"{stage.number} for the input of {crew.todo[0]}; run what they wait for before"
                    )
        assert not any(self._missing), "a reduction waits for a backward that there is not"

    def _begin(self, crew: _Crew, now_s: float) -> None:
        """Start the next operation if all who run it are free and have its input."""
        if crew.running or not crew.todo:
            return
        action = crew.todo[0]
        if any(stage.lacks_input(action) for stage in crew.stages):
            return
        crew.running = True
        if crew.lockstep is not None and crew.lockstep.gathers:
            crew.gather(action)
        self._at(now_s + max(stage.seconds(action) for stage in crew.stages), crew, None)

    def _at(self, time_s: float, crew: _Crew, came: tuple[_Stage, Action] | None) -> None:
        self._count += 1
        stage = crew.stages[0] if came is None else came[0]
        heappush(self._events, (time_s, stage.pipeline, stage.number, self._count, crew, came))

    def _end(self, crew: _Crew, now_s: float) -> None:
        action = crew.todo.popleft()
        crew.running = False
        crew.put(action)
        if action.kind is not ActionKind.WEIGHTS and crew.is_last_part(action):
            for stage in crew.stages:
                self._pass_on(stage, action, now_s)
        if action.backward and crew.lockstep is not None:
            crew.put(UnitCollective(True, action))
        for stage in crew.stages:
            if action.backward and action.micro_batch == stage.shape.num_micro_batches - 1:
                for part in stage.complete_parts(action):
                    self._reduce(LastBackward(stage.pipeline, stage.number, stage.chunk(action), part))

    def _pass_on(self, stage: _Stage, action: Action, now_s: float) -> None:
        """Put what has been computed into the lists of who sends and who receives it."""
        shape, (sent, received, step) = stage.shape, _MESSAGE[action.kind]
        target = action.stage + step
        if 0 <= target < shape.num_stages * shape.num_chunks:
            stage.done.append(Action(action.stage, sent, action.micro_batch))
            receiver = self.stages[stage.pipeline][target % shape.num_stages]
            came = Action(target, received, action.micro_batch)
            receiver.done.append(came)
            came_s = now_s + shape.message_s[stage.number][action.backward]
            self._at(came_s, self._crew_of[receiver.pipeline, receiver.number], (receiver, came))

    def _reduce(self, part: LastBackward) -> None:
        for number in self._waiting.get(part, ()):
            self._missing[number] -= 1
            if not self._missing[number]:
                for pipeline, stage in sorted({(p, s) for p, s, _, _ in self._reductions[number]}):
                    self.stages[pipeline][stage].done.append(Reduction(number))
